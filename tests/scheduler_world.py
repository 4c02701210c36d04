"""Drives a Scheduler as the pipeline would, and checks its promises at every step."""

from collections import deque
from dataclasses import dataclass, field

from strata_coord.coordinator.scheduler import (
    KV_PAGE_TOKENS,
    PrefillShape,
    Scheduler,
    SchedulerLimits,
    Sequence,
    kv_tokens_needed,
)
from strata_coord.ipc.messages import SamplingSettings, Segment, SuperChunk


def limits(
    *, num_stages: int = 2, max_sequences: int = 4, kv_pool_tokens: int = 4096, max_rows: int = 256
) -> SchedulerLimits:
    return SchedulerLimits(
        num_stages=num_stages,
        max_sequences=max_sequences,
        kv_pool_tokens=kv_pool_tokens,
        max_rows=max_rows,
        decode_sub_chunk_tokens=64,
        decode_slot_rows=128,
    )


def sequence(
    number: int, *chunks: int, max_tokens: int = 4, wants_logits: bool = False, slot_rows: int = 64
) -> Sequence:
    return Sequence(
        sequence=number,
        prompt_tokens=sum(chunks),
        max_tokens=max_tokens,
        sampling=SamplingSettings(seed=number),
        shape=PrefillShape(
            super_chunks=chunks, sub_chunk_tokens=64, slot_rows=slot_rows, upload="stream-all"
        ),
        wants_logits=wants_logits,
    )


@dataclass
class SchedulerWorld:
    """The stages of a perfect pipeline: super-chunks pass in order, and every sample gives a token."""

    limits: SchedulerLimits
    scheduler: Scheduler = field(init=False)
    in_flight: deque[SuperChunk] = field(default_factory=deque)
    wanted: dict[int, Sequence] = field(default_factory=dict)  # submitted and not ended
    rows: dict[int, int] = field(default_factory=dict)  # prompt rows issued so far, of all there ever were
    tokens: dict[int, int] = field(default_factory=dict)
    seats: dict[int, tuple[int, int]] = field(default_factory=dict)  # seat -> sequence, KV tokens
    history: list[SuperChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def submit(self, one: Sequence) -> None:
        self.wanted[one.sequence] = one
        self.rows[one.sequence] = 0
        self.tokens[one.sequence] = 0
        self.scheduler.submit(one)

    def end(self, number: int) -> None:
        self.wanted.pop(number)
        self.scheduler.end(number)

    def issue(self) -> SuperChunk | None:
        """Take one record, checked."""
        made = self.scheduler.next_super_chunk(epoch=7, num_in_flight=len(self.in_flight))
        if made is None:
            return None
        assert made.epoch == 7
        assert made.index == len(self.history)
        assert made.rows <= self.limits.max_rows
        assert len({segment.sequence for segment in made.segments}) == len(made.segments)
        assert made.segments or made.operations
        self.in_flight.append(made)
        self.history.append(made)
        assert len(self.in_flight) <= self.limits.num_stages + 1
        for operation in made.operations:
            if operation.kind == "create":
                assert operation.seat not in self.seats
                own = self.wanted[operation.sequence]
                needed = kv_tokens_needed(own.prompt_tokens, own.max_tokens)
                self.seats[operation.seat] = (operation.sequence, needed)
            else:
                assert self.seats[operation.seat][0] == operation.sequence
        assert len(self.seats) <= self.limits.max_sequences
        assert sum(tokens for _, tokens in self.seats.values()) <= self.limits.kv_pool_tokens
        for segment in made.segments:
            self._check(segment)
        return made

    def _check(self, segment: Segment) -> None:
        own = self.wanted[segment.sequence]  # nothing is run for a sequence that ended
        assert self.seats[segment.seat][0] == segment.sequence
        if segment.first_position < own.prompt_tokens:
            assert segment.first_position == self.rows[segment.sequence]
            self.rows[segment.sequence] += segment.count
            is_last = self.rows[segment.sequence] == own.prompt_tokens
            assert (segment.sample is not None) == is_last
            assert segment.logits == own.wants_logits
        else:
            assert segment.count == 1
            assert segment.first_position == own.prompt_tokens + self.tokens[segment.sequence] - 1
            assert segment.sample is not None
        assert segment.sample in {None, own.sampling}

    def pass_oldest(self) -> None:
        """The oldest super-chunk leaves the last stage."""
        done = self.in_flight.popleft()
        for segment in done.segments:
            own = self.wanted.get(segment.sequence)
            if segment.sample is None or own is None:
                continue
            self.tokens[segment.sequence] += 1
            if self.tokens[segment.sequence] >= own.max_tokens:
                self.end(segment.sequence)
            else:
                self.scheduler.token_known(segment.sequence, segment.first_position + segment.count)
        self.scheduler.passed_all_stages(done.index)
        for operation in done.operations:
            if operation.kind == "drop":
                del self.seats[operation.seat]

    def issue_all(self) -> None:
        while self.issue() is not None:
            pass

    def run_to_end(self) -> None:
        """Run until nothing is left; a scheduler that stops short of that fails here."""
        self.issue_all()
        while self.in_flight:
            self.pass_oldest()
            self.issue_all()
        assert not self.wanted
        assert self.scheduler.is_idle
        assert not self.seats

    def fill_every_seat(self) -> None:
        """Show that seats and pages came back: as many prompts as there are seats, with the whole pool."""
        each = self.limits.kv_pool_tokens // self.limits.max_sequences // KV_PAGE_TOKENS * KV_PAGE_TOKENS
        rows = min(each - 1, self.limits.max_rows)
        first = max(self.rows, default=0) + 1
        for number in range(first, first + self.limits.max_sequences):
            self.submit(sequence(number, rows, max_tokens=each - rows))
        self.issue_all()
        while len(self.seats) < self.limits.max_sequences:
            assert self.in_flight, "a seat or a page was never given back"
            self.pass_oldest()
            self.issue_all()
        for number in list(self.wanted):
            self.end(number)
        self.run_to_end()
