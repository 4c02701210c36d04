import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_coord.ipc.messages import StageClock
from strata_coord.stage_worker.clock import ActivityClock

PARTS = ("busy_ns", "wait_rows_ns", "wait_experts_ns", "wait_slot_ns", "hand_off_ns")
ACTIVITIES = ("busy", "wait_rows", "wait_experts", "wait_slot", "hand_off")


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)


def parts(clock: StageClock) -> dict[str, int]:
    return {name: getattr(clock, name) for name in PARTS if getattr(clock, name)}


def test_each_instant_counts_for_one_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Time(monkeypatch)
    clock = ActivityClock()
    at.now += 5
    with clock.during("busy"):
        at.now += 10
        with clock.during("wait_experts"):
            at.now += 20
        at.now += 40
        with clock.during("hand_off"), clock.during("wait_slot"):
            at.now += 80
    at.now += 160
    seen = clock.snapshot()
    assert parts(seen) == {"wait_rows_ns": 165, "busy_ns": 50, "wait_experts_ns": 20, "wait_slot_ns": 80}
    assert seen.now_ns == 1_000 + 315


def test_an_exception_closes_the_account_of_its_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Time(monkeypatch)
    clock = ActivityClock()

    def fail() -> None:
        with clock.during("busy"):
            at.now += 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    at.now += 4
    assert parts(clock.snapshot()) == {"busy_ns": 3, "wait_rows_ns": 4}


def test_a_snapshot_inside_an_activity_counts_it_up_to_now(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Time(monkeypatch)
    clock = ActivityClock()
    with clock.during("busy"):
        at.now += 7
        assert parts(clock.snapshot()) == {"busy_ns": 7}
        at.now += 2
    assert parts(clock.snapshot()) == {"busy_ns": 9}


@given(st.lists(st.tuples(st.sampled_from(ACTIVITIES), st.integers(0, 10**12))))
def test_the_parts_sum_to_the_wall(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        at = Time(monkeypatch)
        clock = ActivityClock()
        for activity, length in steps:
            clock.switch(activity)  # type: ignore[arg-type]
            at.now += length
        seen = clock.snapshot()
    assert sum(getattr(seen, name) for name in PARTS) == at.now - 1_000
    assert seen.now_ns == at.now
