"""Mixer: gated attention in which an indexer picks the blocks of tokens that each query sees (QSA).

The indexer's raw keys are averaged over blocks of r positions, normed, and rotated at the block's start; such
a block key is final, so finished ones are kept and at most r - 1 raw keys besides. While every row sees at
most the budget the selection cannot exclude anything, and plain causal attention runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from strata_coord.ipc.assignment import ModelGeometry, SparseAttentionGeometry
from strata_coord.kernels.attention import attend, query_tiles
from strata_coord.kernels.block_select import block_scores, select_blocks, visible_tokens
from strata_coord.kernels.linear import linear
from strata_coord.kernels.norm import rms_norm
from strata_coord.kernels.rope import rotate
from strata_coord.kernels.selected_attention import attend_selected, gather_tile_rows, selected_positions
from strata_coord.stage_worker.models.attention import Attention, Rotary
from strata_coord.stage_worker.models.family import LayerWeights, SegmentRows, TensorShapes, require_tensor
from strata_coord.stage_worker.sequence_state import SequenceState


def gather_from(budget_tokens: int, *, heads_per_group: int) -> int:
    """Return the position from which gathering a row's keys is faster than multiplying and masking all.

    A key gathered for a key-value head serves all its query heads, so the more there are, the sooner it pays.
    One CPU core, ms a row masked and gathered: 12 heads of 256 a group, budget 2,048: 2.4 and 4 at 4,096
    positions, 4.6 and 4 at 8,192, 9.9 and 4 at 16,384; 2 heads of 64, budget 512: 0.13 and 0.14 at 4,096,
    0.30 and 0.19 at 8,192.
    """
    return budget_tokens * max(4, 16 // heads_per_group)


class SparseAttention(Attention):
    """Attention of one QSA layer. All query heads share one selection."""

    def __init__(
        self, geometry: ModelGeometry, sparse: SparseAttentionGeometry, layer: int, rotary: Rotary
    ) -> None:
        super().__init__(geometry, layer, rotary)
        self.sparse = sparse
        self.block = sparse.compress_ratios[layer]
        self.gather_from = gather_from(
            sparse.budget_tokens, heads_per_group=self.geometry.num_heads // self.geometry.num_kv_heads
        )

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape."""
        dim, hidden = self.sparse.head_dim, self.hidden_size
        return {
            **super().tensors(),
            "indexer.q_proj.weight": (self.sparse.num_heads * dim, hidden),
            "indexer.k_proj.weight": (dim, hidden),
            "indexer.q_norm.weight": (dim,),
            "indexer.k_norm.weight": (dim,),
        }

    def mix(self, x_TD: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> Tensor:
        """Return y [T, D]; keys, values and block keys of the rows join their sequences' states."""
        raw_TI = linear(x_TD, require_tensor(weights, "indexer.k_proj.weight", self.layer))
        for segment in segments:
            # Before the attention, which advances the layer's position: a query's own block may be complete.
            segment.state.reserve(segment.first_position + segment.count)
            self._add_block_keys(raw_TI[segment.start : segment.stop], segment, weights)
        return super().mix(x_TD, segments, weights)

    def _add_block_keys(self, raw_TI: Tensor, segment: SegmentRows, weights: LayerWeights) -> None:
        block, state = self.block, segment.state
        kept = segment.first_position % block
        store = state.raw_keys(self.layer)
        raw = torch.cat((store[:kept], raw_TI)) if kept else raw_TI
        complete = raw.shape[0] // block
        if complete:
            first_block = segment.first_position // block
            pooled = raw[: complete * block].view(complete, block, -1).mean(1)
            normed = rms_norm(pooled, require_tensor(weights, "indexer.k_norm.weight", self.layer), self.eps)
            starts = torch.arange(first_block, first_block + complete, device=raw.device) * block
            cos, sin = self.rotary.of_positions(starts)
            state.write_blocks(self.layer, first_block, rotate(normed.unsqueeze(1), cos, sin).squeeze(1))
        rest = raw[complete * block :]
        store[: rest.shape[0]].copy_(rest)

    def attend(self, x_TD: Tensor, q_TQD: Tensor, segment: SegmentRows, weights: LayerWeights) -> Tensor:
        """Return the attention over the selected blocks and each row's tail."""
        first, stop = segment.first_position, segment.first_position + segment.count
        if stop <= self.sparse.budget_tokens + self.block - 1:
            return super().attend(x_TD, q_TQD, segment, weights)
        index_q = self._index_queries(x_TD[segment.start : segment.stop], segment, weights)
        # By position, not by segment: however a prompt is cut, a row takes the same way.
        near = min(max(self.gather_from - first, 0), segment.count)
        out = torch.empty_like(q_TQD)
        if near:
            out[:near] = self._attend_masked(q_TQD[:near], index_q[:near], first, segment.state)
        for start, end in query_tiles(segment.count - near, stop):
            here = slice(near + start, near + end)
            out[here] = self._attend_gathered(q_TQD[here], index_q[here], first + near + start, segment.state)
        return out

    def _attend_masked(
        self, q_TQD: Tensor, index_q_THI: Tensor, first_position: int, state: SequenceState
    ) -> Tensor:
        """All keys are multiplied and most are masked out: fast while the prefix is a few budgets long."""
        rows = q_TQD.shape[0]
        k, v = state.read_kv(self.layer, first_position + rows)
        out = torch.empty_like(q_TQD)
        for start, end in query_tiles(rows, first_position + rows):
            first, length = first_position + start, first_position + end
            selected_TM = self._select(index_q_THI[start:end], first, state)
            visible_TL = visible_tokens(selected_TM, first, length, self.block)
            out[start:end] = attend(q_TQD[start:end], k[:, :length], v[:, :length], visible_TL)
        return out

    def _attend_gathered(
        self, q_TQD: Tensor, index_q_THI: Tensor, first_position: int, state: SequenceState
    ) -> Tensor:
        """Each row's own keys are gathered: work and memory grow with the budget, not with the prefix."""
        kv_heads, dim = self.geometry.num_kv_heads, self.geometry.head_dim
        positions_TS, counts_TS = selected_positions(
            self._select(index_q_THI, first_position, state), first_position, self.block
        )
        selection = positions_TS.shape[1]
        out = torch.empty_like(q_TQD)
        step = gather_tile_rows(selection, kv_heads, dim)
        for start in range(0, q_TQD.shape[0], step):
            here = slice(start, start + step)
            k, v = state.read_kv_at(self.layer, positions_TS[here].flatten())
            shape = (kv_heads, -1, selection, dim)
            out[here] = attend_selected(q_TQD[here], k.view(shape), v.view(shape), counts_TS[here])
        return out

    def _select(self, index_q_THI: Tensor, first_position: int, state: SequenceState) -> Tensor:
        """Return bool [T, M]: the blocks that each row sees."""
        length = first_position + index_q_THI.shape[0]
        complete_T = torch.arange(first_position + 1, length + 1, device=index_q_THI.device) // self.block
        scores_TM = block_scores(index_q_THI, state.read_blocks(self.layer, length // self.block))
        return select_blocks(scores_TM, complete_T, self.sparse.budget_tokens // self.block)

    def _index_queries(self, x_TD: Tensor, segment: SegmentRows, weights: LayerWeights) -> Tensor:
        q = linear(x_TD, require_tensor(weights, "indexer.q_proj.weight", self.layer))
        q = q.view(x_TD.shape[0], self.sparse.num_heads, self.sparse.head_dim)
        q = rms_norm(q, require_tensor(weights, "indexer.q_norm.weight", self.layer), self.eps)
        cos, sin = self.rotary.of_rows([segment], x_TD.device)
        return rotate(q, cos, sin)
