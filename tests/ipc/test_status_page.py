import os
import subprocess
import sys

import pytest

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.host_memory import create_memfd, map_memfd
from strata_coord.ipc.messages import ByteCounters, StageClock
from strata_coord.ipc.status_page import (
    EVENT_RING,
    EventKind,
    StagePhase,
    StatusReader,
    StatusWriter,
    status_page_bytes,
)

SEATS = 5
SIZE = status_page_bytes(SEATS)
CLOCK = StageClock(now_ns=1, busy_ns=2, wait_rows_ns=3, wait_experts_ns=4, wait_slot_ns=5, hand_off_ns=6)
COUNTERS = ByteCounters(resident_hit=7, ram_to_device=1 << 62, file_read=9, rows_spilled=10, handed_off=11)

# A worker that waits to be cancelled, tells so on its page, and dies without a word.
WORKER = """
import os, sys, time
from strata_coord.ipc.host_memory import map_memfd
from strata_coord.ipc.status_page import EventKind, StagePhase, StatusWriter, status_page_bytes
seats = int(sys.argv[2])
page = map_memfd(int(sys.argv[1]), status_page_bytes(seats), writable=True)
writer = StatusWriter(page, seats, pid=os.getpid(), incarnation=3, now_ns=time.monotonic_ns())
while not writer.is_cancelled(4, 77):
    writer.advance()
writer.set_position(epoch=2, super_chunk=9, layer=17)
writer.set_phase(StagePhase.EXPERTS, now_ns=12345)
writer.record(EventKind.FAULT, start_ns=1, end_ns=2)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def page():
    fd = create_memfd("status", SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def writer(page):
    side = StatusWriter(map_memfd(page, SIZE, writable=True), SEATS, pid=123, incarnation=1, now_ns=50)
    yield side
    side.close()


@pytest.fixture
def reader(page):
    side = StatusReader(map_memfd(page, SIZE, writable=True), SEATS)
    yield side
    side.close()


def test_a_page_that_no_worker_opened_says_nothing(reader):
    assert reader.snapshot() is None
    assert reader.events() == (0, [])


def test_a_fresh_page_says_who_starts_and_since_when(writer, reader):
    found = reader.snapshot()
    assert (found.pid, found.incarnation, found.phase, found.phase_started_ns) == (
        123,
        1,
        StagePhase.STARTING,
        50,
    )
    assert (found.epoch, found.super_chunk, found.layer) == (-1, -1, -1)


def test_every_field_comes_across(writer, reader):
    writer.set_phase(StagePhase.HAND_OFF, now_ns=99)
    writer.set_position(epoch=4, super_chunk=3, layer=2)
    writer.set_layer(5)
    writer.set_clock(CLOCK)
    writer.set_counters(COUNTERS)
    found = reader.snapshot()
    assert (found.phase, found.phase_started_ns) == (StagePhase.HAND_OFF, 99)
    assert (found.epoch, found.super_chunk, found.layer) == (4, 3, 5)
    assert found.clock == CLOCK
    assert found.counters == COUNTERS


def test_progress_grows_with_every_phase_and_step(writer, reader):
    before = reader.snapshot().progress
    writer.set_phase(StagePhase.LOADING, now_ns=1)
    writer.advance()
    assert reader.snapshot().progress == before + 2


def test_events_come_in_order_and_once(writer, reader):
    for number in range(3):
        writer.record(EventKind.UPLOAD, start_ns=number, end_ns=number + 1, super_chunk=2, layer=3, value=-4)
    written, events = reader.events()
    assert [event.start_ns for event in events] == [0, 1, 2]
    event = events[0]
    assert (event.kind, event.end_ns, event.super_chunk, event.layer, event.value) == (
        EventKind.UPLOAD,
        1,
        2,
        3,
        -4,
    )
    assert reader.events(written) == (3, [])
    writer.record(EventKind.HEAD, start_ns=8, end_ns=9)
    assert [event.kind for event in reader.events(written)[1]] == [EventKind.HEAD]


@pytest.mark.parametrize("total", [EVENT_RING - 1, EVENT_RING, EVENT_RING + 1, 2 * EVENT_RING + 7])
def test_the_last_events_are_kept(writer, reader, total):
    for number in range(total):
        writer.record(EventKind.FILE_READ, start_ns=number, end_ns=number)
    written, events = reader.events()
    assert written == total
    assert [event.start_ns for event in events] == list(range(max(0, total - EVENT_RING), total))


def test_events_overwritten_while_they_are_copied_are_left_out(writer, reader, monkeypatch):
    for number in range(EVENT_RING):
        writer.record(EventKind.FILE_READ, start_ns=number, end_ns=number)
    original = StatusReader._event_bytes

    def slow(self, number):
        if number == 0:
            for late in range(10):
                writer.record(EventKind.HEAD, start_ns=EVENT_RING + late, end_ns=0)
        return original(self, number)

    monkeypatch.setattr(StatusReader, "_event_bytes", slow)
    _, events = reader.events()
    assert [event.start_ns for event in events] == list(range(10, EVENT_RING))


def test_a_cancel_names_seat_and_sequence(writer, reader):
    assert not writer.is_cancelled(2, 0)
    reader.cancel(2, 0)
    assert writer.is_cancelled(2, 0)
    assert reader.is_cancelled(2, 0)
    assert not writer.is_cancelled(2, 1)
    assert not writer.is_cancelled(1, 0)
    reader.cancel(2, 1)  # the seat's next sequence
    assert not writer.is_cancelled(2, 0)
    for seat in (-1, SEATS):
        with pytest.raises(InvariantError, match=f"seat {seat} of {SEATS}"):
            reader.cancel(seat, 0)


def test_a_restarted_worker_begins_a_clean_page_and_keeps_cancels(page, writer, reader):
    writer.set_counters(COUNTERS)
    writer.record(EventKind.HEAD, start_ns=1, end_ns=2)
    reader.cancel(0, 7)
    again = StatusWriter(map_memfd(page, SIZE, writable=True), SEATS, pid=124, incarnation=2, now_ns=60)
    found = reader.snapshot()
    assert (found.pid, found.incarnation, found.events_written, found.counters.file_read) == (124, 2, 0, 0)
    assert again.is_cancelled(0, 7)
    again.close()


def test_a_page_of_another_shape_is_refused(page, writer):
    with pytest.raises(ProtocolError, match=f"status page of {SIZE} bytes"):
        StatusReader(map_memfd(page, SIZE, writable=True), SEATS + 1)
    other = StatusReader(map_memfd(page, SIZE, writable=True), SEATS - 1)
    with pytest.raises(ProtocolError, match=f"{SEATS} seats"):
        other.snapshot()
    other.close()


def test_a_page_full_of_noise_raises_nothing_but_protocol_errors(page, writer, reader):
    os.pwrite(page, b"\xff" * (SIZE - 8), 8)
    with pytest.raises(ProtocolError, match="phase -1"):
        reader.snapshot()
    assert reader.events() == (-1, [])
    os.pwrite(page, b"\x7f" * (SIZE - 8), 8)
    assert reader.events()[1] == []


def test_the_page_of_a_killed_process_is_still_there(page, reader):
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER, str(page), str(SEATS)], pass_fds=[page]
    ) as worker:
        while (found := reader.snapshot()) is None or found.progress < 100:
            assert worker.poll() is None
        assert found.pid == worker.pid
        reader.cancel(4, 77)
        assert worker.wait(timeout=30) == -9
    found = reader.snapshot()
    assert (found.phase, found.phase_started_ns, found.layer) == (StagePhase.EXPERTS, 12345, 17)
    assert reader.events()[1][-1].kind is EventKind.FAULT
