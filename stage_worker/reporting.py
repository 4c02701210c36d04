"""Turns what the walk does into status page words and flight recorder spans."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from strata_coord.ipc.messages import SuperChunk
from strata_coord.ipc.status_page import EventKind, StagePhase, StatusWriter
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_half import add_routing_counts


class StatusReporter:
    """The walk's observer in a worker: keeps the status page current, a write per part of a half layer."""

    def __init__(
        self,
        *,
        status: StatusWriter,
        clock: ActivityClock,
        counters: TransferCounters,
        routing: dict[int, memoryview],
    ) -> None:
        """routing: per own layer, uint32 words [experts] of the shared routing table."""
        self._status = status
        self._clock = clock
        self._counters = counters
        self._routing = routing
        self.super_chunk = -1
        self.layer = -1
        self._rows = 0
        self._half_since_ns = 0

    def begin(self, super_chunk: SuperChunk) -> None:
        """A super-chunk is taken up."""
        self.super_chunk, self._rows = super_chunk.index, super_chunk.rows
        self._status.set_position(epoch=super_chunk.epoch, super_chunk=super_chunk.index, layer=-1)

    def waiting(self) -> None:
        """Nothing to do until the coordinator sends a super-chunk."""
        self.super_chunk = self.layer = -1
        self._status.set_position(epoch=-1, super_chunk=-1, layer=-1)
        self.phase(StagePhase.WAITING_SUPER_CHUNK)
        self.publish()

    def phase(self, phase: StagePhase) -> None:
        """Enter a phase."""
        self._status.set_phase(phase, now_ns=time.monotonic_ns())

    def publish(self) -> None:
        """Write times and bytes to the status page."""
        self._status.set_clock(self._clock.snapshot())
        self._status.set_counters(self._counters.snapshot())

    def attention_half(self, layer: int) -> None:
        """The attention half of layer begins."""
        self._half_since_ns = time.monotonic_ns()
        self.layer = layer
        self._status.set_layer(layer)
        self._status.set_phase(StagePhase.ATTENTION, now_ns=self._half_since_ns)

    def expert_half(self, layer: int) -> None:
        """The expert half of layer begins."""
        now_ns = time.monotonic_ns()
        self._span(EventKind.ATTENTION_HALF, layer, now_ns)
        self._half_since_ns = now_ns
        self._status.set_phase(StagePhase.EXPERTS, now_ns=now_ns)

    def layer_done(self, layer: int, counts: Sequence[int]) -> None:
        """Layer is finished."""
        self._span(EventKind.EXPERT_HALF, layer, time.monotonic_ns())
        add_routing_counts(self._routing, layer, counts)
        self.publish()

    def head(self) -> None:
        """The head begins."""
        self.phase(StagePhase.HEAD)

    def advance(self) -> None:
        """Show that work got somewhere, so that the stage does not count as stuck."""
        self._status.advance()

    @contextmanager
    def span(self, kind: EventKind, phase: StagePhase, *, value: int = 0) -> Iterator[None]:
        """Enter phase for the body and record it as a span of kind."""
        start_ns = time.monotonic_ns()
        self._status.set_phase(phase, now_ns=start_ns)
        yield
        self._status.record(
            kind,
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            super_chunk=self.super_chunk,
            value=value,
        )

    def _span(self, kind: EventKind, layer: int, end_ns: int) -> None:
        self._status.record(
            kind,
            start_ns=self._half_since_ns,
            end_ns=end_ns,
            super_chunk=self.super_chunk,
            layer=layer,
            value=self._rows,
        )
