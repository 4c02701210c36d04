"""Pure: what reading one prompt cost each stage, from readings at acceptance and at the prompt's last row.

Exact while the prompt is alone in the pipeline; beside others, their work on the same stages counts too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strata_coord.coordinator.telemetry import bytes_between, clock_between
from strata_coord.ipc.messages import ByteCounters, StageClock, UploadPolicy

RoutingCounts = tuple[tuple[int, ...], ...]  # per layer of the stage, rows of each expert


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReading:
    """A stage's totals at one instant."""

    clock: StageClock
    counters: ByteCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """One request, stage by stage: clock.now_ns is the wall time that the other parts sum to."""

    ttft_s: float
    clocks: tuple[StageClock, ...]
    counters: tuple[ByteCounters, ...]
    routed: tuple[RoutingCounts, ...]  # per stage; rows of this prompt by layer and expert

    @property
    def expert_bytes_moved(self) -> int:
        """Expert bytes that all stages copied into their windows for the prompt."""
        return sum(counters.ram_to_device for counters in self.counters)


class RequestMeter:
    """Readings of one request."""

    def __init__(
        self, *, accepted_ns: int, base: Sequence[StageReading], routing: Sequence[RoutingCounts]
    ) -> None:
        """base: each stage's last reading before acceptance; routing: the same of the routing tables."""
        self._accepted_ns = accepted_ns
        self._base = [StageReading(clock=idle_until(r.clock, accepted_ns), counters=r.counters) for r in base]
        self._routing = list(routing)
        self._end: dict[int, tuple[StageReading, RoutingCounts]] = {}
        self._first_token_ns = accepted_ns

    def prompt_read(self, stage: int, reading: StageReading, routing: RoutingCounts) -> None:
        """A stage has finished the prompt's last row."""
        self._end[stage] = (reading, routing)

    def first_token(self, now_ns: int) -> None:
        """The first token is here."""
        self._first_token_ns = now_ns

    @property
    def is_complete(self) -> bool:
        """Whether every stage has finished the prompt."""
        return len(self._end) == len(self._base)

    def figures(self) -> RequestFigures:
        """The differences. Call it when the meter is complete."""
        ends = [self._end[stage] for stage in range(len(self._base))]
        pairs = list(zip(self._base, (reading for reading, _ in ends), strict=True))
        return RequestFigures(
            ttft_s=(self._first_token_ns - self._accepted_ns) / 1e9,
            clocks=tuple(clock_between(base.clock, end.clock) for base, end in pairs),
            counters=tuple(bytes_between(base.counters, end.counters) for base, end in pairs),
            routed=tuple(
                _counts_between(before, after) for before, (_, after) in zip(self._routing, ends, strict=True)
            ),
        )


def idle_until(clock: StageClock, now_ns: int) -> StageClock:
    """The reading that an idle stage would give now: it has waited for rows since its last one."""
    waited_ns = max(now_ns - clock.now_ns, 0)
    return replace(clock, now_ns=clock.now_ns + waited_ns, wait_rows_ns=clock.wait_rows_ns + waited_ns)


def needed_bytes_once(
    *,
    upload: UploadPolicy,
    first_layers: Sequence[int],
    resident: Sequence[Sequence[Sequence[int]]],
    routed: Sequence[RoutingCounts],
    blob_bytes: Mapping[int, int],
) -> int:
    """What touching every needed, non-resident expert exactly once costs.

    Needed is, under stream-all, every expert of the layer; under routed-only, every expert that a row of the
    prompt was routed to. Computed from header extents, residency and routing, never from transfer counters.

    resident: per stage and own layer, the resident experts; blob_bytes: per absolute layer, of one expert.
    """
    total = 0
    for first, stage_resident, stage_routed in zip(first_layers, resident, routed, strict=True):
        for number, (kept, counts) in enumerate(zip(stage_resident, stage_routed, strict=True)):
            needed = sum(
                1
                for expert, count in enumerate(counts)
                if (count or upload == "stream-all") and expert not in set(kept)
            )
            total += needed * blob_bytes[first + number]
    return total


def _counts_between(before: RoutingCounts, after: RoutingCounts) -> RoutingCounts:
    return tuple(
        tuple((late - early) & 0xFFFFFFFF for early, late in zip(row_before, row_after, strict=True))
        for row_before, row_after in zip(before, after, strict=True)
    )
