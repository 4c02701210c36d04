"""Mixer: gated attention in which an indexer picks the blocks of tokens that each query sees (QSA).

The indexer's raw keys are averaged over blocks of r positions, normed, and rotated at the block's start; such
a block key is final, so finished ones are kept and at most r - 1 raw keys besides. While every row sees at
most the budget the selection cannot exclude anything, and plain causal attention runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.ipc.assignment import ModelGeometry, SparseAttentionGeometry
from strata_coord.kernels.attention import attend, query_tiles
from strata_coord.kernels.block_select import block_scores, select_blocks, visible_tokens
from strata_coord.kernels.norm import rms_norm
from strata_coord.kernels.rope import rotate
from strata_coord.stage_worker.models.attention import Attention, Rotary
from strata_coord.stage_worker.models.family import LayerWeights, SegmentRows, TensorShapes, require_tensor


class SparseAttention(Attention):
    """Attention of one QSA layer. All query heads share one selection."""

    def __init__(
        self, geometry: ModelGeometry, sparse: SparseAttentionGeometry, layer: int, rotary: Rotary
    ) -> None:
        super().__init__(geometry, layer, rotary)
        self.sparse = sparse
        self.block = sparse.compress_ratios[layer]

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
        raw_TI = functional.linear(x_TD, require_tensor(weights, "indexer.k_proj.weight", self.layer))
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
        stop = segment.first_position + segment.count
        if stop <= self.sparse.budget_tokens + self.block - 1:
            return super().attend(x_TD, q_TQD, segment, weights)
        index_q = self._index_queries(x_TD[segment.start : segment.stop], segment, weights)
        keys_MI = segment.state.read_blocks(self.layer, stop // self.block)
        k, v = segment.state.read_kv(self.layer, stop)
        out = torch.empty_like(q_TQD)
        for start, end in query_tiles(segment.count, stop):
            first = segment.first_position + start
            length = segment.first_position + end
            complete_T = torch.arange(first + 1, length + 1, device=q_TQD.device) // self.block
            scores_TM = block_scores(index_q[start:end], keys_MI[: length // self.block])
            selected_TM = select_blocks(scores_TM, complete_T, self.sparse.budget_tokens // self.block)
            visible_TL = visible_tokens(selected_TM, first, length, self.block)
            out[start:end] = attend(q_TQD[start:end], k[:, :length], v[:, :length], visible_TL)
        return out

    def _index_queries(self, x_TD: Tensor, segment: SegmentRows, weights: LayerWeights) -> Tensor:
        q = functional.linear(x_TD, require_tensor(weights, "indexer.q_proj.weight", self.layer))
        q = q.view(x_TD.shape[0], self.sparse.num_heads, self.sparse.head_dim)
        q = rms_norm(q, require_tensor(weights, "indexer.q_norm.weight", self.layer), self.eps)
        cos, sin = self.rotary.of_rows([segment], x_TD.device)
        return rotate(q, cos, sin)
