"""Stages work at the same time, made visible by a sleep of 100 ms per super-chunk and stage."""

import itertools
from collections.abc import Iterator

import pytest
from launch_rig import Rig, answer, started, write_config
from oracle.fixtures import TinyCase

from strata_coord.ipc.status_page import EventKind, StatusEvent

DELAY_S = 0.1
CHUNKS = 6


@pytest.fixture(scope="module")
def slowed(tiny_qwen3moe_f32: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    config = write_config(
        tmp_path_factory.mktemp("overlap"), tiny_qwen3moe_f32.path, rest="pool_tokens = 1024"
    )
    with started(config, debug_delay_s=DELAY_S) as rig:
        answer(rig.submit([1, 2, 3], max_tokens=1))  # the first use of everything costs extra
        yield rig


def super_chunk_spans(rig: Rig) -> list[dict[int, StatusEvent]]:
    """Per stage, the span of each super-chunk."""
    return [
        {event.super_chunk: event for event in events if event.kind is EventKind.SUPER_CHUNK}
        for _, events in rig.engine.new_spans({})
    ]


def overlap_s(first: StatusEvent, second: StatusEvent) -> float:
    return (min(first.end_ns, second.end_ns) - max(first.start_ns, second.start_ns)) / 1e9


def test_two_stages_read_six_super_chunks_in_the_time_of_seven(
    slowed: Rig, tiny_qwen3moe_f32: TinyCase
) -> None:
    ids = (tiny_qwen3moe_f32.ids.tolist() * 2)[: CHUNKS * 64]
    generation = slowed.submit(ids, max_tokens=1, mode="chunk-major")
    answer(generation)
    figures = generation.figures
    if figures is None:
        pytest.fail("no figures")
    busy_s = [(clock.busy_ns + clock.hand_off_ns) / 1e9 for clock in figures.clocks]
    assert min(busy_s) >= CHUNKS * DELAY_S  # the sleeps were there
    # One stage after the other takes the sum, 12 sleeps; overlapped it is 7 of them. Both grow alike on a
    # machine that is busy with other things, so the ratio holds there too.
    assert figures.ttft_s >= (CHUNKS + 1) * DELAY_S
    assert figures.ttft_s < 0.75 * sum(busy_s)


def test_decoding_two_sequences_keeps_both_stages_busy(slowed: Rig, tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids.tolist()
    before = max(super_chunk_spans(slowed)[0])
    running = [slowed.submit(ids[:count], max_tokens=8) for count in (20, 30)]
    for generation in running:
        assert len(answer(generation).tokens) == 8
    first, second = super_chunk_spans(slowed)
    decode = [
        index
        for index in sorted(second)
        if index > before and first[index].value == 1 and second[index].value == 1
    ]
    assert len(decode) >= 12  # one row each: two groups, not one of two rows
    # While the last stage works on one sequence's row, the first stage works on the other's.
    shared = [overlap_s(second[one], first[other]) for one, other in itertools.pairwise(decode)]
    assert sorted(shared)[len(shared) // 2] > DELAY_S / 2


def test_decoding_one_sequence_takes_the_stages_in_turn(slowed: Rig, tiny_qwen3moe_f32: TinyCase) -> None:
    """The counter-proof: with nothing else to do, no span of the first stage meets the next token's."""
    before = max(super_chunk_spans(slowed)[0])
    answer(slowed.submit(tiny_qwen3moe_f32.ids.tolist()[:20], max_tokens=5))
    first, second = super_chunk_spans(slowed)
    decode = [index for index in sorted(first) if index > before and first[index].value == 1]
    assert len(decode) == 4
    for index in decode:  # the last stage's work begins when the first stage's is done
        assert second[index].end_ns - first[index].start_ns >= 2 * DELAY_S * 1e9
    for one, other in itertools.pairwise(decode):
        assert overlap_s(second[one], first[other]) < DELAY_S / 2
