import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_world import SchedulerWorld, limits, sequence

from strata_coord.coordinator.scheduler import kv_tokens_needed
from strata_coord.ipc.errors import InvariantError


def issued(world: SchedulerWorld) -> list[tuple[int, int, int]]:
    """Sequence, first position and count of the next record's segments."""
    made = world.issue()
    return [] if made is None else [(s.sequence, s.first_position, s.count) for s in made.segments]


def test_a_prompt_is_read_in_its_planned_parts_and_then_decoded() -> None:
    world = SchedulerWorld(limits())
    world.submit(sequence(1, 128, 130, max_tokens=3))
    assert issued(world) == [(1, 0, 128)]
    assert issued(world) == [(1, 128, 130)]
    assert issued(world) == []  # its next row is not known yet
    world.pass_oldest()
    assert issued(world) == []
    world.pass_oldest()
    assert issued(world) == [(1, 258, 1)]
    world.run_to_end()
    assert [[o.kind for o in record.operations] for record in world.history] == [
        ["create"],
        [],
        [],
        [],
        ["drop"],
    ]


def test_prefill_takes_the_prompts_shape_and_decode_the_launchs() -> None:
    world = SchedulerWorld(limits())
    world.submit(sequence(1, 70, slot_rows=64))
    world.run_to_end()
    shapes = [(r.slot_rows, r.upload) for r in world.history if r.segments]
    assert shapes == [(64, "stream-all"), *[(128, "routed-only")] * 3]


def test_short_prompts_share_the_room_that_a_prompt_leaves() -> None:
    world = SchedulerWorld(limits(max_rows=256))
    for number, rows in ((1, 100), (2, 100), (3, 57), (4, 10)):
        world.submit(sequence(number, rows))
    assert issued(world) == [(1, 0, 100), (2, 0, 100)]  # 57 more rows do not fit, and 4 does not overtake 3
    assert issued(world) == [(3, 0, 57), (4, 0, 10)]


def test_a_guest_joins_the_last_part_of_a_long_prompt_only() -> None:
    world = SchedulerWorld(limits(max_rows=256))
    world.submit(sequence(1, 128, 64))
    world.submit(sequence(2, 30))
    assert issued(world) == [(1, 0, 128)]
    assert issued(world) == [(1, 128, 64), (2, 0, 30)]


def test_a_prompt_of_several_parts_is_no_guest() -> None:
    world = SchedulerWorld(limits(max_rows=256))
    world.submit(sequence(1, 10))
    world.submit(sequence(2, 5, 5))
    assert issued(world) == [(1, 0, 10)]


def test_a_prompt_that_wants_its_logits_is_read_alone() -> None:
    world = SchedulerWorld(limits())
    world.submit(sequence(1, 10, wants_logits=True))
    world.submit(sequence(2, 10))
    assert issued(world) == [(1, 0, 10)]


def test_prompts_wait_for_a_seat_and_for_pages_in_their_order() -> None:
    world = SchedulerWorld(limits(max_sequences=2, kv_pool_tokens=256, max_rows=64))
    world.submit(sequence(1, 64, max_tokens=64))  # 128 of 256
    world.submit(sequence(2, 64, max_tokens=65))  # 192: not beside the first
    world.submit(sequence(3, 8, max_tokens=1))  # would fit, but does not overtake
    assert issued(world) == [(1, 0, 64)]
    assert issued(world) == []
    world.end(1)
    assert issued(world) == []  # the record that drops it
    assert issued(world) == []
    world.pass_oldest()
    assert issued(world) == []  # the prompt's own record has passed, the drop has not
    world.pass_oldest()
    assert issued(world) == [(2, 0, 64)]
    world.run_to_end()


def test_a_waiting_prompt_that_ends_leaves_no_trace() -> None:
    world = SchedulerWorld(limits(max_sequences=1))
    world.submit(sequence(1, 10))
    world.submit(sequence(2, 10))
    world.issue_all()
    world.end(2)
    world.run_to_end()
    assert {s.sequence for record in world.history for s in record.segments} == {1}


def test_an_unknown_sequence_may_end_and_get_tokens_without_effect() -> None:
    world = SchedulerWorld(limits())
    world.scheduler.end(99)
    world.scheduler.token_known(99, 5)
    assert world.scheduler.is_idle
    assert world.issue() is None


def test_parts_that_do_not_sum_to_the_prompt_are_refused() -> None:
    wrong = sequence(1, 10, 10)
    wrong.prompt_tokens = 21
    with pytest.raises(InvariantError, match="20 rows for 21 tokens"):
        SchedulerWorld(limits()).submit(wrong)


@pytest.mark.parametrize(("prompt", "answer", "pages"), [(1, 0, 1), (63, 1, 1), (64, 1, 2), (128, 0, 2)])
def test_a_request_takes_whole_pages(prompt: int, answer: int, pages: int) -> None:
    assert kv_tokens_needed(prompt, answer) == pages * 64


@pytest.mark.parametrize(("num_stages", "num_decoding"), [(1, 3), (2, 2), (2, 3), (2, 5), (3, 4), (4, 4)])
def test_decoding_settles_into_as_many_groups_as_stages(num_stages: int, num_decoding: int) -> None:
    world = SchedulerWorld(limits(num_stages=num_stages, max_sequences=8, kv_pool_tokens=65536))
    for number in range(num_decoding):
        world.submit(sequence(number, 64, max_tokens=1000))
    while not all(world.tokens.values()):
        world.issue_all()
        world.pass_oldest()
    for _ in range(20):
        world.issue_all()
        world.pass_oldest()
    world.issue_all()
    groups = [record.rows for record in world.in_flight]
    assert len(groups) == min(num_stages, num_decoding)  # every stage has one, none more than there are
    assert sum(groups) == num_decoding


@pytest.mark.parametrize("num_decoding", [1, 2, 3, 4, 5, 6])
def test_decoding_sequences_do_not_starve_a_new_prompt_nor_one_another(num_decoding: int) -> None:
    world = SchedulerWorld(limits(max_sequences=8, kv_pool_tokens=65536, max_rows=64))
    for number in range(num_decoding):
        world.submit(sequence(number, 64, max_tokens=1000))
    while not all(world.tokens.values()):
        world.issue_all()
        world.pass_oldest()
    world.submit(sequence(50, 64, 64, 64, max_tokens=1000))
    before = dict(world.tokens)
    for _ in range(24):
        world.issue_all()
        world.pass_oldest()
    assert world.rows[50] == 192
    gained = [world.tokens[number] - before[number] for number in range(num_decoding)]
    assert min(gained) >= 4
    assert max(gained) <= min(gained) + 2


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.lists(st.integers(1, 100), min_size=1, max_size=4), st.integers(1, 70)
        ),
        st.tuples(st.just("logits"), st.lists(st.integers(1, 100), min_size=1, max_size=2), st.just(2)),
        st.tuples(st.just("end"), st.just([]), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.just([]), st.integers(1, 4)),
        st.tuples(st.just("issue"), st.just([]), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(
    actions=ACTIONS,
    num_stages=st.integers(1, 4),
    max_sequences=st.integers(1, 4),
    pool_pages=st.integers(8, 16),
)
def test_any_history_keeps_the_promises_and_gives_everything_back(
    actions: list[tuple[str, list[int], int]], num_stages: int, max_sequences: int, pool_pages: int
) -> None:
    world = SchedulerWorld(
        limits(
            num_stages=num_stages,
            max_sequences=max_sequences,
            kv_pool_tokens=pool_pages * 64,
            max_rows=128,
        )
    )
    for kind, chunks, number in actions:
        if kind in {"submit", "logits"}:
            world.submit(sequence(len(world.rows), *chunks, max_tokens=number, wants_logits=kind == "logits"))
        elif kind == "end" and world.wanted:
            world.end(sorted(world.wanted)[number % len(world.wanted)])
        elif kind == "pass":
            for _ in range(min(number, len(world.in_flight))):
                world.pass_oldest()
        elif kind == "issue":
            for _ in range(number):
                world.issue()
    finished = set(world.wanted)
    world.run_to_end()
    for done in finished:
        own = [s for r in world.history for s in r.segments if s.sequence == done]
        assert own
        assert world.tokens[done] > 0
    world.fill_every_seat()
