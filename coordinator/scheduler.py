"""Pure: waiting prompts and running sequences -> the next super-chunk of the endless stream.

Prompts are read in arrival order. The rows that a prompt's last super-chunk leaves free are offered to the
prompts behind it, so that short prompts share one pass over the experts. Sequences that wait for nothing but
their next token decode in as many groups as there are stages: with fewer, some stage would idle, with more,
experts would be read more often than the stages need, and prompts would find no room between them.

Changed through its methods only; no clock, no I/O.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from strata_coord.coordinator.plan import LaunchPlan
from strata_coord.ipc.assignment import KV_PAGE_TOKENS
from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import SamplingSettings, Segment, StateOperation, SuperChunk, UploadPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShape:
    """How one prompt is read: the planner's choice, as the scheduler needs it."""

    super_chunks: tuple[int, ...]  # rows of each, summing to the prompt
    sub_chunk_tokens: int
    slot_rows: int
    upload: UploadPolicy


@dataclass(slots=True, kw_only=True)
class Sequence:
    """A request on its way through the stages."""

    sequence: int
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingSettings
    shape: PrefillShape
    wants_logits: bool
    seat: int = -1  # -1: not admitted yet
    read_tokens: int = 0  # issued rows of the prompt
    chunks_left: deque[int] = field(default_factory=deque)
    next_position: int = -1  # decode: position whose token is known and not issued; -1: awaited or none
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the stages have room for."""

    num_stages: int
    max_sequences: int
    kv_pool_tokens: int
    max_rows: int  # S of the plan
    decode_sub_chunk_tokens: int
    decode_slot_rows: int


def limits_of(plan: LaunchPlan) -> SchedulerLimits:
    """The room that the stages of a plan have."""
    return SchedulerLimits(
        num_stages=len(plan.stages),
        max_sequences=plan.max_sequences,
        kv_pool_tokens=plan.kv_pool_tokens,
        max_rows=plan.super_chunk_tokens,
        decode_sub_chunk_tokens=plan.sub_chunk_tokens,
        decode_slot_rows=plan.slot_rows,
    )


class Scheduler:
    """The queue, the seats, and the order of super-chunks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._free_seats = list(range(limits.max_sequences - 1, -1, -1))
        self._free_kv_tokens = limits.kv_pool_tokens // KV_PAGE_TOKENS * KV_PAGE_TOKENS
        self._operations: list[StateOperation] = []
        self._dropped_in: dict[int, list[Sequence]] = {}  # super-chunk index -> sequences it drops
        self._to_drop: list[Sequence] = []
        self._decoding: set[int] = set()  # indices of the decode super-chunks in flight
        self._next_index = 0

    def submit(self, sequence: Sequence) -> None:
        """Queue a prompt."""
        if sum(sequence.shape.super_chunks) != sequence.prompt_tokens:
            message = (
                f"super-chunks of {sum(sequence.shape.super_chunks)} rows for {sequence.prompt_tokens} tokens"
            )
            raise InvariantError(message)
        sequence.chunks_left.extend(sequence.shape.super_chunks)
        self._waiting.append(sequence)

    def end(self, sequence_id: int) -> None:
        """End a sequence for whatever reason: its state is dropped with the next super-chunk."""
        sequence = self._running.pop(sequence_id, None)
        if sequence is None:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.sequence != sequence_id)
            return
        sequence.ended = True
        self._operations.append(StateOperation(kind="drop", sequence=sequence.sequence, seat=sequence.seat))
        self._to_drop.append(sequence)

    def token_known(self, sequence_id: int, position: int) -> None:
        """The token at position has been sampled and lies in the token table."""
        sequence = self._running.get(sequence_id)
        if sequence is not None:
            sequence.next_position = position

    def passed_all_stages(self, index: int) -> None:
        """Super-chunk index is done at every stage: the seats and pages it dropped are free."""
        self._decoding.discard(index)
        for sequence in self._dropped_in.pop(index, ()):
            self._free_seats.append(sequence.seat)
            self._free_kv_tokens += _kv_tokens(sequence)

    def next_super_chunk(self, *, epoch: int, num_in_flight: int) -> SuperChunk | None:
        """The next record of the stream, or None if there is nothing to run at present.

        num_in_flight: super-chunks that were issued and have not passed all stages.
        """
        if num_in_flight > self._limits.num_stages:
            return None  # one more than the stages hold, so that stage 0 never waits for the coordinator
        segments, shape = self._decode_segments(), None
        if segments:
            self._decoding.add(self._next_index)
        else:
            segments, shape = self._prefill_segments()
        if not segments and not self._operations:
            return None
        super_chunk = SuperChunk(
            epoch=epoch,
            index=self._next_index,
            operations=tuple(self._operations),
            segments=tuple(segments),
            sub_chunk_tokens=shape.sub_chunk_tokens if shape else self._limits.decode_sub_chunk_tokens,
            slot_rows=shape.slot_rows if shape else self._limits.decode_slot_rows,
            upload=shape.upload if shape else "routed-only",
        )
        self._operations.clear()
        if self._to_drop:
            self._dropped_in[self._next_index], self._to_drop = self._to_drop, []
        self._next_index += 1
        return super_chunk

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs, or is about to be dropped."""
        return not (self._waiting or self._running or self._operations or self._dropped_in)

    def seats(self) -> Iterable[Sequence]:
        """The running sequences."""
        return self._running.values()

    def _decode_segments(self) -> list[Segment]:
        free_groups = self._limits.num_stages - len(self._decoding)
        if free_groups <= 0:
            return []  # what is ready joins the group that returns next; the room left is for prompts
        decoding = [sequence for sequence in self._running.values() if not sequence.chunks_left]
        ready = [sequence for sequence in decoding if sequence.next_position >= 0]
        fair_share = -(-len(decoding) // self._limits.num_stages)
        group = min(fair_share, -(-len(ready) // free_groups), self._limits.max_rows)
        segments: list[Segment] = []
        for sequence in ready[:group]:
            segments.append(
                Segment(
                    sequence=sequence.sequence,
                    seat=sequence.seat,
                    first_position=sequence.next_position,
                    count=1,
                    sample=sequence.sampling,
                )
            )
            sequence.next_position = -1
            # The oldest goes last in the next round, so that no group is starved.
            self._running[sequence.sequence] = self._running.pop(sequence.sequence)
        return segments

    def _prefill_segments(self) -> tuple[list[Segment], PrefillShape | None]:
        head = next((sequence for sequence in self._running.values() if sequence.chunks_left), None)
        if head is None:
            head = self._admit(None)
        if head is None:
            return [], None
        segments = [self._read(head)]
        room = self._limits.max_rows - segments[0].count
        while not head.chunks_left and not head.wants_logits:
            guest = self._admit(room)
            if guest is None:
                break
            segments.append(self._read(guest))
            room -= segments[-1].count
        return segments, head.shape

    def _admit(self, max_tokens: int | None) -> Sequence | None:
        """Give the first waiting prompt a seat, if it fits.

        max_tokens: take it only if its whole prompt fits in so many rows of a super-chunk.
        """
        if not self._waiting or not self._free_seats:
            return None
        sequence = self._waiting[0]
        if max_tokens is not None and (len(sequence.chunks_left) > 1 or sequence.prompt_tokens > max_tokens):
            return None
        if _kv_tokens(sequence) > self._free_kv_tokens:
            return None
        self._waiting.popleft()
        self._free_kv_tokens -= _kv_tokens(sequence)
        sequence.seat = self._free_seats.pop()
        self._running[sequence.sequence] = sequence
        self._operations.append(StateOperation(kind="create", sequence=sequence.sequence, seat=sequence.seat))
        return sequence

    def _read(self, sequence: Sequence) -> Segment:
        count = sequence.chunks_left.popleft()
        first = sequence.read_tokens
        sequence.read_tokens += count
        return Segment(
            sequence=sequence.sequence,
            seat=sequence.seat,
            first_position=first,
            count=count,
            sample=None if sequence.chunks_left else sequence.sampling,
            logits=sequence.wants_logits,
        )


def _kv_tokens(sequence: Sequence) -> int:
    return kv_tokens_needed(sequence.prompt_tokens, sequence.max_tokens)


def kv_tokens_needed(prompt_tokens: int, max_tokens: int) -> int:
    """Tokens of whole pages that a request may come to hold."""
    return -(-(prompt_tokens + max_tokens) // KV_PAGE_TOKENS) * KV_PAGE_TOKENS
