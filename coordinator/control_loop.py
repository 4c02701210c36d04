"""The shell around the pure parts: sockets, processes, shared memory and the clock, in one thread.

It starts the workers (their parent-death signal follows this thread, which lives as long as they do), brings
links and the epoch up, feeds the Pipeline and carries out its commands, and watches pidfds and status pages.
A lost stage fails every open request with one line that names stage, layer and super-chunk.
"""

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import zmq

from strata_coord.coordinator.assignments import stage_assignment
from strata_coord.coordinator.launcher import WorkerProcess, end_workers, numactl_works, start_worker
from strata_coord.coordinator.logits_file import create_logits_file, logits_offset
from strata_coord.coordinator.model_index import ModelIndex
from strata_coord.coordinator.pipeline import (
    Command,
    Event,
    Pipeline,
    PipelineLost,
    PromptCancelled,
    PromptSubmitted,
    SendSuperChunk,
    SetCancelWord,
    StageReported,
    Tell,
    WritePrompt,
    WriteToken,
)
from strata_coord.coordinator.plan import LaunchPlan, PromptPlan
from strata_coord.coordinator.request_meter import RequestFigures, RequestMeter, StageReading
from strata_coord.coordinator.requests import (
    GenerationEvent,
    GenerationFinished,
    GenerationRequest,
    PromptProgress,
    TokenGenerated,
)
from strata_coord.coordinator.scheduler import PrefillShape, SchedulerLimits, Sequence
from strata_coord.coordinator.shared_memory import StageMemory, TokenTable
from strata_coord.coordinator.stage_facts import StageIdentity
from strata_coord.coordinator.supervisor import StageWatch, place
from strata_coord.coordinator.telemetry import DashboardState, StageFacts, Telemetry
from strata_coord.ipc.bootstrap import logits_label, slots_label
from strata_coord.ipc.endpoints import RuntimeDirectory, control_endpoint, new_launch_id
from strata_coord.ipc.errors import (
    InvariantError,
    ProtocolError,
    StageFailedError,
    StageLostError,
    StageTimeoutError,
    StrataError,
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
    RunSuperChunk,
    Shutdown,
    StageFailed,
    StageReady,
    SuperChunkDone,
    ToStage,
)
from strata_coord.ipc.signing import SECRET_BYTES
from strata_coord.ipc.status_page import StatusEvent

POLL_MS = 200
EPOCH = 1
GENERATION = 1
INCARNATION = 1
LAST_WORDS_MS = 200  # a worker that reports a failure exits right after; its message may be behind its pidfd


@dataclass(slots=True, kw_only=True)
class Ending:
    """The last entry of a submission's events."""

    finished: GenerationFinished
    figures: RequestFigures | None


@dataclass(slots=True, kw_only=True)
class Submission:
    """A request as the loop holds it."""

    sequence: int
    request: GenerationRequest
    plan: PromptPlan
    meter: RequestMeter | None = None
    finished: GenerationFinished | None = None  # held back until every stage has reported the prompt
    logits_fd: int = -1
    first_index: int = -1
    events: "queue.SimpleQueue[GenerationEvent | Ending]" = field(default_factory=queue.SimpleQueue)


@dataclass(slots=True, kw_only=True)
class _Stage:
    """One stage as the loop sees it."""

    memory: StageMemory
    worker: WorkerProcess | None = None
    hello: Hello | None = None
    ready: StageReady | None = None
    links_wanted: set[Direction] = field(default_factory=set)
    reading: StageReading | None = None


class ControlLoop(threading.Thread):
    """The engine's thread."""

    def __init__(
        self, *, plan: LaunchPlan, model: ModelIndex, hang_s: float, start_s: float, debug_delay_s: float
    ) -> None:
        super().__init__(name="control-loop", daemon=True)
        self._plan = plan
        self._model = model
        self._debug_delay_s = debug_delay_s
        self._launch = new_launch_id()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch = StageWatch(hang_s=hang_s, start_s=start_s)
        self._stages: list[_Stage] = []
        self._submissions: dict[int, Submission] = {}
        self._next_sequence = 1
        self._pipeline = Pipeline(
            SchedulerLimits(
                num_stages=len(plan.stages),
                max_sequences=plan.max_sequences,
                kv_pool_tokens=plan.kv_pool_tokens,
                max_rows=plan.super_chunk_tokens,
                decode_sub_chunk_tokens=plan.sub_chunk_tokens,
                decode_slot_rows=plan.slot_rows,
            ),
            epoch=EPOCH,
        )
        self._lock = threading.Lock()  # guards telemetry and the stages' status pages against dashboard_state
        self._telemetry = Telemetry(
            tuple(
                StageFacts(
                    stage=stage.stage,
                    device=stage.device,
                    numa_node=stage.numa_node,
                    binding="",
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    device_bytes_planned=stage.budget_bytes,
                )
                for stage in plan.stages
            )
        )
        self._is_ready = threading.Event()
        self._epoch_begun = False
        self._stopping = False
        self._grace_s = 0.0
        self._end_lines: list[str] = []
        self.failure: StrataError | None = None

    # --- called from other threads ---------------------------------------------------------------------

    def wait_ready(self) -> StrataError | None:
        """Block until the pipeline is up, or lost; returns why it is lost."""
        self._is_ready.wait()
        return self.failure

    def submit(self, request: GenerationRequest, plan: PromptPlan) -> Submission:
        """Queue a request.

        Raises:
            StrataError: the pipeline is lost.
        """
        if self.failure is not None:
            raise self.failure
        submission = Submission(sequence=-1, request=request, plan=plan)
        with self._lock:
            submission.sequence = self._next_sequence
            self._next_sequence += 1
        if request.logits_path is not None:
            submission.logits_fd = create_logits_file(
                request.logits_path,
                num_tokens=len(request.prompt_ids),
                vocabulary_size=self._model.geometry.vocabulary_size,
            )
        accepted_ns = time.monotonic_ns()
        self._post(lambda: self._accept(submission, accepted_ns))
        return submission

    def cancel(self, sequence: int) -> None:
        """Give a request up."""
        self._post(lambda: self._handle(PromptCancelled(sequence=sequence)))

    def identities(self) -> tuple[StageIdentity, ...]:
        """Who runs the stages."""
        return tuple(self._identity(number) for number in range(len(self._stages)))

    def dashboard_state(self) -> DashboardState:
        """Read the status pages and return what a display shows."""
        now_s = time.monotonic()
        with self._lock:
            if not self._stopping:
                for number, stage in enumerate(self._stages):
                    snapshot = stage.memory.status.snapshot()
                    if snapshot is not None:
                        self._telemetry.observe(number, snapshot, now_s)
            return self._telemetry.state(now_s)

    def new_spans(self, seen: Mapping[int, int]) -> list[tuple[int, list[StatusEvent]]]:
        """Per stage, the flight recorder's count so far and its spans from number seen[stage] on."""
        with self._lock:
            if self._stopping:
                return []
            return [
                stage.memory.status.events(seen.get(number, 0)) for number, stage in enumerate(self._stages)
            ]

    def show_text(self, text: str) -> None:
        """Let displays show a piece of the answer in progress."""
        with self._lock:
            self._telemetry.show_text(text)

    def stop(self, grace_s: float) -> list[str]:
        """End everything; returns a line for each worker that had to be killed. May be called twice."""
        if self.ident is not None:
            self._grace_s = grace_s
            self._post(self._stop_serving)
            self.join()
        return self._end_lines

    def _post(self, action: Callable[[], None]) -> None:
        self._mail.put(action)
        os.eventfd_write(self._wake_fd, 1)

    def _stop_serving(self) -> None:
        self._stopping = True

    # --- the thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Bring the pipeline up, serve until stopped, take everything down."""
        try:
            with contextlib.ExitStack() as resources:
                self._serve(resources)
        except StrataError as error:
            self._lose(error)
        except Exception as error:  # noqa: BLE001  a bug here must still end every request
            failure = InvariantError(f"the control loop failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._lose(failure)
        finally:
            self._is_ready.set()
            self._drain_mail()
            for submission in list(self._submissions.values()):
                self._end(submission, GenerationFinished(reason="cancelled"))

    def _serve(self, resources: contextlib.ExitStack) -> None:
        directory = resources.enter_context(RuntimeDirectory(self._launch))
        tokens = TokenTable(max_sequences=self._plan.max_sequences, context_tokens=self._plan.context_tokens)
        resources.callback(tokens.close)
        self._tokens = tokens
        server = ControlServer(control_endpoint(directory.path), secret=self._secret, launch=self._launch)
        resources.callback(server.close)
        self._server = server
        resources.callback(self._take_down)
        for number in range(len(self._plan.stages)):
            self._start_stage(number, directory)
        poller = zmq.Poller()
        poller.register(server.socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        for stage in self._stages:
            if stage.worker is not None:
                poller.register(stage.worker.pidfd, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll(POLL_MS))
            self._drain_mail()
            self._receive()
            self._check_processes(ready)
            self._check_progress()
        self._say_goodbye()

    def _start_stage(self, number: int, directory: RuntimeDirectory) -> None:
        plan = self._plan.stages[number]
        assignment = stage_assignment(self._plan, number, self._model)
        if self._debug_delay_s:
            assignment = replace(assignment, debug_delay_s=self._debug_delay_s)
        stage = _Stage(memory=StageMemory(assignment, arena_bytes=plan.arena_bytes))
        with self._lock:
            self._stages.append(stage)
        self._server.expect(number, INCARNATION)
        worker = start_worker(
            stage=number,
            run_id=self._launch[:12],
            numa_node=plan.numa_node,
            cpu_threads=plan.cpu_threads,
            run_directory=directory.path,
        )
        stage.worker = worker
        self._watch.started(number, time.monotonic())
        bootstrap = stage.memory.bootstrap(
            launch=self._launch,
            secret=self._secret,
            run_directory=str(directory.path),
            stage=number,
            incarnation=INCARNATION,
            numa_node=plan.numa_node,
            wants_self_binding=plan.numa_node >= 0 and not numactl_works(plan.numa_node),
        )
        stage.memory.send(worker.channel, bootstrap, self._tokens)

    def _take_down(self) -> None:
        workers = [stage.worker for stage in self._stages if stage.worker is not None]
        self._end_lines = end_workers(workers, grace_s=self._grace_s)
        with self._lock:
            self._stopping = True
            for stage in self._stages:
                stage.memory.close()

    def _say_goodbye(self) -> None:
        for number, stage in enumerate(self._stages):
            if stage.hello is not None:
                self._server.send(number, INCARNATION, Shutdown(incarnation=INCARNATION))

    def _lose(self, error: StrataError) -> None:
        """The pipeline cannot go on: tell every request why."""
        if self.failure is None:
            self.failure = error
        if not self._stopping:
            with contextlib.suppress(OSError):
                self._carry_out(self._pipeline.handle(PipelineLost(text=str(error)), time.monotonic_ns()))
        self._is_ready.set()

    def _drain_mail(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        while True:
            try:
                action = self._mail.get_nowait()
            except queue.Empty:
                return
            action()

    # --- from the stages -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        for message in self._server.recv_all():
            match message:
                case PeerFault():
                    text = f"stage {message.stage}: {message.error}"
                    raise ProtocolError(text)
                case Hello():
                    self._hello(message)
                case StageReady():
                    self._stage_ready(message)
                case LinkReady():
                    self._stages[message.stage].links_wanted.discard(message.direction)
                    self._begin_if_linked()
                case SuperChunkDone():
                    self._super_chunk_done(message)
                case StageFailed():
                    where = self._place(message.stage)
                    text = f"stage {message.stage} failed {where}: {message.text}"
                    failure = StageFailedError(text)
                    failure.add_note(message.trace)
                    raise failure
                case _:
                    text = f"stage {message.stage} sends {type(message).__name__} unasked"
                    raise ProtocolError(text)

    def _hello(self, hello: Hello) -> None:
        stage = self._stages[hello.stage]
        if stage.worker is None or hello.pid != stage.worker.pid:
            text = f"stage {hello.stage}: process {hello.pid} says hello in another one's place"
            raise ProtocolError(text)
        stage.hello = hello
        self._send(hello.stage, Assign(incarnation=INCARNATION, offset=0, length=len(stage.memory.setup)))

    def _stage_ready(self, ready: StageReady) -> None:
        stage = self._stages[ready.stage]
        stage.ready = ready
        hello = stage.hello
        if hello is None:
            text = f"stage {ready.stage} is ready before it said hello"
            raise ProtocolError(text)
        snapshot = stage.memory.status.snapshot()
        if snapshot is not None:
            stage.reading = StageReading(clock=snapshot.clock, counters=snapshot.counters)
        with self._lock:
            self._telemetry.stage_ready(
                ready.stage,
                device=ready.device,
                binding=hello.binding,
                numa_node=hello.numa_node,
                device_bytes=ready.device_bytes,
            )
        if all(other.ready is not None for other in self._stages):
            self._link_all()

    def _link_all(self) -> None:
        for link in range(len(self._stages) - 1):
            slot_bytes = self._plan.slot_rows * self._plan.row_bytes
            receiver = link + 1
            fd = create_memfd(
                f"link-{link}",
                self._plan.hand_off_slots * slot_bytes,
                numa_node=self._plan.stages[receiver].numa_node,
            )
            sides: tuple[tuple[int, Direction], ...] = ((receiver, "in"), (link, "out"))
            try:
                for number, direction in sides:
                    stage = self._stages[number]
                    if stage.worker is not None:
                        send_descriptors(stage.worker.channel, slots_label(link, GENERATION), [fd])
                    stage.links_wanted.add(direction)
            finally:
                os.close(fd)
            for number, direction in sides:
                self._send(
                    number,
                    Relink(
                        incarnation=INCARNATION,
                        link=link,
                        generation=GENERATION,
                        direction=direction,
                        num_slots=self._plan.hand_off_slots,
                        slot_rows=self._plan.slot_rows,
                        slot_bytes=slot_bytes,
                    ),
                )
        self._begin_if_linked()

    def _begin_if_linked(self) -> None:
        if self._epoch_begun or any(stage.links_wanted or stage.ready is None for stage in self._stages):
            return
        self._epoch_begun = True
        for number in range(len(self._stages)):
            self._send(number, BeginEpoch(incarnation=INCARNATION, epoch=EPOCH))
        self._is_ready.set()

    def _super_chunk_done(self, done: SuperChunkDone) -> None:
        stage = self._stages[done.stage]
        stage.reading = StageReading(clock=done.clock, counters=done.counters)
        super_chunk = self._pipeline.in_flight.get(done.index)
        with self._lock:
            self._telemetry.super_chunk_done(done, time.monotonic())
        for segment in super_chunk.segments if super_chunk is not None else ():
            submission = self._submissions.get(segment.sequence)
            if submission is None or submission.meter is None:
                continue
            if segment.first_position + segment.count == len(submission.request.prompt_ids):
                submission.meter.prompt_read(done.stage, stage.reading, stage.memory.routing_counts())
                if submission.finished is not None and submission.meter.is_complete:
                    self._end(submission, submission.finished)
        self._handle(StageReported(done=done))

    # --- watching --------------------------------------------------------------------------------------------

    def _check_processes(self, ready: dict[object, int]) -> None:
        for number, stage in enumerate(self._stages):
            worker = stage.worker
            if worker is None or worker.pidfd not in ready:
                continue
            # What it still said explains its end better than its exit status does.
            if self._server.socket.poll(LAST_WORDS_MS):
                self._receive()
            worker.process.wait()
            text = f"stage {number} {worker.exit_text()} {self._place(number)}"
            raise StageLostError(text)

    def _check_progress(self) -> None:
        now_s = time.monotonic()
        for number, stage in enumerate(self._stages):
            stuck = self._watch.check(number, stage.memory.status.snapshot(), now_s)
            if stuck is not None:
                text = f"stage {number} {stuck}"
                raise StageTimeoutError(text)
        if not self._server.is_own_path():
            text = "the control socket was replaced by another process"
            raise ProtocolError(text)

    def _place(self, number: int) -> str:
        return place(self._stages[number].memory.status.snapshot())

    # --- the pipeline's commands -------------------------------------------------------------------------------

    def _accept(self, submission: Submission, accepted_ns: int) -> None:
        if self.failure is not None:
            self._end(submission, GenerationFinished(reason="error", error=str(self.failure)))
            return
        self._submissions[submission.sequence] = submission
        request, plan = submission.request, submission.plan
        readings = [stage.reading for stage in self._stages]
        submission.meter = RequestMeter(
            accepted_ns=accepted_ns,
            base=[reading for reading in readings if reading is not None],
            routing=[stage.memory.routing_counts() for stage in self._stages],
        )
        last = self._stages[-1].worker
        if submission.logits_fd >= 0 and last is not None:
            label = logits_label(submission.sequence, logits_offset())
            send_descriptors(last.channel, label, [submission.logits_fd])
        self._handle(
            PromptSubmitted(
                sequence=Sequence(
                    sequence=submission.sequence,
                    prompt_tokens=len(request.prompt_ids),
                    max_tokens=request.max_tokens,
                    sampling=request.sampling,
                    shape=PrefillShape(
                        super_chunks=plan.super_chunks,
                        sub_chunk_tokens=plan.sub_chunk_tokens,
                        slot_rows=plan.slot_rows,
                        upload=plan.upload,
                    ),
                    wants_logits=request.logits_path is not None,
                ),
                stop_tokens=request.stop_tokens,
            )
        )

    def _handle(self, event: Event) -> None:
        self._carry_out(self._pipeline.handle(event, time.monotonic_ns()))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case WritePrompt():
                    submission = self._submissions[command.sequence]
                    self._tokens.write(command.seat, 0, submission.request.prompt_ids)
                case WriteToken():
                    self._tokens.write(command.seat, command.position, [command.token])
                case SendSuperChunk():
                    self._announce(command)
                    for number in range(len(self._stages)):
                        self._send(
                            number, RunSuperChunk(incarnation=INCARNATION, super_chunk=command.super_chunk)
                        )
                case SetCancelWord():
                    for stage in self._stages:
                        stage.memory.status.cancel(command.seat, command.sequence)
                case Tell():
                    self._tell(command)

    def _announce(self, command: SendSuperChunk) -> None:
        """Tell the displays that a prompt's reading begins."""
        for segment in command.super_chunk.segments:
            submission = self._submissions.get(segment.sequence)
            if submission is None or segment.first_position != 0:
                continue
            with self._lock:
                self._telemetry.begin_request(
                    super_chunks=submission.plan.super_chunks,
                    first_index=command.super_chunk.index,
                    mode=submission.plan.mode,
                    predicted_ttft_s=submission.plan.predicted_ttft_s,
                    now_s=time.monotonic(),
                )

    def _tell(self, command: Tell) -> None:
        submission = self._submissions.get(command.sequence)
        if submission is None:
            return
        event = command.event
        match event:
            case TokenGenerated():
                if submission.meter is not None and event.position == len(submission.request.prompt_ids):
                    submission.meter.first_token(time.monotonic_ns())
                with self._lock:
                    self._telemetry.token("", time.monotonic())
                submission.events.put(event)
            case PromptProgress():
                submission.events.put(event)
            case GenerationFinished():
                with self._lock:
                    self._telemetry.end_request(time.monotonic())
                is_whole = submission.meter is not None and submission.meter.is_complete
                if event.reason in {"stop", "length"} and not is_whole:
                    submission.finished = event  # an earlier stage's report is still on its way
                else:
                    self._end(submission, event)

    def _end(self, submission: Submission, finished: GenerationFinished) -> None:
        self._submissions.pop(submission.sequence, None)
        if submission.logits_fd >= 0:
            os.close(submission.logits_fd)
            submission.logits_fd = -1
        meter = submission.meter
        figures = meter.figures() if meter is not None and meter.is_complete else None
        submission.events.put(Ending(finished=finished, figures=figures))

    def _send(self, number: int, message: ToStage) -> None:
        outcome = self._server.send(number, INCARNATION, message)
        if outcome != "sent":
            text = f"stage {number} takes no {type(message).__name__}: its queue is {outcome}"
            raise StageLostError(text)

    def _identity(self, number: int) -> StageIdentity:
        stage, plan = self._stages[number], self._plan.stages[number]
        if stage.hello is None or stage.ready is None:
            text = f"stage {number} has not reported yet"
            raise InvariantError(text)
        return StageIdentity(
            stage=number,
            pid=stage.hello.pid,
            device=stage.ready.device,
            numa_node=stage.hello.numa_node,
            binding=stage.hello.binding,
            route="host" if number < len(self._stages) - 1 else None,
            first_layer=plan.first_layer,
            last_layer=plan.last_layer,
            load_file_read=stage.ready.load_file_read,
            load_seconds=stage.ready.load_seconds,
        )
