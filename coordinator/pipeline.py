"""Pure state machine: what the stages report and what callers ask -> what to send and what to tell.

Holds the running epoch: super-chunks in flight, what each stage has finished of them, and the requests they
belong to. Reads no clock and touches no socket: control_loop.py carries the commands out. Changed through
handle() only, since its attributes are correlated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata_coord.coordinator.requests import (
    FinishReason,
    GenerationEvent,
    GenerationFinished,
    PromptProgress,
    TokenGenerated,
)
from strata_coord.coordinator.scheduler import Scheduler, SchedulerLimits, Sequence
from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.messages import NOT_FINITE, SampledToken, SuperChunk, SuperChunkDone

# --- events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSubmitted:
    """A caller submitted a prompt."""

    sequence: Sequence
    stop_tokens: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCancelled:
    """A caller gave its request up."""

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReported:
    """A stage finished a super-chunk."""

    done: SuperChunkDone


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLost:
    """The pipeline cannot go on; every request ends with text."""

    text: str


Event = PromptSubmitted | PromptCancelled | StageReported | PipelineLost

# --- commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePrompt:
    """Write the prompt's ids into the token table before anything that reads them is sent."""

    sequence: int
    seat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteToken:
    """Write one generated id into the token table."""

    seat: int
    position: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSuperChunk:
    """Send the record to all stages."""

    super_chunk: SuperChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SetCancelWord:
    """Tell all stages, through their status pages, not to work on this sequence any more."""

    seat: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Hand an event to the request's caller."""

    sequence: int
    event: GenerationEvent


Command = WritePrompt | WriteToken | SendSuperChunk | SetCancelWord | Tell


@dataclass(slots=True, kw_only=True)
class _Request:
    sequence: Sequence
    stop_tokens: frozenset[int]
    submitted_ns: int
    generated: int = 0
    read_done: int = 0


@dataclass(slots=True, kw_only=True)
class _InFlight:
    super_chunk: SuperChunk
    stages_done: set[int] = field(default_factory=set)
    arrived_not_finite: dict[int, int] = field(default_factory=dict)  # sequence -> first stage that says so


class Pipeline:
    """The run of one epoch."""

    def __init__(self, limits: SchedulerLimits, *, epoch: int) -> None:
        self._num_stages = limits.num_stages
        self._epoch = epoch
        self._scheduler = Scheduler(limits)
        self._requests: dict[int, _Request] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._is_lost = False

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Take one event in; returns the commands to carry out, in order.

        Raises:
            ProtocolError: a stage reports what it cannot have done.
        """
        commands: list[Command] = []
        match event:
            case PromptSubmitted():
                request = _Request(
                    sequence=event.sequence, stop_tokens=event.stop_tokens, submitted_ns=now_ns
                )
                self._requests[event.sequence.sequence] = request
                self._scheduler.submit(event.sequence)
            case PromptCancelled():
                if event.sequence in self._requests:
                    commands += self._finish(self._requests[event.sequence], "cancelled")
            case StageReported():
                commands += self._stage_reported(event.done, now_ns)
            case PipelineLost():
                self._is_lost = True
                for request in list(self._requests.values()):
                    commands += self._finish(request, "error", event.text)
        if not self._is_lost:
            commands += self._issue()
        return commands

    @property
    def is_idle(self) -> bool:
        """Whether no request is open and nothing is in flight or about to be dropped."""
        return not self._requests and not self._in_flight and self._scheduler.is_idle

    @property
    def in_flight(self) -> Mapping[int, SuperChunk]:
        """The super-chunks that have not passed all stages, by index."""
        return {index: entry.super_chunk for index, entry in self._in_flight.items()}

    @property
    def waited_for(self) -> int | None:
        """The first stage that has not finished the oldest super-chunk in flight; None: nothing is."""
        if not self._in_flight:
            return None
        done = self._in_flight[min(self._in_flight)].stages_done
        return min(set(range(self._num_stages)) - done)

    def _issue(self) -> list[Command]:
        commands: list[Command] = []
        while True:
            super_chunk = self._scheduler.next_super_chunk(
                epoch=self._epoch, num_in_flight=len(self._in_flight)
            )
            if super_chunk is None:
                return commands
            self._in_flight[super_chunk.index] = _InFlight(super_chunk=super_chunk)
            commands += [
                WritePrompt(sequence=operation.sequence, seat=operation.seat)
                for operation in super_chunk.operations
                if operation.kind == "create"
            ]
            commands.append(SendSuperChunk(super_chunk=super_chunk))

    def _stage_reported(self, done: SuperChunkDone, now_ns: int) -> list[Command]:
        entry = self._in_flight.get(done.index)
        if done.epoch != self._epoch or entry is None or done.stage in entry.stages_done:
            message = (
                f"stage {done.stage} reports super-chunk {done.index} of epoch {done.epoch}, not in flight"
            )
            raise ProtocolError(message)
        entry.stages_done.add(done.stage)
        commands = self._not_finite(entry, done)
        if done.stage == self._num_stages - 1:
            if not done.cancelled:
                commands += self._rows_read(entry.super_chunk)
            for sampled in done.tokens:
                commands += self._token(sampled, done, now_ns)
        if len(entry.stages_done) == self._num_stages:
            for sequence, stage in entry.arrived_not_finite.items():
                commands += self._fail_not_finite(sequence, f"stage {stage}, rows received", done.index)
            del self._in_flight[done.index]
            self._scheduler.passed_all_stages(done.index)
        return commands

    def _not_finite(self, entry: _InFlight, done: SuperChunkDone) -> list[Command]:
        """Fail the requests that the stage gives up.

        A later stage sees the rows of an earlier one, and its report may come first: where they arrived
        like that, the stage that they come from is heard before.
        """
        commands: list[Command] = []
        for found in done.not_finite:
            if found.layer < 0 and done.stage > 0:
                first = min(done.stage, entry.arrived_not_finite.get(found.sequence, done.stage))
                entry.arrived_not_finite[found.sequence] = first
                continue
            where = f"layer {found.layer}" if found.layer >= 0 else "embedding"
            commands += self._fail_not_finite(found.sequence, f"stage {done.stage}, {where}", done.index)
        return commands

    def _fail_not_finite(self, sequence: int, where: str, index: int) -> list[Command]:
        request = self._requests.get(sequence)
        if request is None:
            return []
        return self._finish(request, "error", f"{where}, super-chunk {index}: values are not finite")

    def _rows_read(self, super_chunk: SuperChunk) -> list[Command]:
        commands: list[Command] = []
        for segment in super_chunk.segments:
            request = self._requests.get(segment.sequence)
            if request is None or segment.first_position >= request.sequence.prompt_tokens:
                continue
            request.read_done += segment.count
            progress = PromptProgress(
                done_tokens=request.read_done, total_tokens=request.sequence.prompt_tokens
            )
            commands.append(Tell(sequence=segment.sequence, event=progress))
        return commands

    def _token(self, sampled: SampledToken, done: SuperChunkDone, now_ns: int) -> list[Command]:
        request = self._requests.get(sampled.sequence)
        if request is None:
            return []  # cancelled while the token was on its way
        sequence = request.sequence
        if sampled.token == NOT_FINITE:
            where = f"stage {done.stage}, head, super-chunk {done.index}"
            error = f"{where}: the logits at position {sampled.position} are not finite"
            return self._finish(request, "error", error)
        if request.generated >= sequence.max_tokens:
            return self._finish(request, "length")
        request.generated += 1
        commands: list[Command] = [
            WriteToken(seat=sequence.seat, position=sampled.position, token=sampled.token),
            Tell(
                sequence=sampled.sequence,
                event=TokenGenerated(
                    token=sampled.token,
                    position=sampled.position,
                    logprob=sampled.logprob,
                    elapsed_s=(now_ns - request.submitted_ns) / 1e9,
                ),
            ),
        ]
        if sampled.token in request.stop_tokens:
            return commands + self._finish(request, "stop")
        if request.generated == sequence.max_tokens:
            return commands + self._finish(request, "length")
        self._scheduler.token_known(sampled.sequence, sampled.position)
        return commands

    def _finish(self, request: _Request, reason: FinishReason, error: str = "") -> list[Command]:
        sequence = request.sequence
        del self._requests[sequence.sequence]
        self._scheduler.end(sequence.sequence)
        commands: list[Command] = []
        if reason in {"cancelled", "error"} and sequence.seat >= 0:
            commands.append(SetCancelWord(seat=sequence.seat, sequence=sequence.sequence))
        commands.append(
            Tell(sequence=sequence.sequence, event=GenerationFinished(reason=reason, error=error))
        )
        return commands
