"""Mixer: Gated DeltaNet, linear attention with a fixed-size state per sequence.

Projections run on the sub-chunk as one matrix; the convolution and the delta rule run segment by segment.
Head order and output gate differ between architectures and come from the geometry.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.ipc.assignment import DeltaNetGeometry, ModelGeometry
from strata_coord.kernels.causal_conv import causal_conv_silu
from strata_coord.kernels.gated_delta import gated_delta
from strata_coord.kernels.linear import linear
from strata_coord.kernels.norm import rms_norm
from strata_coord.stage_worker.models.family import LayerWeights, SegmentRows, TensorShapes, require_tensor


class GatedDeltaNet:
    """Gated DeltaNet of one layer."""

    def __init__(self, geometry: ModelGeometry, delta: DeltaNetGeometry, layer: int) -> None:
        self.delta = delta
        self.hidden_size = geometry.hidden_size
        self.eps = geometry.rms_epsilon
        self.layer = layer
        self.key_width = delta.num_key_heads * delta.head_dim
        self.value_width = delta.num_value_heads * delta.head_dim
        self.channels = 2 * self.key_width + self.value_width

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape of the plain form; _projected and _head_inputs know the others."""
        heads, hidden = self.delta.num_value_heads, self.hidden_size
        channels = self.channels
        return {
            "attn_qkv.weight": (channels, hidden),
            "attn_gate.weight": (self.value_width, hidden),
            "ssm_alpha.weight": (heads, hidden),
            "ssm_beta.weight": (heads, hidden),
            "ssm_conv1d.weight": (channels, self.delta.conv_kernel),
            "ssm_a": (heads,),
            "ssm_dt.bias": (heads,),
            "ssm_norm.weight": (self.delta.head_dim,),
            "ssm_out.weight": (hidden, self.value_width),
        }

    def mix(self, x_TD: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> Tensor:
        """Return y [T, D]; convolution history and recurrent state of each segment move on."""

        def weight(name: str) -> Tensor:
            return require_tensor(weights, name, self.layer)

        rows, dim = x_TD.shape[0], self.delta.head_dim
        u_TC, gate_TV = self._projected(x_TD, weights)
        beta_TH, alpha_TH = self._head_inputs(x_TD, weights)
        beta_TH = torch.sigmoid(beta_TH)
        # ssm_a already holds -exp(A_log), so g is negative.
        g_TH = functional.softplus(alpha_TH + weight("ssm_dt.bias")) * weight("ssm_a")

        out_THV = x_TD.new_empty((rows, self.delta.num_value_heads, dim))
        for segment in segments:
            here = slice(segment.start, segment.stop)
            segment.state.advance(self.layer, segment.first_position, segment.count)
            mixed = causal_conv_silu(u_TC[here], segment.state.conv(self.layer), weight("ssm_conv1d.weight"))
            q, k, v = torch.split(mixed, [self.key_width, self.key_width, self.value_width], dim=1)
            out_THV[here] = gated_delta(
                q.reshape(segment.count, -1, dim),
                k.reshape(segment.count, -1, dim),
                v.reshape(segment.count, -1, dim),
                g_TH[here],
                beta_TH[here],
                segment.state.recurrent(self.layer),
                first_position=segment.first_position,
                order=self.delta.head_order,
            )
        normed = rms_norm(out_THV, weight("ssm_norm.weight"), self.eps)
        gate = gate_TV.view_as(normed)
        activation = torch.sigmoid if self.delta.output_gate == "sigmoid" else functional.silu
        return linear((normed * activation(gate)).view(rows, -1), weight("ssm_out.weight"))

    def _projected(self, x_TD: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
        """Return the rows of queries, keys and values [T, C], and the output gate's [T, V].

        Older files of grouped models have one ssm_in, whose rows lie per key head: its queries, its keys, the
        values of its r value heads, their gates.
        """
        legacy = weights.get("ssm_in.weight")
        if legacy is None or "attn_qkv.weight" in weights:
            qkv = require_tensor(weights, "attn_qkv.weight", self.layer)
            gate = require_tensor(weights, "attn_gate.weight", self.layer)
            return linear(x_TD, qkv), linear(x_TD, gate)
        rows, key_heads, dim = x_TD.shape[0], self.delta.num_key_heads, self.delta.head_dim
        values = self.value_width // key_heads
        heads = linear(x_TD, legacy).view(rows, key_heads, -1)
        q, k, v, gate = torch.split(heads, [dim, dim, values, values], dim=-1)
        return torch.cat([part.reshape(rows, -1) for part in (q, k, v)], dim=1), gate.reshape(rows, -1)

    def _head_inputs(self, x_TD: Tensor, weights: LayerWeights) -> tuple[Tensor, Tensor]:
        """Return beta's and alpha's inputs, each [T, H].

        Grouped models have one ssm_ba, whose rows lie per key head: beta of its r value heads, then alpha.
        """
        joint = weights.get("ssm_ba.weight")
        if joint is None or "ssm_beta.weight" in weights:
            beta = require_tensor(weights, "ssm_beta.weight", self.layer)
            alpha = require_tensor(weights, "ssm_alpha.weight", self.layer)
            return linear(x_TD, beta), linear(x_TD, alpha)
        rows, key_heads = x_TD.shape[0], self.delta.num_key_heads
        heads = linear(x_TD, joint).view(rows, key_heads, 2, -1)
        return heads[:, :, 0].reshape(rows, -1), heads[:, :, 1].reshape(rows, -1)
