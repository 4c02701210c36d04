"""The engine's thread: mail from callers, the stages' news, the pipeline's commands, telemetry.

The shell around the pure Pipeline. It owns the requests and the clock; processes and sockets are StageSet's.
A lost stage ends every open request with the error's one line.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import zmq

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
from strata_coord.coordinator.request_meter import RequestMeter, idle_until
from strata_coord.coordinator.requests import (
    GenerationFinished,
    GenerationRequest,
    TokenGenerated,
)
from strata_coord.coordinator.scheduler import PrefillShape, Sequence, limits_of
from strata_coord.coordinator.shared_memory import TokenTable
from strata_coord.coordinator.stage_facts import StageIdentity
from strata_coord.coordinator.stage_set import EPOCH, INCARNATION, StageSet
from strata_coord.coordinator.submission import Submission
from strata_coord.coordinator.telemetry import DashboardState, StageFacts, Telemetry
from strata_coord.ipc.bootstrap import logits_label
from strata_coord.ipc.errors import InvariantError, StageError, StrataError
from strata_coord.ipc.host_memory import send_descriptors
from strata_coord.ipc.messages import RunSuperChunk, StageReady, SuperChunkDone
from strata_coord.ipc.status_page import StatusEvent

POLL_MS = 200


class ControlLoop(threading.Thread):
    """Runs from start() until stop(), or until the pipeline is lost."""

    def __init__(
        self, *, plan: LaunchPlan, model: ModelIndex, hang_s: float, start_s: float, debug_delay_s: float
    ) -> None:
        super().__init__(name="control-loop", daemon=True)
        self.failure: StrataError | None = None
        self._plan = plan
        self._model = model
        self._lock = threading.Lock()  # guards telemetry, and the status pages against their closing
        self._stages = StageSet(
            plan=plan,
            model=model,
            hang_s=hang_s,
            start_s=start_s,
            debug_delay_s=debug_delay_s,
            memory_lock=self._lock,
        )
        self._tokens: TokenTable | None = None
        self._pipeline = Pipeline(limits_of(plan), epoch=EPOCH)
        self._submissions: dict[int, Submission] = {}
        self._next_sequence = 1
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mail_lock = threading.Lock()  # guards the wake-up descriptor against its closing
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False  # takes no mail any more
        self._telemetry = Telemetry(_facts(plan))
        self._is_ready = threading.Event()
        self._stopping = False
        self._grace_s = 0.0
        self._end_lines: list[str] = []

    # --- called from other threads -----------------------------------------------------------------------

    def wait_ready(self) -> StrataError | None:
        """Block until the pipeline is up, or lost; returns why it is lost."""
        self._is_ready.wait()
        return self.failure

    def submit(self, request: GenerationRequest, plan: PromptPlan) -> Submission:
        """Queue a request.

        Raises:
            StrataError: the pipeline is lost or closed, or the logits file cannot be written.
        """
        self._check_open()
        with self._lock:
            submission = Submission(sequence=self._next_sequence, request=request, plan=plan)
            self._next_sequence += 1
        if request.logits_path is not None:
            submission.logits_fd = create_logits_file(
                request.logits_path,
                num_tokens=len(request.prompt_ids),
                vocabulary_size=self._model.geometry.vocabulary_size,
            )
        accepted_ns = time.monotonic_ns()
        if not self._post(lambda: self._accept(submission, accepted_ns)):
            submission.close_logits()
            self._check_open()
        return submission

    def cancel(self, sequence: int) -> None:
        """Give a request up."""
        self._post(lambda: self._handle(PromptCancelled(sequence=sequence)))

    def identities(self) -> tuple[StageIdentity, ...]:
        """Who runs the stages."""
        return self._stages.identities()

    def dashboard_state(self) -> DashboardState:
        """Read the status pages and return what a display shows."""
        now_s = time.monotonic()
        with self._lock:
            for number, entry in enumerate(self._stages.entries):
                snapshot = entry.memory.status.snapshot()
                if snapshot is not None:
                    self._telemetry.observe(number, snapshot, now_s)
            return self._telemetry.state(now_s)

    def new_spans(self, seen: Mapping[int, int]) -> list[tuple[int, list[StatusEvent]]]:
        """Per stage, the flight recorder's count so far and its spans from number seen[stage] on."""
        with self._lock:
            return [
                entry.memory.status.events(seen.get(number, 0))
                for number, entry in enumerate(self._stages.entries)
            ]

    def show_text(self, text: str) -> None:
        """Let displays show a piece of the answer in progress."""
        with self._lock:
            self._telemetry.show_text(text)

    def stop(self, grace_s: float) -> list[str]:
        """End everything; returns a line for each worker that had to be killed. May be called twice."""
        if self.ident is None:
            self._take_no_more_mail()
        else:
            self._grace_s = grace_s
            self._post(self._stop_serving)
            self.join()
        return self._end_lines

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._is_over:
            message = "the engine is closed"
            raise StageError(message)

    def _post(self, action: Callable[[], None]) -> bool:
        """Hand an action to the thread; False if it takes none any more."""
        with self._mail_lock:
            if self._is_over:
                return False
            self._mail.put(action)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def _take_no_more_mail(self) -> None:
        with self._mail_lock:
            if not self._is_over:
                self._is_over = True
                os.close(self._wake_fd)

    def _stop_serving(self) -> None:
        self._stopping = True

    # --- the thread --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Bring the pipeline up, serve until stopped, take everything down."""
        try:
            with contextlib.ExitStack() as resources:
                self._tokens = TokenTable(
                    max_sequences=self._plan.max_sequences, context_tokens=self._plan.context_tokens
                )
                resources.callback(self._tokens.close)
                self._end_lines = resources.enter_context(
                    self._stages.running(self._tokens, grace_s=lambda: self._grace_s)
                )
                try:
                    self._serve()
                except Exception as error:  # told to the callers before the workers are ended
                    self._lose(self._stages.explained(error))
        except Exception as error:
            self._lose(error)
        finally:
            self._take_no_more_mail()
            self._read_mail()
            for submission in list(self._submissions.values()):
                self._end(submission, submission.finished or GenerationFinished(reason="cancelled"))
            self._is_ready.set()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        self._stages.register(poller)
        while not self._stopping:
            ready = dict(poller.poll(POLL_MS))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            self._read_mail()
            for news in self._stages.receive():
                if isinstance(news, StageReady):
                    self._show_stage(news)
                else:
                    self._super_chunk_done(news)
            if self._stages.is_open:
                self._is_ready.set()
            self._stages.check_processes(ready)
            self._stages.check_progress(self._pipeline.waited_for)

    def _lose(self, error: Exception) -> None:
        """The pipeline cannot go on: tell every request why."""
        if not isinstance(error, StrataError):
            cause, error = error, InvariantError(f"the control loop failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        if self.failure is None:
            self.failure = error
        for command in self._pipeline.handle(PipelineLost(text=str(error)), time.monotonic_ns()):
            if isinstance(command, Tell):
                self._tell(command)
        self._is_ready.set()

    def _read_mail(self) -> None:
        while True:
            try:
                action = self._mail.get_nowait()
            except queue.Empty:
                return
            action()

    # --- from the stages ---------------------------------------------------------------------------------

    def _show_stage(self, ready: StageReady) -> None:
        hello = self._stages.entries[ready.stage].hello
        if hello is not None:
            with self._lock:
                self._telemetry.stage_ready(
                    ready.stage,
                    device=ready.device,
                    binding=hello.binding,
                    numa_node=hello.numa_node,
                    device_bytes=ready.device_bytes,
                )

    def _super_chunk_done(self, done: SuperChunkDone) -> None:
        entry = self._stages.entries[done.stage]
        super_chunk = self._pipeline.in_flight.get(done.index)
        with self._lock:
            self._telemetry.super_chunk_done(done, time.monotonic())
        for segment in super_chunk.segments if super_chunk is not None else ():
            submission = self._submissions.get(segment.sequence)
            if submission is None or submission.meter is None or entry.reading is None:
                continue
            if segment.first_position + segment.count == len(submission.request.prompt_ids):
                submission.meter.prompt_read(done.stage, entry.reading, entry.memory.routing_counts())
                if submission.finished is not None and submission.meter.is_complete:
                    self._end(submission, submission.finished)
        self._handle(StageReported(done=done))

    # --- requests ----------------------------------------------------------------------------------------

    def _accept(self, submission: Submission, accepted_ns: int) -> None:
        if self.failure is not None:
            self._end(submission, GenerationFinished(reason="error", error=str(self.failure)))
            return
        self._submissions[submission.sequence] = submission
        if self._is_over:
            return  # run() ends it with the others
        request, plan, entries = submission.request, submission.plan, self._stages.entries
        submission.meter = RequestMeter(
            accepted_ns=accepted_ns,
            base=[entry.reading for entry in entries if entry.reading is not None],
            routing=[entry.memory.routing_counts() for entry in entries],
        )
        last = entries[-1].worker
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
        if self._is_over:
            return
        for command in self._pipeline.handle(event, time.monotonic_ns()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case WritePrompt():
                submission = self._submissions[command.sequence]
                self._write_tokens(command.seat, 0, submission.request.prompt_ids)
            case WriteToken():
                self._write_tokens(command.seat, command.position, (command.token,))
            case SendSuperChunk():
                self._announce(command)
                message = RunSuperChunk(incarnation=INCARNATION, super_chunk=command.super_chunk)
                for number in range(len(self._stages.entries)):
                    self._stages.send(number, message)
            case SetCancelWord():
                for entry in self._stages.entries:
                    entry.memory.status.cancel(command.seat, command.sequence)
            case Tell():
                self._tell(command)

    def _write_tokens(self, seat: int, position: int, ids: tuple[int, ...]) -> None:
        if self._tokens is not None:
            self._tokens.write(seat, position, ids)

    def _announce(self, command: SendSuperChunk) -> None:
        """Tell the displays that a prompt's reading begins."""
        for segment in command.super_chunk.segments:
            submission = self._submissions.get(segment.sequence)
            if submission is None or segment.first_position != 0:
                continue
            with self._lock:
                now_ns = time.monotonic_ns()  # the wait for a prompt is no part of the request
                for number, entry in enumerate(self._stages.entries):
                    if (snapshot := entry.memory.status.snapshot()) is not None:
                        idle = replace(snapshot, clock=idle_until(snapshot.clock, now_ns))
                        self._telemetry.observe(number, idle, now_ns / 1e9)
                self._telemetry.begin_request(
                    super_chunks=submission.plan.super_chunks,
                    first_index=command.super_chunk.index,
                    mode=submission.plan.mode,
                    predicted_ttft_s=submission.plan.predicted_ttft_s,
                    now_s=now_ns / 1e9,
                )

    def _tell(self, command: Tell) -> None:
        submission = self._submissions.get(command.sequence)
        if submission is None:
            return
        event, meter = command.event, submission.meter
        if isinstance(event, GenerationFinished):
            with self._lock:
                self._telemetry.end_request(time.monotonic())
            if event.reason in {"stop", "length"} and meter is not None and not meter.is_complete:
                submission.finished = event  # an earlier stage's report is still on its way
            else:
                self._end(submission, event)
            return
        if isinstance(event, TokenGenerated):
            if meter is not None and event.position == len(submission.request.prompt_ids):
                meter.first_token(time.monotonic_ns())
            with self._lock:
                self._telemetry.token("", time.monotonic())
        submission.events.put(event)

    def _end(self, submission: Submission, finished: GenerationFinished) -> None:
        self._submissions.pop(submission.sequence, None)
        submission.end(finished)


def _facts(plan: LaunchPlan) -> tuple[StageFacts, ...]:
    return tuple(
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
