"""Stages of one model chained in this process: the production Stage class without sockets.

What the product's processes do with slots and messages is done here with lists, so that a property test can
run hundreds of cuts of a prompt. Real processes are tested under tests/integration.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.messages import SampledToken, SamplingSettings, Segment, StateOperation, SuperChunk
from strata_coord.stage_worker.stage import Stage


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


class NoObserver:
    def attention_half(self, layer: int) -> None: ...
    def expert_half(self, layer: int) -> None: ...
    def layer_done(self, layer: int, counts: Sequence[int]) -> None: ...


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
    ) -> None:
        self.index = load_model_index(path)
        self.sub_chunk_tokens = sub_chunk_tokens
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
                ),
                observer=NoObserver(),
            )
            for stage in range(len(edges) - 1)
        ]
        for stage in self.stages:
            stage.load(progress=lambda _what, _done, _total: None)
        self.links = [Rows() for _ in range(len(self.stages) - 1)]
        self.token_ids: dict[int, list[int]] = {}
        self.positions: dict[int, int] = {}
        self.next_index = 0

    def run(
        self,
        segments: Sequence[tuple[int, int]],
        *,
        operations: Sequence[StateOperation] = (),
        slot_rows: int = 64,
        upload: str = "stream-all",
        cancelled: frozenset[int] = frozenset(),
        logits: Path | None = None,
    ) -> list[SampledToken]:
        """Run one super-chunk; segments are (sequence, count), going on where the sequence stands."""
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
                    sample=SamplingSettings(),
                    logits=logits is not None,
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
        tokens: list[SampledToken] = []
        for number, stage in enumerate(self.stages):
            files = {}
            if logits is not None and stage.is_last:
                self.file = logits.open("r+b")
                files = {sequence: (self.file.fileno(), 0) for sequence, _ in segments}
            result = stage.run(
                super_chunk,
                ids,
                inbound=self.links[number - 1] if number else None,
                outbound=self.links[number] if number < len(self.links) else None,
                is_cancelled=lambda segment: segment.sequence in cancelled,
                logits_files=files,
            )
            tokens = list(result.tokens)
            if files:
                self.file.close()
        return tokens

    def open(self, sequence: int, ids: Sequence[int]) -> StateOperation:
        """Begin a sequence with its prompt; pass the operation to the next run."""
        self.token_ids[sequence] = list(ids)
        self.positions[sequence] = 0
        return StateOperation(kind="create", sequence=sequence, seat=0)

    def drop(self, sequence: int) -> StateOperation:
        del self.token_ids[sequence], self.positions[sequence]
        return StateOperation(kind="drop", sequence=sequence, seat=0)

    def prompt_logits(
        self, ids: Sequence[int], folder: Path, cuts: Sequence[int], **settings: object
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a prompt read in super-chunks of cuts rows; its sequence is dropped."""
        assert sum(cuts) == len(ids)
        vocabulary = self.index.geometry.vocabulary_size
        path = folder / "logits.bin"
        path.write_bytes(b"")
        operations: list[StateOperation] = [self.open(999, ids)]
        for cut in cuts:
            self.run([(999, cut)], operations=operations, logits=path, **settings)  # type: ignore[arg-type]
            operations = []
        self.run([], operations=[self.drop(999)])
        return torch.from_numpy(np.fromfile(path, dtype=np.float32).reshape(len(ids), vocabulary))

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
) -> StageAssignment:
    """One stage's assignment, every choice made by hand."""
    first, last = edges[stage], edges[stage + 1]
    num_experts = index.geometry.experts.num_experts
    resident = tuple(range(min(tiers.resident, num_experts)))
    arena = tuple(range(len(resident), min(len(resident) + tiers.arena, num_experts)))
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
        resident_experts=(resident,) * (last - first),
        arena_experts=(arena,) * (last - first),
        window_slots=tiers.window_slots,
        kv_dtype="fp32",
        kv_pool_tokens=max_sequences * context_tokens,
        max_sequences=max_sequences,
        context_tokens=context_tokens,
    )


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||, in fp64."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())
