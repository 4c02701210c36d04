"""The worker's control thread: sockets and the hand-off protocol, beside the walk and never inside it.

It owns the control channel, the neighbour links and the descriptor channel. The walk's thread gets work
through queues and posts back what it finished; a wake-up descriptor brings the poll round.
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

from strata_coord.ipc.bootstrap import Bootstrap, parse_logits_label, parse_slots_label
from strata_coord.ipc.device_memory import DeviceSlots, allocate_device_slots, open_device_slots
from strata_coord.ipc.endpoints import link_endpoint
from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.host_memory import MappedSlots
from strata_coord.ipc.links import ControlClient, NeighbourLink
from strata_coord.ipc.messages import (
    Assign,
    BeginEpoch,
    BetweenNeighbours,
    Direction,
    Grant,
    LinkReady,
    Put,
    Relink,
    Return,
    RunSuperChunk,
    Shutdown,
    SlotsReady,
    SuperChunk,
    ToCoordinator,
)
from strata_coord.ipc.slots import ReceiverLink, SenderLink
from strata_coord.stage_worker.hand_off_rows import SlotFilled, SlotReleased


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """To the walk's thread: one side of a link is up, with its slots."""

    direction: Direction
    slots: MappedSlots | DeviceSlots


WalkWork = Assign | Linked | SuperChunk | None  # None: stop
WalkResult = SlotFilled | SlotReleased | ToCoordinator


class _LinkEnd:
    """One side of a neighbour link: its socket and the messages that wait for room."""

    def __init__(self, relink: Relink, link: NeighbourLink) -> None:
        self.relink = relink
        self.link = link
        self.outbox: deque[BetweenNeighbours] = deque()
        self.announced = False

    def flush(self) -> None:
        while self.outbox and self.link.send(self.outbox[0]) == "sent":
            self.outbox.popleft()


class ControlThread(threading.Thread):
    """Runs until Shutdown, a lost channel, or stop(). A failure goes to on_failure and ends the worker."""

    def __init__(
        self,
        *,
        bootstrap: Bootstrap,
        control: ControlClient,
        channel_fd: int,
        recv_channel: Callable[[], tuple[bytes, list[int]]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.work: queue.SimpleQueue[WalkWork] = queue.SimpleQueue()
        self.full: queue.SimpleQueue[Put | None] = queue.SimpleQueue()
        self.credits: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.logits_files: dict[int, tuple[int, int]] = {}
        self.device_ordinal = -1  # of the stage's CUDA device, set before links are asked for
        self._setup = bootstrap
        self._control = control
        self._channel_fd = channel_fd
        self._recv_channel = recv_channel
        self._on_failure = on_failure
        self._posted: queue.SimpleQueue[WalkResult] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._slot_fds: dict[tuple[int, int], int] = {}
        self._waiting_relinks: list[Relink] = []
        self._in: _LinkEnd | None = None
        self._out: _LinkEnd | None = None
        self._receiver: ReceiverLink | None = None
        self._sender: SenderLink | None = None
        self._outbox: deque[ToCoordinator] = deque()
        self._stopping = False

    def post(self, result: WalkResult) -> None:
        """Hand something to the control thread; any thread may call."""
        self._posted.put(result)
        os.eventfd_write(self._wake_fd, 1)

    def run(self) -> None:
        """Poll until told to stop, then send what is left."""
        try:
            poller = zmq.Poller()
            poller.register(self._control.socket, zmq.POLLIN)
            poller.register(self._channel_fd, zmq.POLLIN)
            poller.register(self._wake_fd, zmq.POLLIN)
            while not self._stopping:
                poller.poll(self._poll_ms())
                self._step(poller)
            self._take_posted()
            self._flush_outbox()
        except BaseException as failure:  # reported by the worker, whatever it is
            self._on_failure(failure)
        finally:
            self.stop_walk()

    def finish(self) -> None:
        """Send what was posted, then end; any thread may call."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def stop_walk(self) -> None:
        """Wake the walk's thread wherever it waits, and make it end."""
        self.work.put(None)
        self.full.put(None)
        self.credits.put(None)

    def _poll_ms(self) -> int:
        ends = [end for end in (self._in, self._out) if end is not None]
        # Sockets do not poll for writing all the time, so what could not be sent is tried again shortly.
        unsent = self._outbox or any(end.outbox or not end.announced for end in ends)
        return 2 if unsent else 1000

    def _step(self, poller: zmq.Poller) -> None:
        messages = self._control.recv_all()
        # After the messages: what one of them relies on was sent over the channel before it.
        self._read_channel()
        for message in messages:
            self._command(message)
        for relink in list(self._waiting_relinks):
            self._try_relink(relink, poller)
        for end in (self._in, self._out):
            if end is not None:
                self._serve(end)
        self._take_posted()
        for end in (self._in, self._out):
            if end is not None:
                end.flush()
        self._flush_outbox()

    def _flush_outbox(self) -> None:
        while self._outbox and self._control.send(self._outbox[0]) == "sent":
            self._outbox.popleft()

    def _read_channel(self) -> None:
        while True:
            try:
                label, fds = self._recv_channel()
            except BlockingIOError:
                return
            slots, logits = parse_slots_label(label), parse_logits_label(label)
            if len(fds) != 1 or (slots is None and logits is None):
                for fd in fds:
                    os.close(fd)
                message = f"a packet of {len(fds)} descriptors with an unknown label"
                raise ProtocolError(message)
            if slots is not None:
                self._slot_fds[slots] = fds[0]
            elif logits is not None:
                self.logits_files[logits[0]] = (fds[0], logits[1])

    def _command(self, message: object) -> None:
        match message:
            case Assign():
                self.work.put(message)
            case Relink():
                self._waiting_relinks.append(message)
            case BeginEpoch():
                self._begin(message.epoch)
            case RunSuperChunk():
                self.work.put(message.super_chunk)
            case Shutdown():
                self._stopping = True
            case _:
                error = f"{type(message).__name__} is not a command for a stage"
                raise ProtocolError(error)

    def _try_relink(self, relink: Relink, poller: zmq.Poller) -> None:
        slots = self._slots_of(relink)
        if slots is None:
            return  # its memory is still on its way over the channel
        self._waiting_relinks.remove(relink)
        is_in = relink.direction == "in"
        link = NeighbourLink(
            link_endpoint(Path(self._setup.run_directory), relink.link, relink.generation),
            secret=self._setup.secret,
            launch=self._setup.launch,
            link=relink.link,
            generation=relink.generation,
            direction=relink.direction,
            num_slots=relink.num_slots,
        )
        poller.register(link.socket, zmq.POLLIN)
        end = _LinkEnd(relink, link)
        if is_in:
            self._in = end
            self._receiver = ReceiverLink(relink.num_slots, relink.slot_rows, generation=relink.generation)
        else:
            self._out = end
            self._sender = SenderLink(relink.num_slots, relink.slot_rows, generation=relink.generation)
        self.work.put(Linked(direction=relink.direction, slots=slots))

    def _slots_of(self, relink: Relink) -> MappedSlots | DeviceSlots | None:
        is_in = relink.direction == "in"
        if relink.route == "host":
            fd = self._slot_fds.pop((relink.link, relink.generation), None)
            if fd is None:
                return None
            # Writable on both sides: torch knows no tensor that may only be read, and says so on stderr.
            slots = MappedSlots(fd, relink.num_slots, relink.slot_bytes, writable=True)
            os.close(fd)
            return slots
        if not is_in:
            return open_device_slots(self.device_ordinal, relink.num_slots, relink.slot_bytes, relink.handle)
        device_slots = allocate_device_slots(self.device_ordinal, relink.num_slots, relink.slot_bytes)
        self._outbox.append(
            SlotsReady(
                stage=self._setup.stage,
                incarnation=self._setup.incarnation,
                link=relink.link,
                generation=relink.generation,
                handle=device_slots.handle(),
            )
        )
        return device_slots

    def _serve(self, end: _LinkEnd) -> None:
        if not end.announced and end.link.is_connected():
            end.announced = True
            self._outbox.append(
                LinkReady(
                    stage=self._setup.stage,
                    incarnation=self._setup.incarnation,
                    link=end.relink.link,
                    generation=end.relink.generation,
                    direction=end.relink.direction,
                )
            )
        for message in end.link.recv_all():
            match message:
                case Grant() if self._sender is not None and self._out is not None:
                    self._out.outbox.extend(self._sender.on_grant(message))
                    self._hand_credits()
                case Put() if self._receiver is not None:
                    self._receiver.on_put(message)
                    self._hand_full()
                case Return() if self._receiver is not None:
                    self._receiver.on_return(message)
                case _:
                    error = f"{type(message).__name__} came over the wrong side of a link"
                    raise ProtocolError(error)

    def _begin(self, epoch: int) -> None:
        if self._receiver is not None and self._in is not None:
            self._in.outbox.extend(self._receiver.begin(epoch))
        if self._sender is not None:
            self._sender.begin(epoch)
            self._hand_credits()

    def _hand_credits(self) -> None:
        while self._sender is not None and (slot := self._sender.acquire()) is not None:
            self.credits.put(slot)

    def _hand_full(self) -> None:
        while self._receiver is not None and (put := self._receiver.take()) is not None:
            self.full.put(put)

    def _take_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while True:
            try:
                posted = self._posted.get_nowait()
            except queue.Empty:
                return
            if isinstance(posted, SlotFilled):
                if self._sender is None or self._out is None:
                    message = f"slot {posted.slot} was filled, but there is no stage after this one"
                    raise InvariantError(message)
                put = self._sender.filled(
                    posted.slot,
                    super_chunk=posted.super_chunk,
                    first_row=posted.first_row,
                    rows=posted.rows,
                    last=posted.last,
                )
                self._out.outbox.append(put)
            elif isinstance(posted, SlotReleased):
                if self._receiver is None or self._in is None:
                    message = f"slot {posted.slot} was released, but there is no stage before this one"
                    raise InvariantError(message)
                self._in.outbox.extend(self._receiver.release(posted.slot))
            else:
                self._outbox.append(posted)
