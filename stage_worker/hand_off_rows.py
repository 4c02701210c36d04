"""The walk's ends of the hand-off: rows out of granted slots, rows into full ones.

The walk's thread calls these; the control thread owns the protocol (ipc/slots.py) and the sockets. Between
the two are queues: full slots and credits come in through one, filled and released slots go out through post,
which wakes the control thread. A slot is posted as filled only when the copy into it is complete.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.messages import Put, SuperChunk
from strata_coord.ipc.status_page import EventKind, StagePhase
from strata_coord.stage_worker.backend import Event, Stream, copy_work
from strata_coord.stage_worker.clock import ActivityClock
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.reporting import StatusReporter
from strata_coord.stage_worker.slot_rows import BYTES_PER_VALUE, SlotRows

if TYPE_CHECKING:
    import queue


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


class InboundRows:
    """Receives a super-chunk's rows from the stage before."""

    def __init__(
        self,
        *,
        slots: SlotRows,
        full: "queue.SimpleQueue[Put | None]",
        post: Callable[[SlotReleased], None],
        compute: Stream,
        publisher: Stream,
        clock: ActivityClock,
        reporter: StatusReporter,
        delay_s: float = 0.0,
    ) -> None:
        """Build the receiving end.

        full: hand-offs in order, from the control thread; None: stop. publisher: a host stream that waits for
        copies in the walk's place. delay_s: as in StageAssignment.
        """
        self._delay_s = delay_s
        self._full = full
        self._slots = slots
        self._post = post
        self._compute = compute
        self._publisher = publisher
        self._clock = clock
        self._reporter = reporter

    def receive(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> bool:
        """Fill rows_SW, fp32 [rows, row width]; False if the super-chunk passes without rows.

        Raises:
            ProtocolError: what arrives belongs to another super-chunk, or is less than all of this one.
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
                    source = self._slots.view(put.slot, put.rows)
                    target = rows_SW[put.first_row : put.first_row + put.rows]
                    self._compute.run(copy_work(target, source))
            elif rows_SW.shape[0]:
                complete = False
            self._release(put.slot)
            if put.last:
                end = put.first_row + put.rows
                if put.rows and end != rows_SW.shape[0]:  # the rest of the buffer holds another super-chunk's
                    message = (
                        f"super-chunk {super_chunk.index} ends at row {end}, "
                        f"but its record has {rows_SW.shape[0]} rows"
                    )
                    raise ProtocolError(message)
                if self._delay_s and rows_SW.shape[0]:
                    with self._clock.during("busy"):
                        time.sleep(self._delay_s)
                return complete

    def _release(self, slot: int) -> None:
        """Give the slot back once it has been read, which is now where compute is the calling thread."""
        read = self._compute.record()
        released = SlotReleased(slot=slot)
        if read.is_done():
            self._post(released)
            return
        self._publisher.wait(read)
        self._publisher.run(lambda: self._post(released))


class OutboundRows:
    """Sends finished rows to the stage after, a hand-off of slot_rows at a time.

    The copies run on a stream of their own: the walk goes on and only meets them again in settle.
    """

    def __init__(
        self,
        *,
        slots: SlotRows,
        credits: "queue.SimpleQueue[int | None]",  # noqa: A002  the protocol's word
        post: Callable[[SlotFilled], None],
        compute: Stream,
        copy: Stream,
        publisher: Stream,
        clock: ActivityClock,
        counters: TransferCounters,
        reporter: StatusReporter,
    ) -> None:
        """Build the sending end.

        credits: slots that may be filled, from the control thread; None: stop. copy: the stream that rows are
        copied on. publisher: a host stream that waits for copies in the walk's place.
        """
        self._credits = credits
        self._slots = slots
        self._post = post
        self._compute = compute
        self._copy = copy
        self._publisher = publisher
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
        """Let later work of compute begin only once no copy reads rows that were sent."""
        if self._last_copy is not None:
            self._compute.wait(self._last_copy)

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
        with (
            self._clock.during("hand_off"),
            self._reporter.span(EventKind.HAND_OFF, StagePhase.HAND_OFF, value=filled.rows),
        ):
            if rows_TW is not None:
                target = self._slots.view(slot, filled.rows)
                self._counters.add(handed_off=rows_TW.numel() * BYTES_PER_VALUE)
                self._copy.wait(self._compute.record())  # the rows' last kernels
                self._copy.run(copy_work(target, rows_TW))
            self._last_copy = self._copy.record()
            # Publish after write, and let another thread wait for the write.
            self._publisher.wait(self._last_copy)
            self._publisher.run(lambda: self._post(filled))
