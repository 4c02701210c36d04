import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import limits, sequence

from strata_coord.coordinator.pipeline import (
    Command,
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
from strata_coord.coordinator.requests import GenerationFinished, PromptProgress, TokenGenerated
from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.messages import (
    NOT_FINITE,
    ByteCounters,
    NotFinite,
    SampledToken,
    SamplingSettings,
    Segment,
    StageClock,
    StateOperation,
    SuperChunk,
    SuperChunkDone,
)

EPOCH = 3
STOP = 9
_CLOCK = StageClock(now_ns=0, busy_ns=0, wait_rows_ns=0, wait_experts_ns=0, wait_slot_ns=0, hand_off_ns=0)
_COUNTERS = ByteCounters(resident_hit=0, ram_to_device=0, file_read=0, rows_spilled=0, handed_off=0)


def pipeline(**settings: int) -> Pipeline:
    return Pipeline(limits(**settings), epoch=EPOCH)


def submitted(number: int, *chunks: int, max_tokens: int = 2) -> PromptSubmitted:
    return PromptSubmitted(
        sequence=sequence(number, *chunks, max_tokens=max_tokens), stop_tokens=frozenset({STOP})
    )


def sampled(number: int, position: int, token: int) -> SampledToken:
    return SampledToken(sequence=number, position=position, token=token, logprob=-0.5)


def reported(
    stage: int, index: int, *tokens: SampledToken, cancelled: bool = False, epoch: int = EPOCH
) -> StageReported:
    return StageReported(
        done=SuperChunkDone(
            stage=stage,
            incarnation=1,
            epoch=epoch,
            index=index,
            cancelled=cancelled,
            tokens=tokens,
            clock=_CLOCK,
            counters=_COUNTERS,
        )
    )


def record(
    index: int, *segments: Segment, operations: tuple[StateOperation, ...] = (), decode: bool = False
) -> SendSuperChunk:
    return SendSuperChunk(
        super_chunk=SuperChunk(
            epoch=EPOCH,
            index=index,
            operations=operations,
            segments=segments,
            sub_chunk_tokens=64,
            slot_rows=128 if decode else 64,
            upload="routed-only" if decode else "stream-all",
        )
    )


def segment(number: int, first: int, count: int, *, sample: bool = True, seat: int = 0) -> Segment:
    settings = SamplingSettings(seed=number) if sample else None
    return Segment(sequence=number, seat=seat, first_position=first, count=count, sample=settings)


def create(number: int, seat: int = 0) -> tuple[StateOperation, ...]:
    return (StateOperation(kind="create", sequence=number, seat=seat),)


def drop(number: int, seat: int = 0) -> tuple[StateOperation, ...]:
    return (StateOperation(kind="drop", sequence=number, seat=seat),)


def progress(number: int, done: int, total: int) -> Tell:
    return Tell(sequence=number, event=PromptProgress(done_tokens=done, total_tokens=total))


def token(number: int, position: int, value: int, elapsed_s: float = 0.0) -> Tell:
    event = TokenGenerated(token=value, position=position, logprob=-0.5, elapsed_s=elapsed_s)
    return Tell(sequence=number, event=event)


def finished(number: int, reason: str, error: str = "") -> Tell:
    return Tell(sequence=number, event=GenerationFinished(reason=reason, error=error))  # type: ignore[arg-type]


def test_one_request_from_prompt_to_length() -> None:
    run = pipeline()
    assert run.is_idle
    assert run.handle(submitted(1, 64, 6), 1_000_000_000) == [
        WritePrompt(sequence=1, seat=0),  # before the record that makes a stage read it
        record(0, segment(1, 0, 64, sample=False), operations=create(1)),
        record(1, segment(1, 64, 6)),
    ]
    assert list(run.in_flight) == [0, 1]
    assert run.handle(reported(0, 0), 2_000_000_000) == []
    assert run.handle(reported(1, 0), 2_000_000_000) == [progress(1, 64, 70)]
    assert run.handle(reported(1, 1, sampled(1, 70, 5)), 3_500_000_000) == [
        progress(1, 70, 70),
        WriteToken(seat=0, position=70, token=5),  # before the record that makes stage 0 read it
        token(1, 70, 5, 2.5),
        record(2, segment(1, 70, 1), decode=True),
    ]
    assert run.handle(reported(0, 1), 0) == []
    assert run.handle(reported(0, 2), 0) == []
    assert run.handle(reported(1, 2, sampled(1, 71, 6)), 4_000_000_000) == [
        WriteToken(seat=0, position=71, token=6),
        token(1, 71, 6, 3.0),
        finished(1, "length"),
        record(3, operations=drop(1), decode=True),
    ]
    assert not run.is_idle
    assert run.handle(reported(0, 3), 0) == []
    assert run.handle(reported(1, 3), 0) == []
    assert run.is_idle


def test_a_stop_token_is_told_and_ends_the_request() -> None:
    run = pipeline(num_stages=1)
    run.handle(submitted(1, 6, max_tokens=50), 0)
    assert run.handle(reported(0, 0, sampled(1, 6, STOP)), 0) == [
        progress(1, 6, 6),
        WriteToken(seat=0, position=6, token=STOP),
        token(1, 6, STOP),
        finished(1, "stop"),
        record(1, operations=drop(1), decode=True),
    ]


def test_logits_that_are_not_finite_fail_the_one_request() -> None:
    run = pipeline(num_stages=1)
    run.handle(submitted(1, 6), 0)
    commands = run.handle(reported(0, 0, sampled(1, 6, NOT_FINITE)), 0)
    assert commands == [
        progress(1, 6, 6),
        SetCancelWord(seat=0, sequence=1),
        finished(1, "error", "stage 0, head, super-chunk 0: the logits at position 6 are not finite"),
        record(1, operations=drop(1), decode=True),
    ]


def test_no_answer_wanted_ends_with_the_prompt() -> None:
    run = pipeline(num_stages=1)
    run.handle(submitted(1, 6, max_tokens=0), 0)
    assert run.handle(reported(0, 0, sampled(1, 6, 4)), 0) == [
        progress(1, 6, 6),
        finished(1, "length"),
        record(1, operations=drop(1), decode=True),
    ]


def test_a_cancel_reaches_the_stages_before_the_caller() -> None:
    run = pipeline()
    run.handle(submitted(1, 64, 64, 64, 64), 0)
    assert list(run.in_flight) == [0, 1, 2]
    assert run.handle(PromptCancelled(sequence=1), 0) == [
        SetCancelWord(seat=0, sequence=1),
        finished(1, "cancelled"),
    ]  # the pipeline is full: the drop follows as soon as there is room
    assert run.handle(PromptCancelled(sequence=1), 0) == []
    assert run.handle(reported(0, 0), 0) == []
    assert run.handle(reported(1, 0, cancelled=True), 0) == [record(3, operations=drop(1), decode=True)]


def test_a_token_that_comes_after_the_cancel_is_not_told() -> None:
    run = pipeline(num_stages=1)
    run.handle(submitted(1, 6), 0)
    run.handle(PromptCancelled(sequence=1), 0)
    assert run.handle(reported(0, 0, sampled(1, 6, 5)), 0) == []


def test_a_prompt_that_still_waits_is_cancelled_without_a_word_to_the_stages() -> None:
    run = pipeline(max_sequences=1)
    run.handle(submitted(1, 6), 0)
    assert run.handle(submitted(2, 6), 0) == []
    assert run.handle(PromptCancelled(sequence=2), 0) == [finished(2, "cancelled")]


def test_the_seat_is_given_away_only_when_every_stage_has_dropped() -> None:
    run = pipeline(max_sequences=1)
    run.handle(submitted(1, 6, max_tokens=1), 0)
    run.handle(submitted(2, 6), 0)
    run.handle(reported(0, 0), 0)
    assert run.handle(reported(1, 0, sampled(1, 6, 5)), 0)[-1] == record(1, operations=drop(1), decode=True)
    assert run.handle(reported(0, 1), 0) == []
    assert run.handle(reported(1, 1), 0) == [
        WritePrompt(sequence=2, seat=0),
        record(2, segment(2, 0, 6), operations=create(2)),
    ]


def test_a_lost_pipeline_ends_every_request_and_starts_none() -> None:
    run = pipeline(max_sequences=1)
    run.handle(submitted(1, 6), 0)
    run.handle(submitted(2, 6), 0)
    assert run.handle(PipelineLost(text="stage 1 died"), 0) == [
        SetCancelWord(seat=0, sequence=1),
        finished(1, "error", "stage 1 died"),
        finished(2, "error", "stage 1 died"),
    ]
    assert run.handle(PipelineLost(text="again"), 0) == []
    assert run.handle(PromptCancelled(sequence=1), 0) == []


@pytest.mark.parametrize(
    "event",
    [
        reported(0, 0, epoch=EPOCH - 1),
        reported(0, 1),
        reported(0, 7),
    ],
)
def test_a_report_of_what_is_not_in_flight_is_refused(event: StageReported) -> None:
    run = pipeline()
    run.handle(submitted(1, 6), 0)
    with pytest.raises(ProtocolError, match="not in flight"):
        run.handle(event, 0)


def test_a_repeated_report_is_refused() -> None:
    run = pipeline()
    run.handle(submitted(1, 6), 0)
    run.handle(reported(0, 0), 0)
    with pytest.raises(ProtocolError, match="stage 0 reports super-chunk 0 of epoch 3"):
        run.handle(reported(0, 0), 0)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_stages=st.integers(1, 3),
    num_requests=st.integers(1, 8),
    is_lost=st.booleans(),
)
def test_every_request_ends_once_and_hears_a_gapless_answer(
    seed: int, num_stages: int, num_requests: int, is_lost: bool
) -> None:
    """Stages report in any order that keeps each one's own; cancels and a loss come whenever they like."""
    dice = random.Random(seed)
    run = pipeline(num_stages=num_stages, max_sequences=3)
    requests = {
        number: submitted(
            number,
            *[dice.randint(1, 100) for _ in range(dice.randint(1, 3))],
            max_tokens=dice.randint(0, 5),
        )
        for number in range(num_requests)
    }
    to_submit = list(requests)
    queues: list[list[SuperChunk]] = [[] for _ in range(num_stages)]
    heard: list[Tell] = []
    table: dict[int, int] = {}  # seat -> sequence whose prompt is in the token table

    def carry_out(commands: list[Command]) -> None:
        for command in commands:
            match command:
                case WritePrompt():
                    table[command.seat] = command.sequence
                case SendSuperChunk():
                    for one in command.super_chunk.segments:
                        assert table[one.seat] == one.sequence
                    for queue in queues:
                        queue.append(command.super_chunk)
                case Tell():
                    heard.append(command)
                case _:
                    pass

    def report(stage: int) -> None:
        passed = queues[stage].pop(0)
        tokens = [
            sampled(one.sequence, one.first_position + one.count, dice.choice([1, 2, STOP, NOT_FINITE]))
            for one in passed.segments
            if stage == num_stages - 1 and one.sample is not None
        ]
        event = reported(stage, passed.index, *tokens, cancelled=dice.random() < 0.1)
        bad = [
            NotFinite(sequence=one.sequence, layer=dice.choice([-1, stage]))
            for one in passed.segments
            if dice.random() < 0.05
        ]
        carry_out(run.handle(StageReported(done=replace(event.done, not_finite=tuple(bad))), 0))

    lost_at = dice.randint(0, 30) if is_lost else -1
    for step in range(2000):
        if step == lost_at:
            carry_out(run.handle(PipelineLost(text="gone"), 0))
            break
        if to_submit and dice.random() < 0.3:
            carry_out(run.handle(requests[to_submit.pop(0)], 0))
        elif dice.random() < 0.05:
            carry_out(run.handle(PromptCancelled(sequence=dice.randrange(num_requests)), 0))
        else:
            able = [stage for stage in range(num_stages) if queues[stage]]
            if able:
                report(dice.choice(able))
            elif not to_submit:
                break
    given_in = [number for number in requests if number not in to_submit]
    ends = Counter(tell.sequence for tell in heard if isinstance(tell.event, GenerationFinished))
    assert ends == Counter(given_in)
    assert is_lost or run.is_idle
    for number in given_in:
        own = [tell.event for tell in heard if tell.sequence == number]
        assert isinstance(own[-1], GenerationFinished)
        first = requests[number].sequence.prompt_tokens
        positions = [event.position for event in own if isinstance(event, TokenGenerated)]
        assert positions == list(range(first, first + len(positions)))
        assert len(positions) <= requests[number].sequence.max_tokens
        read = [event.done_tokens for event in own if isinstance(event, PromptProgress)]
        assert read == sorted(set(read))


def not_finite(stage: int, index: int, sequence: int, layer: int) -> StageReported:
    found = (NotFinite(sequence=sequence, layer=layer),)
    return StageReported(done=replace(reported(stage, index).done, not_finite=found))


def test_values_that_are_not_finite_name_stage_layer_and_super_chunk_and_fail_one_request() -> None:
    run = pipeline()
    run.handle(submitted(1, 6), 0)
    run.handle(submitted(2, 6), 0)
    assert run.handle(not_finite(0, 0, 1, 23), 0) == [
        SetCancelWord(seat=0, sequence=1),
        finished(1, "error", "stage 0, layer 23, super-chunk 0: values are not finite"),
        record(2, operations=drop(1), decode=True),
    ]
    assert run.handle(not_finite(1, 0, 1, -1), 0) == []  # the rows that came from there
    assert run.handle(reported(0, 1), 0) == []
    assert token(2, 6, 5) in run.handle(reported(1, 1, sampled(2, 6, 5)), 0)


def test_the_stage_where_it_began_is_named_whichever_report_comes_first() -> None:
    run = pipeline(num_stages=3)
    run.handle(submitted(1, 6), 0)
    assert run.handle(not_finite(2, 0, 1, -1), 0) == [progress(1, 6, 6)]
    assert run.handle(reported(0, 0), 0) == []
    assert run.handle(not_finite(1, 0, 1, 5), 0)[:2] == [
        SetCancelWord(seat=0, sequence=1),
        finished(1, "error", "stage 1, layer 5, super-chunk 0: values are not finite"),
    ]


def test_rows_that_no_stage_owns_up_to_still_fail_the_request() -> None:
    run = pipeline(num_stages=3)
    run.handle(submitted(1, 6), 0)
    run.handle(not_finite(2, 0, 1, -1), 0)
    run.handle(not_finite(1, 0, 1, -1), 0)
    assert run.handle(reported(0, 0), 0)[1] == finished(
        1, "error", "stage 1, rows received, super-chunk 0: values are not finite"
    )


def test_an_embedding_that_is_not_finite_is_the_first_stages() -> None:
    run = pipeline()
    run.handle(submitted(1, 6), 0)
    assert run.handle(not_finite(0, 0, 1, -1), 0)[1] == finished(
        1, "error", "stage 0, embedding, super-chunk 0: values are not finite"
    )
