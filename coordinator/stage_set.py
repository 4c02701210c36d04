"""The worker processes of one launch: started, assigned, linked, watched, ended. Knows no request.

Everything between "no process" and "an epoch is open on all stages" is here, and the way back. A stage that
ends, hangs or breaks the protocol is an error that names stage, layer and super-chunk.
"""

import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import zmq

from strata_coord.coordinator.assignments import stage_assignment
from strata_coord.coordinator.launcher import WorkerProcess, end_workers, numactl_works, start_worker
from strata_coord.coordinator.model_index import ModelIndex
from strata_coord.coordinator.plan import LaunchPlan
from strata_coord.coordinator.request_meter import StageReading
from strata_coord.coordinator.shared_memory import StageMemory, TokenTable
from strata_coord.coordinator.stage_facts import StageIdentity
from strata_coord.coordinator.supervisor import StageWatch, place
from strata_coord.ipc.bootstrap import slots_label
from strata_coord.ipc.endpoints import RuntimeDirectory, control_endpoint, new_launch_id
from strata_coord.ipc.errors import (
    InvariantError,
    ProtocolError,
    StageError,
    StageFailedError,
    StageLostError,
    StageTimeoutError,
)
from strata_coord.ipc.host_memory import create_memfd, send_descriptors
from strata_coord.ipc.links import ControlServer, PeerFault
from strata_coord.ipc.messages import (
    Assign,
    BeginEpoch,
    Direction,
    Hello,
    LinkReady,
    Relink,
    Shutdown,
    SlotsReady,
    StageFailed,
    StageReady,
    SuperChunkDone,
    ToStage,
)
from strata_coord.ipc.signing import SECRET_BYTES

EPOCH = 1
GENERATION = 1
INCARNATION = 1
LAST_WORDS_MS = 200  # a worker that reports a failure exits right after; its message may be behind its pidfd


@dataclass(slots=True, kw_only=True)
class StageEntry:
    """One stage as the coordinator sees it."""

    memory: StageMemory
    worker: WorkerProcess | None = None
    hello: Hello | None = None
    ready: StageReady | None = None
    links_wanted: set[Direction] = field(default_factory=set)
    reading: StageReading | None = None  # the totals it reported last


class StageSet:
    """All stages of a launch. Used by one thread, which must live as long as the workers do.

    The kernel's parent-death signal follows the thread that started a process, not the process.
    """

    def __init__(
        self,
        *,
        plan: LaunchPlan,
        model: ModelIndex,
        hang_s: float,
        start_s: float,
        debug_delay_s: float,
        memory_lock: threading.Lock,
    ) -> None:
        """memory_lock: held while the stages' memory is closed, for readers in other threads."""
        self.entries: list[StageEntry] = []
        self.is_open = False  # the epoch has begun on all stages
        self._plan = plan
        self._model = model
        self._debug_delay_s = debug_delay_s
        self._memory_lock = memory_lock
        self._launch = new_launch_id()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._watch = StageWatch(hang_s=hang_s, start_s=start_s)
        self._server: ControlServer | None = None
        self._slots_wanted: set[int] = set()  # links whose receiver has yet to say SlotsReady

    # --- start and end -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, tokens: TokenTable, *, grace_s: Callable[[], float]) -> Iterator[list[str]]:
        """Start all workers; on leaving, end them all and close what they shared.

        grace_s: asked on leaving, how long workers may take to end by themselves.

        Yields a list that, after the block, holds a line for each worker that had to be killed.
        """
        end_lines: list[str] = []
        with contextlib.ExitStack() as resources:
            directory = resources.enter_context(RuntimeDirectory(self._launch))
            self._server = ControlServer(
                control_endpoint(directory.path), secret=self._secret, launch=self._launch
            )
            resources.callback(self._server.close)
            resources.callback(self._close_memory)
            resources.callback(lambda: end_lines.extend(self._end_workers(grace_s())))
            for number in range(len(self._plan.stages)):
                self._start(number, directory, tokens)
            yield end_lines

    def _start(self, number: int, directory: RuntimeDirectory, tokens: TokenTable) -> None:
        plan = self._plan.stages[number]
        assignment = stage_assignment(self._plan, number, self._model)
        if self._debug_delay_s:
            assignment = replace(assignment, debug_delay_s=self._debug_delay_s)
        entry = StageEntry(memory=StageMemory(assignment, arena_bytes=plan.arena_bytes))
        self.entries.append(entry)
        self._need_server().expect(number, INCARNATION)
        entry.worker = start_worker(
            stage=number,
            run_id=self._launch[:12],
            numa_node=plan.numa_node,
            cpu_threads=plan.cpu_threads,
            run_directory=directory.path,
        )
        self._watch.started(number, time.monotonic())
        bootstrap = entry.memory.bootstrap(
            launch=self._launch,
            secret=self._secret,
            run_directory=str(directory.path),
            stage=number,
            incarnation=INCARNATION,
            numa_node=plan.numa_node,
            wants_self_binding=plan.numa_node >= 0 and not numactl_works(plan.numa_node),
        )
        try:
            entry.memory.send(entry.worker.channel, bootstrap, tokens)
        except ProtocolError as error:
            raise self.explained(error) from error

    def _end_workers(self, grace_s: float) -> list[str]:
        workers = [entry.worker for entry in self.entries if entry.worker is not None]
        for number, entry in enumerate(self.entries):
            if entry.hello is not None:
                self._need_server().send(number, INCARNATION, Shutdown(incarnation=INCARNATION))
        return end_workers(workers, grace_s=grace_s)

    def _close_memory(self) -> None:
        with self._memory_lock:
            entries, self.entries = self.entries, []
            for entry in entries:
                entry.memory.close()

    # --- messages ----------------------------------------------------------------------------------------

    def register(self, poller: zmq.Poller) -> None:
        """Poll for what stages say and for their ends."""
        poller.register(self._need_server().socket, zmq.POLLIN)
        for entry in self.entries:
            if entry.worker is not None:
                poller.register(entry.worker.pidfd, zmq.POLLIN)

    def send(self, number: int, message: ToStage) -> None:
        """Send to one stage.

        Raises:
            StageLostError: its queue takes nothing.
        """
        outcome = self._need_server().send(number, INCARNATION, message)
        if outcome != "sent":
            text = f"stage {number} takes no {type(message).__name__}: its queue is {outcome}"
            raise StageLostError(text)

    def receive(self) -> list[SuperChunkDone | StageReady]:
        """Take in what stages said; returns what concerns others.

        Raises:
            StageFailedError: a stage reported a failure.
            ProtocolError: a stage broke the protocol.
        """
        news: list[SuperChunkDone | StageReady] = []
        for message in self._need_server().recv_all():
            match message:
                case PeerFault():
                    text = f"stage {message.stage}: {message.error}"
                    raise ProtocolError(text)
                case Hello():
                    self._hello(message)
                case StageReady():
                    self._ready(message)
                    news.append(message)
                case SlotsReady():
                    self._slots_ready(message)
                case LinkReady():
                    self.entries[message.stage].links_wanted.discard(message.direction)
                    self._begin_if_linked()
                case SuperChunkDone():
                    entry = self.entries[message.stage]
                    entry.reading = StageReading(clock=message.clock, counters=message.counters)
                    news.append(message)
                case StageFailed():
                    text = f"stage {message.stage} failed{_where(message)}: {message.text}"
                    failure = StageFailedError(text)
                    failure.add_note(message.trace)
                    raise failure
                case _:
                    text = f"stage {message.stage} sends {type(message).__name__} unasked"
                    raise ProtocolError(text)
        return news

    def _hello(self, hello: Hello) -> None:
        entry = self.entries[hello.stage]
        if entry.worker is None or hello.pid != entry.worker.pid:
            text = f"stage {hello.stage}: process {hello.pid} says hello in another one's place"
            raise ProtocolError(text)
        entry.hello = hello
        self.send(hello.stage, Assign(incarnation=INCARNATION, offset=0, length=len(entry.memory.setup)))

    def _ready(self, ready: StageReady) -> None:
        entry = self.entries[ready.stage]
        if entry.hello is None:
            text = f"stage {ready.stage} is ready before it said hello"
            raise ProtocolError(text)
        entry.ready = ready
        snapshot = entry.memory.status.snapshot()
        if snapshot is not None:
            entry.reading = StageReading(clock=snapshot.clock, counters=snapshot.counters)
        if all(other.ready is not None for other in self.entries):
            for link in range(len(self.entries) - 1):
                self._link(link)
            self._watch.linking(time.monotonic())
            self._begin_if_linked()

    def _link(self, link: int) -> None:
        sides: tuple[tuple[int, Direction], ...] = ((link + 1, "in"), (link, "out"))
        for number, direction in sides:
            self.entries[number].links_wanted.add(direction)
        if self._plan.stages[link].route == "device":
            # The receiver allocates; the sender is told where once SlotsReady is here.
            self._slots_wanted.add(link)
            self.send(link + 1, self._relink(link, "in"))
            return
        num_bytes = self._plan.hand_off_slots * self._plan.slot_rows * self._plan.row_bytes
        fd = create_memfd(f"link-{link}", num_bytes, numa_node=self._plan.stages[link + 1].numa_node)
        try:
            for number, _ in sides:
                worker = self.entries[number].worker
                if worker is not None:
                    send_descriptors(worker.channel, slots_label(link, GENERATION), [fd])
        finally:
            os.close(fd)
        for number, direction in sides:
            self.send(number, self._relink(link, direction))

    def _slots_ready(self, ready: SlotsReady) -> None:
        link = ready.link
        if link not in self._slots_wanted or (ready.stage, ready.generation) != (link + 1, GENERATION):
            text = f"stage {ready.stage} sends slots of link {link}, generation {ready.generation}, unasked"
            raise ProtocolError(text)
        if not ready.handle:
            text = f"stage {ready.stage}: the device gives no handle for the slots of link {link}"
            raise StageFailedError(text)
        self._slots_wanted.discard(link)
        self.send(link, self._relink(link, "out", handle=ready.handle))

    def _relink(self, link: int, direction: Direction, *, handle: bytes = b"") -> Relink:
        return Relink(
            incarnation=INCARNATION,
            link=link,
            generation=GENERATION,
            direction=direction,
            num_slots=self._plan.hand_off_slots,
            slot_rows=self._plan.slot_rows,
            slot_bytes=self._plan.slot_rows * self._plan.row_bytes,
            route=self._plan.stages[link].route or "host",
            handle=handle,
        )

    def _begin_if_linked(self) -> None:
        if self.is_open or any(entry.links_wanted or entry.ready is None for entry in self.entries):
            return
        for number in range(len(self.entries)):
            self.send(number, BeginEpoch(incarnation=INCARNATION, epoch=EPOCH))
        self.is_open = True

    # --- watching ----------------------------------------------------------------------------------------

    def check_processes(self, ready: dict[object, int]) -> None:
        """Look at the pidfds that poll found ready.

        Raises:
            StageError: a worker has ended; what it still said explains its end better than its status does.
        """
        for number, entry in enumerate(self.entries):
            worker = entry.worker
            if worker is None or worker.pidfd not in ready:
                continue
            if self._need_server().socket.poll(LAST_WORDS_MS):
                self.receive()
            raise self._lost(number, worker)

    def explained(self, error: Exception) -> Exception:
        """The error, or what explains it better: a channel most often breaks because its worker has ended."""
        if isinstance(error, StageError):
            return error
        for number, entry in enumerate(self.entries):
            if (
                entry.worker is not None
                and select.select([entry.worker.pidfd], [], [], LAST_WORDS_MS / 1e3)[0]
            ):
                return self._lost(number, entry.worker)
        return error

    def _lost(self, number: int, worker: WorkerProcess) -> StageLostError:
        worker.process.wait()
        text = f"stage {number} {worker.exit_text(self._place(number))}"
        return StageLostError(text)

    def check_progress(self, waited_for: int | None) -> None:
        """Look for stages that hang; waited_for: Pipeline.waited_for.

        Raises:
            StageTimeoutError: a stage makes no progress.
            ProtocolError: the control socket's path was taken by another process.
        """
        now_s = time.monotonic()
        snapshots = [entry.memory.status.snapshot() for entry in self.entries]
        for number, snapshot in enumerate(snapshots):
            stuck = self._watch.check(number, snapshot, now_s)
            if stuck is not None:
                text = f"stage {number} {stuck}"
                raise StageTimeoutError(text)
        unlinked = [number for number, entry in enumerate(self.entries) if entry.links_wanted]
        if (late := self._watch.check_links(unlinked, now_s)) is not None:
            raise StageTimeoutError(late)
        held_up = self._watch.check_stream(waited_for, snapshots, now_s)
        if held_up is not None:
            text = f"stage {held_up[0]} {held_up[1]}"
            raise StageTimeoutError(text)
        if not self._need_server().is_own_path():
            text = "the control socket was replaced by another process"
            raise ProtocolError(text)

    def identities(self) -> tuple[StageIdentity, ...]:
        """Who runs the stages.

        Raises:
            InvariantError: a stage has not reported yet.
        """
        return tuple(self._identity(number, entry) for number, entry in enumerate(self.entries))

    def _identity(self, number: int, entry: StageEntry) -> StageIdentity:
        plan = self._plan.stages[number]
        if entry.hello is None or entry.ready is None:
            text = f"stage {number} has not reported yet"
            raise InvariantError(text)
        return StageIdentity(
            stage=number,
            pid=entry.hello.pid,
            device=entry.ready.device,
            numa_node=entry.hello.numa_node,
            binding=entry.hello.binding,
            route=plan.route,
            first_layer=plan.first_layer,
            last_layer=plan.last_layer,
            load_file_read=entry.ready.load_file_read,
            load_seconds=entry.ready.load_seconds,
            notes=entry.ready.notes,
        )

    def _place(self, number: int) -> str:
        return place(self.entries[number].memory.status.snapshot())

    def _need_server(self) -> ControlServer:
        if self._server is None:
            text = "the stages are used before they are started"
            raise InvariantError(text)
        return self._server


def _where(failed: StageFailed) -> str:
    where = f" in layer {failed.layer}" if failed.layer >= 0 else ""
    return where + (f", super-chunk {failed.super_chunk}" if failed.super_chunk >= 0 else "")
