"""The one forward walk of a stage: layers over a super-chunk, each in an attention half and an expert half.

    for each layer of the stage:
      for each sub-chunk: attention half -> router -> keep expert input, ids and weights
      expert half: every group of rows routed to an expert, experts in upload order
      combine in a fixed order

Chunk-major is S == c of this code and decode is a super-chunk of one row per sequence; there is no other
path. What differs per walk is data: sizes, upload policy, segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from strata_coord.ipc.messages import NotFinite, SuperChunk
from strata_coord.stage_worker.backend import Backend, Stream
from strata_coord.stage_worker.dense import DenseWeights
from strata_coord.stage_worker.expert_half import ExpertHalf
from strata_coord.stage_worker.finite_guard import FiniteGuard
from strata_coord.stage_worker.models.family import ExpertHalfInput, Family, Layer, SegmentRows
from strata_coord.stage_worker.residency import Residency
from strata_coord.stage_worker.sequence_state import StatePool
from strata_coord.stage_worker.stager import Stager
from strata_coord.stage_worker.sub_chunks import SubChunk, cut_sub_chunks
from strata_coord.stage_worker.uploads import stream_all_order


class WalkObserver(Protocol):
    """What the walk reports as it goes; the worker turns it into status page words and spans."""

    def attention_half(self, layer: int) -> None:
        """The attention half of layer begins."""

    def expert_half(self, layer: int) -> None:
        """The expert half of layer begins."""

    def layer_done(self, layer: int, counts: Sequence[int]) -> None:
        """Layer is finished; counts are the rows of each routed expert."""

    def head(self) -> None:
        """The head begins."""

    def advance(self) -> None:
        """A part of the half layer or the head is done. On a slow device a whole one may take minutes."""


@dataclass(slots=True, kw_only=True)
class WalkBuffers:
    """What the expert half keeps of every row of a super-chunk; taken once, at plan time."""

    x_SD: torch.Tensor  # expert input
    sum_SD: torch.Tensor  # accumulator
    ids_SK: torch.Tensor
    weights_SK: torch.Tensor

    @classmethod
    def allocate(
        cls, *, max_rows: int, hidden_size: int, experts_per_token: int, device: torch.device
    ) -> "WalkBuffers":
        """Room for max_rows rows."""
        return cls(
            x_SD=torch.empty(max_rows, hidden_size, device=device),
            sum_SD=torch.empty(max_rows, hidden_size, device=device),
            ids_SK=torch.empty(max_rows, experts_per_token, dtype=torch.int64, device=device),
            weights_SK=torch.empty(max_rows, experts_per_token, device=device),
        )


def layer_group(layer: int) -> str:
    """The name of a layer's group of dense weights."""
    return f"blk.{layer}"


class Walk:
    """Runs super-chunks through the layers [first_layer, last_layer) of one stage."""

    def __init__(
        self,
        *,
        family: Family,
        first_layer: int,
        last_layer: int,
        dense: DenseWeights,
        residency: Residency,
        expert_half: ExpertHalf,
        stager: Stager,
        states: StatePool,
        compute: Stream,
        backend: Backend,
        max_rows: int,
        observer: WalkObserver,
    ) -> None:
        """Build the walk; dense has a group layer_group(layer) for each own layer."""
        self._layers = [family.layers[layer] for layer in range(first_layer, last_layer)]
        self._dense = dense
        self._residency = residency
        self._experts = family.geometry.experts
        self._expert_half = expert_half
        self._stager = stager
        self._states = states
        self._compute = compute
        self._observer = observer
        self._buffers = WalkBuffers.allocate(
            max_rows=max_rows,
            hidden_size=family.geometry.hidden_size,
            experts_per_token=self._experts.experts_per_token,
            device=backend.device,
        )

    def run(
        self,
        super_chunk: SuperChunk,
        rows_SW: torch.Tensor,
        token_ids: Sequence[torch.Tensor],
        *,
        is_cancelled: Callable[[], bool],
    ) -> tuple[NotFinite, ...] | None:
        """Update rows_SW, fp32 [rows of the super-chunk, row width], in place.

        token_ids: per segment, int64 ids of all positions of its sequence up to the segment's end. Returns
        the sequences whose values did not stay finite: their rows are NaN and their state is of no use.
        None: the walk was given up at a layer's edge because is_cancelled said so; the state of all
        sequences and the rows are then of no use.
        """
        sub_chunks = cut_sub_chunks(super_chunk.segments, max_rows=super_chunk.sub_chunk_tokens)
        if super_chunk.upload == "stream-all":
            indices = [layer.index for layer in self._layers if self._experts.count(layer.index)]
            self._stager.plan(
                stream_all_order(self._residency, layers=indices, num_experts=self._experts.num_experts)
            )
        guard = FiniteGuard(super_chunk.segments, rows_SW)
        for layer in self._layers:
            if is_cancelled():
                self._stager.abandon(self._compute)
                return None
            self._run_layer(layer, super_chunk, sub_chunks, rows_SW, token_ids, guard)
        return guard.finish(rows_SW)

    def _run_layer(
        self,
        layer: Layer,
        super_chunk: SuperChunk,
        sub_chunks: Sequence[SubChunk],
        rows_SW: torch.Tensor,
        token_ids: Sequence[torch.Tensor],
        guard: FiniteGuard,
    ) -> None:
        buffers, num_rows = self._buffers, rows_SW.shape[0]
        self._observer.attention_half(layer.index)
        weights = self._dense.expand(layer_group(layer.index))
        halves: list[ExpertHalfInput] = []
        for sub in sub_chunks:
            half = layer.attention_half(
                rows_SW[sub.start : sub.stop], self._segment_rows(super_chunk, sub, token_ids), weights
            )
            for piece in sub.pieces:
                if piece.snapshot:
                    self._states.copy_histories(piece.snapshot, layer.index)
            here = slice(sub.start, sub.stop)
            buffers.x_SD[here] = half.x_TD
            buffers.ids_SK[here] = half.ids_TK
            buffers.weights_SK[here] = half.weights_TK
            halves.append(half)
            self._observer.advance()
        guard.after_attention(
            layer.index,
            rows_SW=rows_SW,
            x_SD=buffers.x_SD[:num_rows],
            weights_SK=buffers.weights_SK[:num_rows],
        )
        num_experts = self._experts.count(layer.index)
        num_routed = num_rows if num_experts else 0
        routed = self._expert_half.sort(
            layer.index,
            buffers.ids_SK[:num_routed],
            buffers.weights_SK[:num_routed],
            num_experts=self._experts.num_experts,
        )
        # The shared expert starts the sum, so that it can run while the uploads are on their way.
        for sub in sub_chunks:
            here = slice(sub.start, sub.stop)
            shared_TD = layer.shared_expert(buffers.x_SD[here], weights)
            if shared_TD is None:
                buffers.sum_SD[here].zero_()
            else:
                buffers.sum_SD[here] = shared_TD
        self._observer.expert_half(layer.index)
        if num_experts:
            self._expert_half.run(
                layer.index,
                x_SD=buffers.x_SD[:num_rows],
                weights_SK=buffers.weights_SK[:num_rows],
                rows=routed,
                policy=super_chunk.upload,
                sum_SD=buffers.sum_SD[:num_rows],
                mlp=layer.expert_mlp(weights),
            )
        for sub, half in zip(sub_chunks, halves, strict=True):
            here = slice(sub.start, sub.stop)
            layer.combine(rows_SW[here], buffers.sum_SD[here], half)
        guard.after_experts(layer.index, rows_SW)
        self._observer.layer_done(layer.index, routed.counts_by_expert())

    def _segment_rows(
        self, super_chunk: SuperChunk, sub: SubChunk, token_ids: Sequence[torch.Tensor]
    ) -> list[SegmentRows]:
        return [
            SegmentRows(
                start=piece.start,
                stop=piece.stop,
                first_position=piece.first_position,
                state=self._states.get(super_chunk.segments[piece.segment].sequence),
                token_ids=token_ids[piece.segment][: piece.first_position + piece.stop - piece.start],
            )
            for piece in sub.pieces
        ]
