"""The walk's ends of the hand-off: rows out of granted slots, rows into full ones.

The walk's thread calls these; the control thread owns the protocol (ipc/slots.py) and the sockets. Between
the two are queues: full slots and credits come in through one, filled and released slots go out through post,
which wakes the control thread. A slot is posted as filled only when the copy into it is complete.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.host_memory import MappedSlots
from strata_coord.ipc.messages import Put, SuperChunk
from strata_coord.ipc.status_page import EventKind, StagePhase
from strata_coord.stage_worker.backend import Event, Stream
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.reporting import StatusReporter

if TYPE_CHECKING:
    import queue

BYTES_PER_VALUE = 4  # rows cross in fp32, so that any number of stages computes the same


class StopWalkError(Exception):
    """The worker is told to end; raised in the walk's thread by whatever it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFilled:
    """To the control thread: rows are in the slot, publish them."""

    slot: int
    super_chunk: int
    first_row: int
    rows: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReleased:
    """To the control thread: the slot's rows have been read."""

    slot: int


def slot_rows_view(slots: MappedSlots, slot: int, rows: int, row_width: int) -> torch.Tensor:
    """fp32 [rows, row_width] over the first bytes of a slot."""
    view = slots.slot(slot)[: rows * row_width * BYTES_PER_VALUE]
    return torch.from_numpy(np.frombuffer(view, dtype=np.float32)).view(rows, row_width)


class InboundRows:
    """Receives a super-chunk's rows from the stage before."""

    def __init__(
        self,
        *,
        slots: MappedSlots,
        row_width: int,
        full: "queue.SimpleQueue[Put | None]",
        post: Callable[[SlotReleased], None],
        clock: ActivityClock,
        reporter: StatusReporter,
        delay_s: float = 0.0,
    ) -> None:
        """full: hand-offs in order, from the control thread; None: stop. delay_s: as in StageAssignment."""
        self._delay_s = delay_s
        self._full = full
        self._slots = slots
        self._row_width = row_width
        self._post = post
        self._clock = clock
        self._reporter = reporter

    def receive(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> bool:
        """Fill rows_SW, fp32 [rows, row width]; False if the super-chunk passes without rows.

        Raises:
            ProtocolError: what arrives belongs to another super-chunk.
            StopWalkError: the worker is told to end.
        """
        complete = True
        while True:
            with (
                self._clock.during("wait_rows"),
                self._reporter.span(EventKind.WAIT_ROWS, StagePhase.WAITING_ROWS),
            ):
                put = self._full.get()
            if put is None:
                raise StopWalkError
            if put.super_chunk != super_chunk.index or put.first_row + put.rows > rows_SW.shape[0]:
                message = (
                    f"rows {put.first_row}+{put.rows} of super-chunk {put.super_chunk} arrived, "
                    f"expected super-chunk {super_chunk.index} of {rows_SW.shape[0]} rows"
                )
                raise ProtocolError(message)
            if put.rows:
                with self._clock.during("hand_off"):
                    source = slot_rows_view(self._slots, put.slot, put.rows, self._row_width)
                    rows_SW[put.first_row : put.first_row + put.rows].copy_(source)
            elif rows_SW.shape[0]:
                complete = False
            self._post(SlotReleased(slot=put.slot))
            if put.last:
                if self._delay_s and rows_SW.shape[0]:
                    with self._clock.during("busy"):
                        time.sleep(self._delay_s)
                return complete


class OutboundRows:
    """Sends finished rows to the stage after, a hand-off of slot_rows at a time.

    The copies run on a stream of their own: the walk goes on and only meets them again in settle.
    """

    def __init__(
        self,
        *,
        slots: MappedSlots,
        row_width: int,
        credits: "queue.SimpleQueue[int | None]",  # noqa: A002  the protocol's word
        post: Callable[[SlotFilled], None],
        stream: Stream,
        clock: ActivityClock,
        counters: TransferCounters,
        reporter: StatusReporter,
    ) -> None:
        """credits: slots that may be filled, from the control thread; None: stop."""
        self._credits = credits
        self._slots = slots
        self._row_width = row_width
        self._post = post
        self._stream = stream
        self._clock = clock
        self._counters = counters
        self._reporter = reporter
        self._last_copy: Event | None = None

    def send(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> None:
        """Queue the copies of all rows into slots, waiting for credits as needed."""
        num_rows = rows_SW.shape[0]
        for first in range(0, num_rows, super_chunk.slot_rows):
            stop = min(first + super_chunk.slot_rows, num_rows)
            self._send_slot(super_chunk, rows_SW[first:stop], first, last=stop == num_rows)

    def send_without_rows(self, super_chunk: SuperChunk) -> None:
        """Pass a super-chunk that was cancelled or has no rows."""
        self._send_slot(super_chunk, None, 0, last=True)

    def settle(self) -> None:
        """Block until no copy reads rows that were sent."""
        if self._last_copy is not None:
            self._last_copy.wait()

    def _send_slot(
        self, super_chunk: SuperChunk, rows_TW: torch.Tensor | None, first_row: int, *, last: bool
    ) -> None:
        with (
            self._clock.during("wait_slot"),
            self._reporter.span(EventKind.WAIT_SLOT, StagePhase.WAITING_SLOT),
        ):
            slot = self._credits.get()
        if slot is None:
            raise StopWalkError
        filled = SlotFilled(
            slot=slot,
            super_chunk=super_chunk.index,
            first_row=first_row,
            rows=0 if rows_TW is None else rows_TW.shape[0],
            last=last,
        )
        with self._clock.during("hand_off"):
            if rows_TW is not None:
                target = slot_rows_view(self._slots, slot, filled.rows, self._row_width)
                self._counters.add(handed_off=filled.rows * self._row_width * BYTES_PER_VALUE)
                self._stream.run(_copy_work(target, rows_TW))
            # Publish after write: the stream runs this once the copy before it is complete.
            self._stream.run(lambda: self._post(filled))
            self._last_copy = self._stream.record()


def _copy_work(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)

    return copy
