"""Rows through real slot memory, with the control threads' part played by queues."""

import os
import queue
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from status_pages import Page

from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.host_memory import MappedSlots, create_memfd
from strata_coord.ipc.messages import Put, Segment, SuperChunk
from strata_coord.ipc.status_page import EventKind
from strata_coord.stage_worker.backend import InlineStream, ThreadStream
from strata_coord.stage_worker.hand_off_rows import (
    InboundRows,
    OutboundRows,
    SlotFilled,
    SlotReleased,
    StopWalkError,
)
from strata_coord.stage_worker.slot_rows import BYTES_PER_VALUE, HostSlotRows

WIDTH = 6


def super_chunk(index: int, rows: int, slot_rows: int) -> SuperChunk:
    segments = (Segment(sequence=1, seat=0, first_position=0, count=rows),) if rows else ()
    return SuperChunk(
        epoch=1,
        index=index,
        operations=(),
        segments=segments,
        sub_chunk_tokens=1,
        slot_rows=slot_rows,
        upload="stream-all",
    )


class Pipe:
    """An outbound and an inbound over the same slots; what is posted arrives at the other side."""

    def __init__(self, *, num_slots: int, slot_rows: int) -> None:
        slot_bytes = slot_rows * WIDTH * BYTES_PER_VALUE
        fd = create_memfd("slots", num_slots * slot_bytes)
        self.slots = [MappedSlots(fd, num_slots, slot_bytes, writable=True) for _ in range(2)]
        os.close(fd)
        self.full: queue.SimpleQueue[Put | None] = queue.SimpleQueue()
        self.credits: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for slot in range(num_slots):
            self.credits.put(slot)
        self.puts: list[Put] = []
        self.copy, self.publisher = ThreadStream("copy"), ThreadStream("publish")
        self.sender, self.receiver = Page(), Page()
        self.outbound = OutboundRows(
            slots=HostSlotRows(self.slots[0], WIDTH),
            credits=self.credits,
            post=self._filled,
            compute=InlineStream(),
            copy=self.copy,
            publisher=self.publisher,
            clock=self.sender.clock,
            counters=self.sender.counters,
            reporter=self.sender.reporter,
        )
        self.inbound = InboundRows(
            slots=HostSlotRows(self.slots[1], WIDTH),
            full=self.full,
            post=self._released,
            compute=InlineStream(),
            publisher=self.publisher,
            clock=self.receiver.clock,
            reporter=self.receiver.reporter,
        )

    def _filled(self, filled: SlotFilled) -> None:
        put = Put(
            generation=1,
            epoch=1,
            hand_off=len(self.puts),
            slot=filled.slot,
            super_chunk=filled.super_chunk,
            first_row=filled.first_row,
            rows=filled.rows,
            last=filled.last,
        )
        self.puts.append(put)
        self.full.put(put)

    def _released(self, released: SlotReleased) -> None:
        self.credits.put(released.slot)

    def close(self) -> None:
        self.copy.close()
        self.publisher.close()
        for slots in self.slots:
            slots.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(num_slots=3, slot_rows=4)
    yield made
    made.close()


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 17), min_size=1, max_size=5),
    num_slots=st.integers(1, 4),
    slot_rows=st.integers(1, 6),
)
def test_rows_arrive_as_they_were_whatever_the_ring(sizes: list[int], num_slots: int, slot_rows: int) -> None:
    pipe = Pipe(num_slots=num_slots, slot_rows=slot_rows)
    generator = torch.Generator().manual_seed(sum(sizes))
    sent = [torch.randn(size, WIDTH, generator=generator) for size in sizes]

    def send() -> None:
        buffer = torch.empty(17, WIDTH)  # reused by every super-chunk, as the stage's is
        for index, rows in enumerate(sent):
            pipe.outbound.settle()
            buffer[: rows.shape[0]] = rows
            if rows.shape[0]:
                pipe.outbound.send(super_chunk(index, rows.shape[0], slot_rows), buffer[: rows.shape[0]])
            else:
                pipe.outbound.send_without_rows(super_chunk(index, 0, slot_rows))

    thread = threading.Thread(target=send)
    thread.start()
    for index, rows in enumerate(sent):
        target = torch.full((rows.shape[0], WIDTH), float("nan"))
        assert pipe.inbound.receive(super_chunk(index, rows.shape[0], slot_rows), target)
        assert torch.equal(target, rows)
    thread.join()
    handed_off = pipe.sender.counters.snapshot().handed_off
    pipe.close()
    assert handed_off == sum(sizes) * WIDTH * BYTES_PER_VALUE
    assert pipe.credits.qsize() == num_slots
    assert len(pipe.puts) == sum(max(-(-size // slot_rows), 1) for size in sizes)


def test_a_cancelled_super_chunk_passes_without_rows(pipe: Pipe) -> None:
    target = torch.zeros(9, WIDTH)
    pipe.outbound.send_without_rows(super_chunk(0, 9, 4))
    assert not pipe.inbound.receive(super_chunk(0, 9, 4), target)
    assert not target.any()
    rows = torch.ones(9, WIDTH)
    pipe.outbound.send(super_chunk(1, 9, 4), rows)
    assert pipe.inbound.receive(super_chunk(1, 9, 4), target)
    assert torch.equal(target, rows)
    assert pipe.sender.counters.snapshot().handed_off == rows.nbytes


def test_a_slot_is_announced_only_once_its_rows_are_in_it(pipe: Pipe) -> None:
    gate = threading.Event()
    pipe.copy.run(lambda: gate.wait(10))
    rows = torch.ones(3, WIDTH)
    pipe.outbound.send(super_chunk(0, 3, 4), rows)
    assert pipe.puts == []  # the walk went on, the copy has not run
    gate.set()
    pipe.outbound.settle()
    target = torch.zeros(3, WIDTH)
    assert pipe.inbound.receive(super_chunk(0, 3, 4), target)
    assert torch.equal(target, rows)
    assert len(pipe.puts) == 1


def test_each_hand_off_and_each_arrival_is_in_the_flight_recorder(pipe: Pipe) -> None:
    pipe.outbound.send(super_chunk(0, 9, 4), torch.ones(9, WIDTH))
    pipe.inbound.receive(super_chunk(0, 9, 4), torch.zeros(9, WIDTH))
    sent = [event for event in pipe.sender.reader.events()[1] if event.kind is EventKind.HAND_OFF]
    arrived = [event for event in pipe.receiver.reader.events()[1] if event.kind is EventKind.WAIT_ROWS]
    assert [event.value for event in sent] == [4, 4, 1]
    assert len(arrived) == 3


def test_settle_without_a_copy_returns(pipe: Pipe) -> None:
    pipe.outbound.settle()


@pytest.mark.parametrize(
    ("index", "rows", "message"),
    [
        (2, 9, r"rows 0\+4 of super-chunk 0 arrived, expected super-chunk 2 of 9 rows"),
        (0, 3, r"rows 0\+4 of super-chunk 0 arrived, expected super-chunk 0 of 3 rows"),
    ],
)
def test_rows_of_something_else_are_refused(pipe: Pipe, index: int, rows: int, message: str) -> None:
    pipe.outbound.send(super_chunk(0, 9, 4), torch.ones(9, WIDTH))
    target = torch.zeros(rows, WIDTH)
    with pytest.raises(ProtocolError, match=message):
        pipe.inbound.receive(super_chunk(index, rows, 4), target)
    assert not target.any()


def test_a_super_chunk_that_ends_too_early_is_refused(pipe: Pipe) -> None:
    """Its last rows would be those that the buffer held before."""
    pipe.outbound.send(super_chunk(0, 8, 4), torch.ones(8, WIDTH))
    with pytest.raises(ProtocolError, match="super-chunk 0 ends at row 8, but its record has 9 rows"):
        pipe.inbound.receive(super_chunk(0, 9, 4), torch.zeros(9, WIDTH))


def test_a_worker_that_is_told_to_end_stops_waiting(pipe: Pipe) -> None:
    pipe.full.put(None)
    with pytest.raises(StopWalkError):
        pipe.inbound.receive(super_chunk(0, 4, 4), torch.zeros(4, WIDTH))
    while pipe.credits.qsize():
        pipe.credits.get()
    pipe.credits.put(None)
    with pytest.raises(StopWalkError):
        pipe.outbound.send(super_chunk(0, 4, 4), torch.zeros(4, WIDTH))


def test_waits_are_counted_as_what_was_waited_for(pipe: Pipe) -> None:
    rows = torch.ones(4, WIDTH)
    timer = threading.Timer(0.03, lambda: pipe.outbound.send(super_chunk(0, 4, 4), rows))
    timer.start()
    pipe.inbound.receive(super_chunk(0, 4, 4), torch.zeros(4, WIDTH))
    timer.join()
    spent = pipe.receiver.clock.snapshot()
    assert spent.wait_rows_ns >= 20_000_000
    assert spent.wait_slot_ns == 0
