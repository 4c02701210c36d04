"""Mixer: causal grouped-query attention with per-head norms, RoPE and, in gated models, an output gate.

Projections and rotation run on the sub-chunk as one matrix; each segment then attends to its own sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.ipc.assignment import AttentionGeometry, ModelGeometry
from strata_coord.kernels.attention import causal_attention
from strata_coord.kernels.norm import rms_norm
from strata_coord.kernels.rope import rotary_table, rotate
from strata_coord.stage_worker.models.family import LayerWeights, SegmentRows, TensorShapes, require_tensor

Angles = tuple[Tensor, Tensor]


class Rotary:
    """Rotation angles of the rows at hand, computed once for all layers of a family.

    Layers ask in turn for the same segments, sub-chunk after sub-chunk, so the sets of one super-chunk are
    kept.
    """

    def __init__(self, dims: int, base: float, *, kept: int = 64) -> None:
        self.dims = dims
        self.base = base
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
        return rotary_table(positions_T, self.dims, self.base)


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

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape."""
        head_dim, hidden = self.geometry.head_dim, self.hidden_size
        return {
            "attn_q.weight": (self.query_rows, hidden),
            "attn_k.weight": (self.kv_rows, hidden),
            "attn_v.weight": (self.kv_rows, hidden),
            "attn_q_norm.weight": (head_dim,),
            "attn_k_norm.weight": (head_dim,),
            "attn_output.weight": (hidden, self.geometry.num_heads * head_dim),
        }

    def mix(self, x_TD: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> Tensor:
        """Return y [T, D]; keys and values of the rows join their sequences' states."""
        rows, head_dim = x_TD.shape[0], self.geometry.head_dim
        q_weight, k_weight, v_weight = self._projections(weights)
        q = functional.linear(x_TD, q_weight).view(rows, self.geometry.num_heads, -1)
        gate = None
        if self.geometry.gated:
            q, gate = torch.split(q, head_dim, dim=-1)
        k = functional.linear(x_TD, k_weight).view(rows, self.geometry.num_kv_heads, head_dim)
        v = functional.linear(x_TD, v_weight).view(rows, self.geometry.num_kv_heads, head_dim)
        q = rms_norm(q, require_tensor(weights, "attn_q_norm.weight", self.layer), self.eps)
        k = rms_norm(k, require_tensor(weights, "attn_k_norm.weight", self.layer), self.eps)
        cos, sin = self.rotary.of_rows(segments, x_TD.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

        out = torch.empty_like(q)
        for segment in segments:
            here = slice(segment.start, segment.stop)
            segment.state.advance(self.layer, segment.first_position, segment.count)
            segment.state.write_kv(self.layer, segment.first_position, k[here], v[here])
            out[here] = self.attend(x_TD, q[here], segment, weights)
        if gate is not None:
            out.mul_(torch.sigmoid(gate))
        output = require_tensor(weights, "attn_output.weight", self.layer)
        return functional.linear(out.view(rows, -1), output)

    def attend(self, x_TD: Tensor, q_TQD: Tensor, segment: SegmentRows, weights: LayerWeights) -> Tensor:
        """Return the attention [rows of the segment, heads, head dim]; the segment's keys are stored already.

        x_TD is the whole sub-chunk's input.
        """
        del x_TD, weights
        k, v = segment.state.read_kv(self.layer, segment.first_position + segment.count)
        return causal_attention(q_TQD, k, v, segment.first_position)

    def _projections(self, weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        fused = weights.get("attn_qkv.weight")
        if fused is not None and "attn_q.weight" not in weights:
            q, k, v = torch.split(fused, [self.query_rows, self.kv_rows, self.kv_rows])
            return q, k, v
        return (
            require_tensor(weights, "attn_q.weight", self.layer),
            require_tensor(weights, "attn_k.weight", self.layer),
            require_tensor(weights, "attn_v.weight", self.layer),
        )
