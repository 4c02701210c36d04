"""Mixer: causal grouped-query attention with RoPE; per-head norms, biases and an output gate by the model.

Projections and rotation run on the sub-chunk as one matrix; each segment then attends to its own sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from strata_coord.ipc.assignment import AttentionGeometry, ModelGeometry, YarnGeometry
from strata_coord.kernels.attention import causal_attention
from strata_coord.kernels.cuda_attention import attention_way, causal_attention_cuda
from strata_coord.kernels.linear import linear
from strata_coord.kernels.norm import rms_norm
from strata_coord.kernels.rope import rotary_table, rotate, rotate_neighbours, yarn_frequencies
from strata_coord.stage_worker.models.family import LayerWeights, SegmentRows, TensorShapes, require_tensor

Angles = tuple[Tensor, Tensor]


class Rotary:
    """Rotation angles of the rows at hand, computed once for all layers of a family.

    Layers ask in turn for the same segments, sub-chunk after sub-chunk, so the sets of one super-chunk are
    kept.
    """

    def __init__(self, dims: int, base: float, *, yarn: YarnGeometry | None = None, kept: int = 64) -> None:
        self.dims = dims
        self.base = base
        self.yarn = yarn
        self._kept = kept
        self._tables: dict[tuple[tuple[int, int], ...], Angles] = {}

    def of_rows(self, segments: Sequence[SegmentRows], device: torch.device) -> Angles:
        """Return (cos, sin) of every row of a sub-chunk."""
        key = tuple((segment.first_position, segment.count) for segment in segments)
        table = self._tables.get(key)
        if table is None:
            positions = torch.cat([torch.arange(first, first + count, device=device) for first, count in key])
            table = self.of_positions(positions)
            while len(self._tables) >= self._kept:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = table
        return table

    def of_positions(self, positions_T: Tensor) -> Angles:
        """Return (cos, sin) of any positions."""
        yarn = self.yarn
        if yarn is None:
            return rotary_table(positions_T, self.dims, self.base)
        frequencies = yarn_frequencies(
            self.dims,
            self.base,
            factor=yarn.factor,
            original_tokens=yarn.original_tokens,
            beta_fast=yarn.beta_fast,
            beta_slow=yarn.beta_slow,
            whole_pairs=yarn.whole_pairs,
            device=positions_T.device,
        )
        return rotary_table(
            positions_T, self.dims, self.base, frequencies=frequencies, magnitude=yarn.magnitude
        )


class Attention:
    """Attention of one layer; SparseAttention changes only how a segment attends."""

    def __init__(self, geometry: ModelGeometry, layer: int, rotary: Rotary) -> None:
        self.geometry: AttentionGeometry = geometry.attention
        self.hidden_size = geometry.hidden_size
        self.eps = geometry.rms_epsilon
        self.layer = layer
        self.rotary = rotary
        self.query_rows = self.geometry.num_heads * self.geometry.head_dim * (2 if self.geometry.gated else 1)
        self.kv_rows = self.geometry.num_kv_heads * self.geometry.head_dim
        self.rotate = rotate if self.geometry.rope_pairs == "halves" else rotate_neighbours
        self.window = self.geometry.windows[layer] if self.geometry.windows else 0

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape."""
        head_dim, hidden = self.geometry.head_dim, self.hidden_size
        rows = {"attn_q": self.query_rows, "attn_k": self.kv_rows, "attn_v": self.kv_rows}
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, hidden) for name, out in rows.items()}
        if self.geometry.projection_biases:
            shapes |= {f"{name}.bias": (out,) for name, out in rows.items()}
        if self.geometry.head_norms:
            shapes |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes["attn_output.weight"] = (hidden, self.geometry.num_heads * head_dim)
        if self.geometry.output_bias:
            shapes["attn_output.bias"] = (hidden,)
        if self.geometry.sinks:
            shapes["attn_sinks.weight"] = (self.geometry.num_heads,)
        return shapes

    def mix(self, x_TD: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> Tensor:
        """Return y [T, D]; keys and values of the rows join their sequences' states."""
        rows, head_dim = x_TD.shape[0], self.geometry.head_dim
        q_weight, k_weight, v_weight = self._projections(weights, "weight")
        q_bias, k_bias, v_bias = (
            self._projections(weights, "bias") if self.geometry.projection_biases else (None, None, None)
        )
        q = linear(x_TD, q_weight, q_bias).view(rows, self.geometry.num_heads, -1)
        gate = None
        if self.geometry.gated:
            q, gate = torch.split(q, head_dim, dim=-1)
        k = linear(x_TD, k_weight, k_bias).view(rows, self.geometry.num_kv_heads, head_dim)
        v = linear(x_TD, v_weight, v_bias).view(rows, self.geometry.num_kv_heads, head_dim)
        if self.geometry.head_norms:
            q = rms_norm(q, require_tensor(weights, "attn_q_norm.weight", self.layer), self.eps)
            k = rms_norm(k, require_tensor(weights, "attn_k_norm.weight", self.layer), self.eps)
        cos, sin = self.rotary.of_rows(segments, x_TD.device)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)

        out = torch.empty_like(q)
        for segment in segments:
            here = slice(segment.start, segment.stop)
            segment.state.advance(self.layer, segment.first_position, segment.count)
            segment.state.write_kv(self.layer, segment.first_position, k[here], v[here])
            out[here] = self.attend(x_TD, q[here], segment, weights)
        if gate is not None:
            out.mul_(torch.sigmoid(gate))
        output = require_tensor(weights, "attn_output.weight", self.layer)
        bias = require_tensor(weights, "attn_output.bias", self.layer) if self.geometry.output_bias else None
        return linear(out.reshape(rows, -1), output, bias)

    def attend(self, x_TD: Tensor, q_TQD: Tensor, segment: SegmentRows, weights: LayerWeights) -> Tensor:
        """Return the attention [rows of the segment, heads, head dim]; the segment's keys are stored already.

        x_TD is the whole sub-chunk's input.
        """
        del x_TD
        length = segment.first_position + segment.count
        sinks = require_tensor(weights, "attn_sinks.weight", self.layer) if self.geometry.sinks else None
        dtype = require_tensor(weights, "attn_output.weight", self.layer).dtype  # of the launch's products
        way, _ = attention_way(
            q_TQD.device, dtype, q_TQD.shape[2], window=self.window, has_sinks=sinks is not None
        )
        if way != "masks":
            k, v = segment.state.read_kv(self.layer, length, dtype=dtype)
            out = causal_attention_cuda(q_TQD.to(dtype), k, v, segment.first_position, way=way)
            return out.to(q_TQD.dtype)
        k, v = segment.state.read_kv(self.layer, length)
        return causal_attention(q_TQD, k, v, segment.first_position, window=self.window, sinks_Q=sinks)

    def _projections(self, weights: LayerWeights, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query, key and value parts of what the file has: three tensors, or one with all rows."""
        fused = weights.get(f"attn_qkv.{kind}")
        if fused is not None and f"attn_q.{kind}" not in weights:
            # A converter may write a bias as [1, rows]; rows are the first axis of a matrix.
            rows = fused.flatten() if kind == "bias" else fused
            q, k, v = torch.split(rows, [self.query_rows, self.kv_rows, self.kv_rows])
            return q, k, v
        q, k, v = (require_tensor(weights, f"attn_{part}.{kind}", self.layer) for part in "qkv")
        return q, k, v
