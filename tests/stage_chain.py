"""Stages of one model chained in this process: the production Stage class without sockets.

What the product's processes do with slots and messages is done here with lists, so that a property test can
run hundreds of cuts of a prompt. Real processes are tested under tests/integration.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch

from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.ipc.assignment import KV_PAGE_TOKENS, ComputeDtype, KvDtype, StageAssignment
from strata_coord.ipc.messages import (
    SampledToken,
    SamplingSettings,
    Segment,
    SnapshotMark,
    StateOperation,
    SuperChunk,
)
from strata_coord.stage_worker.backend import Backend, CpuBackend
from strata_coord.stage_worker.stage import Stage, SuperChunkResult


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Which experts lie where, the same for every layer: the first resident, the next in the arena."""

    resident: int = 0
    arena: int = 10_000
    window_slots: int = 2


@dataclass(kw_only=True)
class Rows:
    """Both ends of a hand-off: rows pass in pieces of slot_rows, as they do between processes."""

    sent: list[tuple[int, torch.Tensor | None]] = field(default_factory=list)

    def send(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> None:
        pieces = [piece.clone() for piece in rows_SW.split(super_chunk.slot_rows)]
        self.sent.append((super_chunk.index, torch.cat(pieces)))

    def send_without_rows(self, super_chunk: SuperChunk) -> None:
        self.sent.append((super_chunk.index, None))

    def settle(self) -> None:
        """Nothing is on its way."""

    def receive(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> bool:
        index, rows = self.sent.pop(0)
        assert index == super_chunk.index
        if rows is not None:
            rows_SW.copy_(rows)
        return rows is not None


class LayerLog:
    """Remembers the layers that one stage has finished, with the rows of each expert."""

    def __init__(self) -> None:
        self.done: list[tuple[int, tuple[int, ...]]] = []
        self.num_heads = 0
        self.num_parts = 0

    def head(self) -> None:
        self.num_heads += 1

    def advance(self) -> None:
        self.num_parts += 1

    def attention_half(self, layer: int) -> None: ...

    def expert_half(self, layer: int) -> None: ...

    def layer_done(self, layer: int, counts: Sequence[int]) -> None:
        self.done.append((layer, tuple(counts)))


class StageChain:
    """A model cut at boundaries, and the streams of sequences through it."""

    def __init__(
        self,
        path: Path,
        *,
        boundaries: Sequence[int] = (),
        sub_chunk_tokens: int = 64,
        max_rows: int = 256,
        tiers: Tiers | None = None,
        group_rows: int = 48,
        max_sequences: int = 8,
        context_tokens: int = 512,
        kv_dtype: KvDtype = "fp32",
        kv_pool_tokens: int | None = None,
        max_snapshots: int = 8,
        compute_dtype: ComputeDtype = "fp32",
        upload_group: int = 1,
        backend: Callable[[], Backend] = CpuBackend,
    ) -> None:
        self.index = load_model_index(path)
        self.sub_chunk_tokens = sub_chunk_tokens
        self.logs = [LayerLog() for _ in range(len(boundaries) + 1)]
        edges = [0, *boundaries, self.index.geometry.num_layers]
        self.stages = [
            Stage(
                assignment(
                    self.index,
                    stage=stage,
                    edges=edges,
                    tiers=tiers or Tiers(),
                    sub_chunk_tokens=sub_chunk_tokens,
                    max_rows=max_rows,
                    group_rows=group_rows,
                    max_sequences=max_sequences,
                    context_tokens=context_tokens,
                    kv_dtype=kv_dtype,
                    kv_pool_tokens=kv_pool_tokens or max_sequences * context_tokens,
                    max_snapshots=max_snapshots,
                    compute_dtype=compute_dtype,
                    upload_group=upload_group,
                ),
                observer=self.logs[stage],
                backend=backend(),
            )
            for stage in range(len(edges) - 1)
        ]
        for stage in self.stages:
            stage.load(progress=lambda _what, _done, _total: None)
        self.links = [Rows() for _ in range(len(self.stages) - 1)]
        self.token_ids: dict[int, list[int]] = {}
        self.positions: dict[int, int] = {}
        self.next_index = 0
        self.results: list[SuperChunkResult] = []  # of the last super-chunk, per stage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def run(
        self,
        segments: Sequence[tuple[int, int]],
        *,
        operations: Sequence[StateOperation] = (),
        slot_rows: int = 64,
        upload: str = "stream-all",
        cancel: Callable[[int, Segment], bool] = lambda _stage, _segment: False,
        sample: SamplingSettings | None = SamplingSettings(),  # noqa: B008  frozen
        logits: Mapping[int, Path] | None = None,
        snapshots: Mapping[int, Mapping[int, int]] | None = None,
    ) -> list[SampledToken]:
        """Run one super-chunk; segments are (sequence, count), going on where the sequence stands.

        logits: files of the sequences whose logits are written.
        snapshots: by sequence, position -> number of the snapshot that is due there.
        cancel: asked by stage and segment whenever a stage looks at its cancel words.
        """
        made = []
        for sequence, count in segments:
            first = self.positions[sequence]
            self.positions[sequence] += count
            made.append(
                Segment(
                    sequence=sequence,
                    seat=0,
                    first_position=first,
                    count=count,
                    sample=sample,
                    logits=sequence in (logits or {}),
                    snapshots=tuple(
                        SnapshotMark(snapshot=number, position=position)
                        for position, number in (snapshots or {}).get(sequence, {}).items()
                    ),
                )
            )
        super_chunk = SuperChunk(
            epoch=1,
            index=self.next_index,
            operations=tuple(operations),
            segments=tuple(made),
            sub_chunk_tokens=self.sub_chunk_tokens,
            slot_rows=slot_rows,
            upload=upload,
        )
        self.next_index += 1
        ids = [
            torch.tensor(self.token_ids[segment.sequence][: segment.first_position + segment.count])
            for segment in made
        ]
        self.results = []
        with contextlib.ExitStack() as files:
            descriptors = {
                sequence: (files.enter_context(path.open("r+b")).fileno(), 0)
                for sequence, path in (logits or {}).items()
            }
            for number, stage in enumerate(self.stages):
                result = stage.run(
                    super_chunk,
                    ids,
                    inbound=self.links[number - 1] if number else None,
                    outbound=self.links[number] if number < len(self.links) else None,
                    is_cancelled=functools.partial(cancel, number),
                    logits_files=descriptors,
                )
                self.results.append(result)
        return list(self.results[-1].tokens)

    def open(self, sequence: int, ids: Sequence[int]) -> StateOperation:
        """Begin a sequence with its prompt; pass the operation to the next run."""
        self.token_ids[sequence] = list(ids)
        self.positions[sequence] = 0
        return StateOperation(kind="create", sequence=sequence, seat=0)

    def drop(self, sequence: int) -> StateOperation:
        del self.token_ids[sequence], self.positions[sequence]
        return StateOperation(kind="drop", sequence=sequence, seat=0)

    def truncate(self, sequence: int, position: int, snapshot: int = 0) -> StateOperation:
        self.positions[sequence] = position
        return StateOperation(
            kind="truncate", sequence=sequence, seat=0, position=position, snapshot=snapshot
        )

    def snapshot(self, sequence: int, snapshot: int) -> StateOperation:
        """Copy the state where the sequence ends."""
        return StateOperation(kind="snapshot", sequence=sequence, seat=0, snapshot=snapshot)

    def restore(self, sequence: int, snapshot: int, position: int, ids: Sequence[int]) -> StateOperation:
        """Begin a sequence with the position rows of a snapshot; ids are the whole prompt."""
        self.token_ids[sequence] = list(ids)
        self.positions[sequence] = position
        return StateOperation(kind="restore", sequence=sequence, seat=0, snapshot=snapshot)

    def drop_snapshot(self, snapshot: int) -> StateOperation:
        return StateOperation(kind="drop-snapshot", sequence=0, seat=0, snapshot=snapshot)

    def prompt_logits(
        self, ids: Sequence[int], folder: Path, cuts: Sequence[int], **settings: object
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a prompt read in super-chunks of cuts rows, then dropped."""
        assert sum(cuts) == len(ids)
        vocabulary = self.index.geometry.vocabulary_size
        path = folder / "logits.bin"
        path.write_bytes(b"")
        operations: list[StateOperation] = [self.open(999, ids)]
        for cut in cuts:
            self.run([(999, cut)], operations=operations, logits={999: path}, **settings)  # type: ignore[arg-type]
            operations = []
        self.run([], operations=[self.drop(999)])
        return torch.from_numpy(np.fromfile(path, dtype=np.float32).reshape(len(ids), vocabulary))

    def greedy(
        self, sequence: int, ids: Sequence[int], count: int, *, cuts: Sequence[int] = (), **settings: object
    ) -> list[int]:
        """The count tokens that greedy decoding appends to a prompt; the sequence stays open."""
        operations = [self.open(sequence, ids)]
        for cut in cuts or [len(ids)]:
            tokens = self.run([(sequence, cut)], operations=operations, **settings)  # type: ignore[arg-type]
            operations = []
        for _ in range(count - 1):
            self.token_ids[sequence].append(tokens[0].token)
            tokens = self.run([(sequence, 1)], **settings)  # type: ignore[arg-type]
        return [*self.token_ids[sequence][len(ids) :], tokens[0].token]

    @property
    def is_at_rest(self) -> bool:
        """Whether no upload is planned or on its way, no rows wait, and no sequence has state."""
        return (
            all(stage._stager.is_idle for stage in self.stages)
            and all(
                stage._states.free_tokens == stage._states.num_pages * KV_PAGE_TOKENS for stage in self.stages
            )
            and not any(link.sent for link in self.links)
        )

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def assignment(
    index: ModelIndex,
    *,
    stage: int,
    edges: Sequence[int],
    tiers: Tiers,
    sub_chunk_tokens: int,
    max_rows: int,
    group_rows: int,
    max_sequences: int,
    context_tokens: int,
    kv_dtype: KvDtype,
    kv_pool_tokens: int,
    max_snapshots: int,
    compute_dtype: ComputeDtype = "fp32",
    upload_group: int = 1,
) -> StageAssignment:
    """One stage's assignment, every choice made by hand."""
    first, last = edges[stage], edges[stage + 1]
    num_experts = index.geometry.experts.num_experts
    resident = tuple(range(min(tiers.resident, num_experts)))
    arena = tuple(range(len(resident), min(len(resident) + tiers.arena, num_experts)))
    has_experts = [index.geometry.experts.count(layer) > 0 for layer in range(first, last)]
    return StageAssignment(
        stage=stage,
        num_stages=len(edges) - 1,
        first_layer=first,
        last_layer=last,
        geometry=index.geometry,
        files=index.files,
        tensors=index.stage_tensors(first, last, is_first=stage == 0, is_last=stage == len(edges) - 2),
        device="cpu",
        numa_node=-1,
        cpu_threads=1,
        super_chunk_tokens=max_rows,
        sub_chunk_tokens=sub_chunk_tokens,
        expert_group_rows=group_rows,
        resident_experts=tuple(resident if has else () for has in has_experts),
        arena_experts=tuple(arena if has else () for has in has_experts),
        window_slots=tiers.window_slots,
        kv_dtype=kv_dtype,
        kv_pool_tokens=kv_pool_tokens,
        max_sequences=max_sequences,
        max_snapshots=max_snapshots,
        compute_dtype=compute_dtype,
        upload_group=upload_group,
        context_tokens=context_tokens,
    )


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())
