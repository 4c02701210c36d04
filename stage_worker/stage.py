"""One stage without its process: weights, tiers, state and walk, fed by an inbound and an outbound of rows.

worker.py puts sockets, threads and a status page around this class; tests chain stages in one process. The
arithmetic is the same, since nothing here knows which of the two it is in.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from strata_coord.ipc.assignment import ComputeDtype, StageAssignment, TensorExtent
from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import NotFinite, SampledToken, Segment, SuperChunk
from strata_coord.stage_worker.backend import Backend, CpuBackend
from strata_coord.stage_worker.blobs import BlobLayout, expert_blob_layout
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.dense import DenseWeights, check_shapes
from strata_coord.stage_worker.expert_half import ExpertHalf
from strata_coord.stage_worker.expert_math import (
    ExpertMath,
    GroupedExpertMath,
    SingleExpertMath,
    grouped_refusal,
)
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.head import HEAD_GROUP, OUTPUT_GROUP, Head
from strata_coord.stage_worker.models.catalog import build_family
from strata_coord.stage_worker.ngram_rows import FileNgramTable
from strata_coord.stage_worker.residency import place_experts
from strata_coord.stage_worker.sequence_state import StatePool
from strata_coord.stage_worker.stager import Stager
from strata_coord.stage_worker.state_operations import apply_operations, reserve_segments, settle_segments
from strata_coord.stage_worker.walk import Walk, WalkObserver, layer_group

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
NGRAM_TABLE = "per_layer_token_embd.weight"
EMBEDDING_GROUP = "embedding"

WEIGHTS_DTYPES: dict[ComputeDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

Progress = Callable[[str, int, int], None]  # what is loading, bytes done, bytes in all


class Inbound(Protocol):
    """Where a later stage's rows come from."""

    def receive(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> bool:
        """Fill rows_SW with the super-chunk's rows; False if it passes without rows."""


class Outbound(Protocol):
    """Where the rows of every stage but the last go."""

    def send(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> None:
        """Pass finished rows on. They may be read until settle returns."""

    def send_without_rows(self, super_chunk: SuperChunk) -> None:
        """Pass a super-chunk that was cancelled, or that has no rows."""

    def settle(self) -> None:
        """Block until no copy reads rows that were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuperChunkResult:
    """What came of a super-chunk at this stage."""

    cancelled: bool
    tokens: tuple[SampledToken, ...]
    not_finite: tuple[NotFinite, ...] = ()


class Stage:
    """A layer range on a device."""

    def __init__(
        self,
        assignment: StageAssignment,
        *,
        observer: WalkObserver,
        clock: ActivityClock | None = None,
        counters: TransferCounters | None = None,
        arena: torch.Tensor | None = None,
        backend: Backend | None = None,
    ) -> None:
        """Take all room that prompts need; load() reads the weights.

        Raises:
            ModelError: a tensor is missing or has a shape that the architecture's maths cannot take.
        """
        self.assignment = assignment
        self.notes: list[str] = []  # what this stage does less well than it could, and why
        self._observer = observer
        self.clock = clock or ActivityClock()
        self.counters = counters or TransferCounters()
        self.backend = backend or CpuBackend()
        self._reader = ByteReader(assignment.files, self.counters)
        self.compute = self.backend.compute_stream()
        geometry, tensors = assignment.geometry, {extent.name: extent for extent in assignment.tensors}
        layers = range(assignment.first_layer, assignment.last_layer)

        table = tensors.get(NGRAM_TABLE)
        self._family = build_family(geometry, table=FileNgramTable(table, self._reader) if table else None)
        layouts = [
            expert_blob_layout(layer, tensors, num_experts=geometry.experts.count(layer)) for layer in layers
        ]
        self._tiers = ExpertTiers(
            layouts=layouts,
            residency=place_experts(
                layouts, resident=assignment.resident_experts, in_arena=assignment.arena_experts
            ),
            backend=self.backend,
            reader=self._reader,
            arena=arena,
        )
        self._stager = Stager(
            tiers=self._tiers,
            backend=self.backend,
            window_slots=assignment.window_slots,
            counters=self.counters,
            upload_group=assignment.upload_group,
        )
        groups = _dense_groups(tensors, layouts, layers=layers, is_last=self.is_last)
        for layer in layers:
            check_shapes(groups[layer_group(layer)], self._family.layers[layer].dense_tensors())
        if self.is_last:
            check_shapes(groups[HEAD_GROUP], self._family.head_tensors())
        weights_dtype = WEIGHTS_DTYPES[assignment.compute_dtype]
        self._dense = DenseWeights(groups, backend=self.backend, reader=self._reader, dtype=weights_dtype)
        self._head = (
            Head(family=self._family, dense=self._dense, advance=observer.advance) if self.is_last else None
        )
        self._embedding: DenseWeights | None = None
        if self.is_first:
            # Rows are looked up one by one, so the matrix stays in host memory whatever the device.
            embedding = {EMBEDDING_GROUP: {EMBEDDING: tensors[EMBEDDING]}}
            self._embedding = DenseWeights(embedding, backend=CpuBackend(), reader=self._reader)
        self._states = StatePool(
            geometry,
            assignment.first_layer,
            assignment.last_layer,
            kv_dtype=assignment.kv_dtype,
            kv_pool_tokens=assignment.kv_pool_tokens,
            max_sequences=assignment.max_sequences,
            max_snapshots=assignment.max_snapshots,
            device=self.backend.device,
        )
        self._rows = torch.empty(
            assignment.super_chunk_tokens,
            geometry.row_width,
            dtype=torch.float32,
            device=self.backend.device,
        )
        # Sequences given up, alone or with a walk -> position from which on their state is of no use.
        self._lost: dict[int, int] = {}
        self._walk = Walk(
            family=self._family,
            first_layer=assignment.first_layer,
            last_layer=assignment.last_layer,
            dense=self._dense,
            residency=self._tiers.residency,
            expert_half=ExpertHalf(
                tiers=self._tiers,
                stager=self._stager,
                compute=self.compute,
                clock=self.clock,
                counters=self.counters,
                math=self._expert_math(layouts, weights_dtype),
                advance=observer.advance,
            ),
            stager=self._stager,
            states=self._states,
            compute=self.compute,
            backend=self.backend,
            max_rows=assignment.super_chunk_tokens,
            observer=observer,
        )

    def _expert_math(self, layouts: Sequence[BlobLayout], dtype: torch.dtype) -> ExpertMath:
        """Grouped products where the device and the experts allow, else one expert after the other."""
        assignment, experts = self.assignment, self.assignment.geometry.experts
        with_experts = [layout for layout in layouts if layout.num_experts]
        if self.backend.multiplies_batches and with_experts:
            is_plain = experts.activation == "swiglu" and not experts.biases
            refusal = grouped_refusal(with_experts, is_plain=is_plain, dtype=dtype)
            if refusal is None:
                return GroupedExpertMath(
                    with_experts,
                    max_batch=max(assignment.upload_group, 1),
                    pass_rows=assignment.expert_group_rows,
                    device=self.backend.device,
                )
            self.notes.append(f"experts are multiplied one by one: {refusal}")
        return SingleExpertMath(
            layouts,
            group_rows=assignment.expert_group_rows,
            dtype=dtype,
            device=self.backend.device,
        )

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds."""
        return self.assignment.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.assignment.stage == self.assignment.num_stages - 1

    def load(self, *, progress: Progress) -> None:
        """Read this stage's weights from the files, nothing else."""
        self._dense.load(progress=lambda done, total: progress("dense weights", done, total))
        if self._embedding is not None:
            self._embedding.load(progress=lambda done, total: progress("embedding", done, total))
        self._tiers.load(progress=lambda done, total: progress("experts", done, total))

    def run(
        self,
        super_chunk: SuperChunk,
        token_ids: Sequence[torch.Tensor],
        *,
        inbound: Inbound | None,
        outbound: Outbound | None,
        is_cancelled: Callable[[Segment], bool] = lambda _segment: False,
        logits_files: dict[int, tuple[int, int]] | None = None,
    ) -> SuperChunkResult:
        """Apply the super-chunk's operations, then walk its rows.

        token_ids: per segment, int64 ids of all positions of its sequence up to the segment's end.

        Raises:
            InvariantError: the super-chunk has more rows than the plan made room for, or its operations do
                not fit the states.
            RequestError: there is no room for a state, a snapshot or its pages, or a sequence cannot be cut
                back as asked.
        """
        apply_operations(self._states, super_chunk.operations, lost=self._lost)
        reserve_segments(self._states, super_chunk.segments, lost=self._lost)
        num_rows = super_chunk.rows
        if num_rows > self._rows.shape[0]:
            message = (
                f"super-chunk {super_chunk.index} has {num_rows} rows, but the plan has {self._rows.shape[0]}"
            )
            raise InvariantError(message)
        rows_SW = self._rows[:num_rows]
        if outbound is not None:  # the last super-chunk's rows may still be on their way out of the buffer
            with self.clock.during("hand_off"):
                outbound.settle()
        has_rows = self._first_rows(super_chunk, rows_SW, token_ids, inbound)
        with self.clock.during("busy"):

            def everything_cancelled() -> bool:
                return all(is_cancelled(segment) for segment in super_chunk.segments)

            walked: tuple[NotFinite, ...] | None = None
            if has_rows and super_chunk.segments:
                walked = self._walk_live(super_chunk, rows_SW, token_ids, is_cancelled=everything_cancelled)
            finished = walked is not None
            given_up = None if walked is None else {found.sequence for found in walked}
            settle_segments(self._states, super_chunk.segments, lost=self._lost, given_up=given_up)
            if outbound is not None:
                if finished:
                    outbound.send(super_chunk, rows_SW)
                else:
                    outbound.send_without_rows(super_chunk)
            tokens: Sequence[SampledToken] = ()
            if self._head is not None and finished:
                self._observer.head()
                self._head.write_logits(super_chunk, rows_SW, logits_files or {})
                drawn = self._head.sample(super_chunk, rows_SW)
                tokens = [token for token in drawn if token.sequence not in self._lost]
            # A super-chunk counts as done when the device has done it; the host runs ahead until here.
            self.compute.record().wait()
        return SuperChunkResult(
            cancelled=not finished and bool(super_chunk.segments),
            tokens=tuple(tokens),
            not_finite=walked or (),
        )

    def _walk_live(
        self,
        super_chunk: SuperChunk,
        rows_SW: torch.Tensor,
        token_ids: Sequence[torch.Tensor],
        *,
        is_cancelled: Callable[[], bool],
    ) -> tuple[NotFinite, ...] | None:
        """Walk the rows of all sequences but the lost ones; None if that is none, or if given up.

        A cancelled prompt's last rows may share a super-chunk, issued before the cancel, with other prompts.
        Those go on; its own rows cannot, since its state ends at another position in each layer. The same
        holds for a sequence whose values were not finite: its state has them too.
        """
        segments = super_chunk.segments
        live = [at for at, segment in enumerate(segments) if segment.sequence not in self._lost]
        if len(live) == len(segments):
            return self._walk.run(super_chunk, rows_SW, token_ids, is_cancelled=is_cancelled)
        if not live:
            return None
        is_live_S = torch.cat(
            [torch.full((segment.count,), segment.sequence not in self._lost) for segment in segments]
        ).to(rows_SW.device)
        live_SW = rows_SW[is_live_S]
        part = replace(super_chunk, segments=tuple(segments[at] for at in live))
        not_finite = self._walk.run(part, live_SW, [token_ids[at] for at in live], is_cancelled=is_cancelled)
        rows_SW[is_live_S] = live_SW
        return not_finite

    def device_bytes(self) -> int:
        """Bytes of weights and experts held in device memory."""
        return self._dense.num_bytes + self._tiers.residency.cache_bytes

    def arena_bytes(self) -> int:
        """Bytes of experts held in the arena."""
        return self._tiers.residency.arena_bytes

    def close(self) -> None:
        """End the side streams and close the files."""
        self._stager.close()
        self._reader.close()

    def _first_rows(
        self,
        super_chunk: SuperChunk,
        rows_SW: torch.Tensor,
        token_ids: Sequence[torch.Tensor],
        inbound: Inbound | None,
    ) -> bool:
        if inbound is not None:
            return inbound.receive(super_chunk, rows_SW)
        with self.clock.during("busy"):
            start = 0
            for segment, ids in zip(super_chunk.segments, token_ids, strict=True):
                rows_SW[start : start + segment.count] = self._embed(ids[segment.first_position :])
                start += segment.count
        return True

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is None:
            message = f"stage {self.assignment.stage} has no embedding"
            raise InvariantError(message)
        rows = self._embedding.rows(EMBEDDING_GROUP, ids, device=self.backend.device)
        return self._family.embed(rows)


def _dense_groups(
    tensors: Mapping[str, TensorExtent], layouts: Sequence[BlobLayout], *, layers: range, is_last: bool
) -> dict[str, dict[str, TensorExtent]]:
    """Everything that is neither an expert, nor read row by row: a group per layer, the head, the output."""
    experts = {extent.name for layout in layouts for part in layout.parts for extent in part.extents}
    dense = {name: extent for name, extent in tensors.items() if name not in experts and name != NGRAM_TABLE}
    groups: dict[str, dict[str, TensorExtent]] = {}
    for layer in layers:
        prefix = f"{layer_group(layer)}."
        groups[layer_group(layer)] = {
            name.removeprefix(prefix): extent for name, extent in dense.items() if name.startswith(prefix)
        }
    if is_last:
        output = OUTPUT if OUTPUT in dense else EMBEDDING  # tied
        groups[OUTPUT_GROUP] = {output: dense[output]}
        groups[HEAD_GROUP] = {
            name: extent
            for name, extent in dense.items()
            if not name.startswith("blk.") and name not in {output, EMBEDDING}
        }
    return groups
