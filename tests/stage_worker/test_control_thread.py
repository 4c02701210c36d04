"""The control thread with a coordinator made of queues; links between two threads are real sockets."""

import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata_coord.ipc.bootstrap import Bootstrap, logits_label, slots_label
from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.host_memory import (
    MappedSlots,
    create_memfd,
    descriptor_pair,
    recv_descriptors,
    send_descriptors,
)
from strata_coord.ipc.messages import (
    Assign,
    BeginEpoch,
    Hello,
    LinkReady,
    Put,
    Relink,
    RunSuperChunk,
    Shutdown,
    SuperChunk,
)
from strata_coord.stage_worker.control_thread import ControlThread, Linked
from strata_coord.stage_worker.hand_off_rows import SlotFilled, SlotReleased

WAIT_S = 20
SLOTS, SLOT_ROWS, SLOT_BYTES = 2, 4, 64


class FakeControl:
    """Stands for ControlClient: what the coordinator says is put in, what the stage says comes out."""

    def __init__(self) -> None:
        self.socket, self._bell = socket.socketpair()
        self._said: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.is_full = False
        self.on_message: Callable[[], None] = lambda: None  # just before a message is received

    def say(self, *messages: object) -> None:
        for message in messages:
            self._said.put(message)
        self._bell.send(b"!")

    def recv_all(self) -> list[object]:
        messages: list[object] = []
        if not self._said.empty():
            self.on_message()
        while not self._said.empty():
            messages.append(self._said.get())
        if messages:
            self.socket.recv(1)
        return messages

    def send(self, message: object) -> str:
        if self.is_full:
            self.is_full = False
            return "full"
        self.heard.put(message)
        return "sent"

    def close(self) -> None:
        self.socket.close()
        self._bell.close()


class Running:
    """A control thread between a fake coordinator and a walk that the test plays."""

    def __init__(self, folder: str, *, stage: int) -> None:
        self.control = FakeControl()
        self.ours, theirs = descriptor_pair()
        theirs.settimeout(0.0)
        self._theirs = theirs
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.thread = ControlThread(
            bootstrap=Bootstrap(
                launch="0123456789abcdef",
                secret=bytes(32),
                run_directory=folder,
                stage=stage,
                incarnation=1,
                numa_node=-1,
                wants_self_binding=False,
                max_sequences=2,
                context_tokens=8,
                setup_bytes=1,
                arena_bytes=0,
                routing_words=1,
            ),
            control=self.control,  # type: ignore[arg-type]
            channel_fd=theirs.fileno(),
            recv_channel=lambda: recv_descriptors(theirs),
            on_failure=self.failures.put,
        )
        self.mapped: list[MappedSlots] = []
        self.thread.start()

    def give(self, label: bytes, fd: int) -> None:
        send_descriptors(self.ours, label, [fd])

    def linked(self) -> Linked:
        linked = self.thread.work.get(timeout=WAIT_S)
        assert isinstance(linked, Linked)
        assert isinstance(linked.slots, MappedSlots)
        self.mapped.append(linked.slots)
        return linked

    def close(self) -> None:
        self.thread.finish()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        for end in (self.thread._in, self.thread._out):
            if end is not None:
                end.link.close()
        for slots in self.mapped:
            slots.close()
        for channel in (self.ours, self._theirs):
            channel.close()
        self.control.close()
        os.close(self.thread._wake_fd)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []
    with tempfile.TemporaryDirectory(prefix="sc") as folder:

        def make(*, stage: int = 0) -> Running:
            running.append(Running(folder, stage=stage))
            return running[-1]

        yield make
        for one in running:
            one.close()


def super_chunk(index: int) -> SuperChunk:
    return SuperChunk(
        epoch=1,
        index=index,
        operations=(),
        segments=(),
        sub_chunk_tokens=1,
        slot_rows=1,
        upload="stream-all",
    )


def hello(pid: int) -> Hello:
    return Hello(stage=0, incarnation=1, pid=pid, binding="none", numa_node=-1)


def test_work_reaches_the_walk_in_order_and_the_end_wakes_every_wait(start: Callable[..., Running]) -> None:
    one = start()
    assign = Assign(incarnation=1, offset=0, length=5)
    one.control.say(assign, *(RunSuperChunk(incarnation=1, super_chunk=super_chunk(n)) for n in range(20)))
    assert one.thread.work.get(timeout=WAIT_S) == assign
    assert [one.thread.work.get(timeout=WAIT_S) for _ in range(20)] == [super_chunk(n) for n in range(20)]
    one.control.say(Shutdown(incarnation=1))
    for waits in (one.thread.work, one.thread.full, one.thread.credits):
        assert waits.get(timeout=WAIT_S) is None
    assert one.failures.empty()


def test_what_is_posted_is_sent_in_order_also_when_the_channel_was_full(
    start: Callable[..., Running],
) -> None:
    one = start()
    one.control.is_full = True
    for pid in range(10):
        one.thread.post(hello(pid))
    assert [one.control.heard.get(timeout=WAIT_S) for _ in range(10)] == [hello(pid) for pid in range(10)]


def test_what_was_posted_before_the_end_is_still_sent(start: Callable[..., Running]) -> None:
    one = start()
    one.thread.post(hello(1))
    one.thread.finish()
    one.thread.join(WAIT_S)
    assert one.control.heard.get(timeout=WAIT_S) == hello(1)


def test_a_command_that_is_none_ends_the_worker(start: Callable[..., Running]) -> None:
    one = start()
    one.control.say(hello(1))
    failure = one.failures.get(timeout=WAIT_S)
    assert isinstance(failure, ProtocolError)
    assert str(failure) == "Hello is not a command for a stage"
    assert one.thread.work.get(timeout=WAIT_S) is None


def test_a_coordinator_that_is_gone_ends_the_worker(start: Callable[..., Running]) -> None:
    one = start()
    one.ours.close()
    assert isinstance(one.failures.get(timeout=WAIT_S), ProtocolError)
    assert one.thread.credits.get(timeout=WAIT_S) is None


class KnownFiles(queue.SimpleQueue):
    """In place of the walk's queue: the logits files that are known at the moment when work is put."""

    def __init__(self, thread: ControlThread) -> None:
        self._thread = thread
        thread.work = self

    def put(self, _item: object) -> None:
        super().put(set(self._thread.logits_files))


def test_a_logits_file_is_known_before_the_work_that_comes_after_it(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    one = start()
    work = KnownFiles(one.thread)
    path = tmp_path / "logits"
    with path.open("w+b") as file:
        # As late as it can come: the thread has looked for descriptors, and is about to look for messages.
        one.control.on_message = lambda: one.give(logits_label(7, 128), file.fileno())
        one.control.say(RunSuperChunk(incarnation=1, super_chunk=super_chunk(0)))
        assert work.get(timeout=WAIT_S) == {7}
    fd, offset = one.thread.logits_files[7]
    assert offset == 128
    os.pwrite(fd, b"row", offset)
    os.close(fd)
    assert path.read_bytes()[128:] == b"row"


def test_descriptors_that_nobody_asked_for_end_the_worker_and_are_closed(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    one = start()
    with (tmp_path / "what").open("w+b") as file:
        one.give(b"what:1:2", file.fileno())
    failure = one.failures.get(timeout=WAIT_S)
    assert "a packet of 1 descriptors with an unknown label" in str(failure)


@pytest.mark.parametrize(
    "posted", [SlotReleased(slot=0), SlotFilled(slot=0, super_chunk=0, first_row=0, rows=1, last=True)]
)
def test_slots_without_a_link_are_a_bug(
    start: Callable[..., Running], posted: SlotFilled | SlotReleased
) -> None:
    one = start()
    one.thread.post(posted)
    assert isinstance(one.failures.get(timeout=WAIT_S), InvariantError)


# --- a link -------------------------------------------------------------------------------------------


def relink(direction: str) -> Relink:
    return Relink(
        incarnation=1,
        link=0,
        generation=1,
        direction=direction,  # type: ignore[arg-type]
        num_slots=SLOTS,
        slot_rows=SLOT_ROWS,
        slot_bytes=SLOT_BYTES,
    )


@pytest.fixture
def pair(start: Callable[..., Running]) -> tuple[Running, Running]:
    """Sender and receiver of link 0, ready."""
    sender, receiver = start(stage=0), start(stage=1)
    fd = create_memfd("slots", SLOTS * SLOT_BYTES)
    for one in (sender, receiver):
        one.give(slots_label(0, 1), fd)
    os.close(fd)
    sender.control.say(relink("out"))
    receiver.control.say(relink("in"))
    for one, stage, direction in ((sender, 0, "out"), (receiver, 1, "in")):
        assert one.linked().direction == direction
        assert one.control.heard.get(timeout=WAIT_S) == LinkReady(
            stage=stage, incarnation=1, link=0, generation=1, direction=direction
        )
    return sender, receiver


def test_a_relink_waits_for_its_memory(start: Callable[..., Running]) -> None:
    one = start()
    one.control.say(relink("in"), RunSuperChunk(incarnation=1, super_chunk=super_chunk(3)))
    assert one.thread.work.get(timeout=WAIT_S) == super_chunk(3)
    fd = create_memfd("slots", SLOTS * SLOT_BYTES)
    one.give(slots_label(0, 1), fd)
    os.close(fd)
    assert one.linked().direction == "in"


def test_slots_go_round_a_link(pair: tuple[Running, Running]) -> None:
    sender, receiver = pair
    for one in pair:
        one.control.say(BeginEpoch(incarnation=1, epoch=1))
    seen: list[Put] = []
    held: list[int] = []
    for number in range(3 * SLOTS):
        slot = sender.thread.credits.get(timeout=WAIT_S)
        assert slot is not None
        assert slot not in held
        sender.mapped[0].slot(slot)[:4] = number.to_bytes(4, "little")
        sender.thread.post(
            SlotFilled(slot=slot, super_chunk=number // 2, first_row=number % 2, rows=1, last=number % 2 == 1)
        )
        put = receiver.thread.full.get(timeout=WAIT_S)
        assert put is not None
        assert bytes(receiver.mapped[0].slot(put.slot)[:4]) == number.to_bytes(4, "little")
        seen.append(put)
        held.append(put.slot)
        if len(held) == SLOTS:  # as late as can be
            receiver.thread.post(SlotReleased(slot=held.pop(0)))
    assert [put.hand_off for put in seen] == list(range(3 * SLOTS))
    assert [put.super_chunk for put in seen] == [0, 0, 1, 1, 2, 2]
    assert sender.failures.empty()
    assert receiver.failures.empty()


def test_no_slot_is_given_before_the_epoch_begins(pair: tuple[Running, Running]) -> None:
    sender, receiver = pair
    sender.control.say(
        BeginEpoch(incarnation=1, epoch=1), RunSuperChunk(incarnation=1, super_chunk=super_chunk(0))
    )
    assert sender.thread.work.get(timeout=WAIT_S) == super_chunk(0)
    assert sender.thread.credits.empty()  # the receiver has not begun
    receiver.control.say(BeginEpoch(incarnation=1, epoch=1))
    assert {sender.thread.credits.get(timeout=WAIT_S) for _ in range(SLOTS)} == set(range(SLOTS))


def test_many_posts_of_many_threads_all_arrive(start: Callable[..., Running]) -> None:
    one = start()

    def post(first: int) -> None:
        for pid in range(first, first + 200):
            one.thread.post(hello(pid))

    threads = [threading.Thread(target=post, args=(1000 * number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = [one.control.heard.get(timeout=WAIT_S).pid for _ in range(600)]  # type: ignore[attr-defined]
    for number in range(1, 4):
        assert [pid for pid in heard if pid // 1000 == number] == list(
            range(1000 * number, 1000 * number + 200)
        )
