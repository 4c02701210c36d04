"""Attributes every nanosecond of a stage's life to exactly one activity.

The parts of a StageClock sum to the wall time by construction: there is always one current activity, and
switching closes its account at the instant the next one opens. One thread, the walk's, switches.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from strata_coord.ipc.messages import StageClock

Activity = Literal["busy", "wait_rows", "wait_experts", "wait_slot", "hand_off"]


class ActivityClock:
    """The current activity and the nanoseconds spent in each so far."""

    def __init__(self) -> None:
        self._spent_ns: dict[Activity, int] = dict.fromkeys(
            ("busy", "wait_rows", "wait_experts", "wait_slot", "hand_off"), 0
        )
        self._activity: Activity = "wait_rows"
        self._since_ns = time.monotonic_ns()

    def switch(self, activity: Activity) -> Activity:
        """Make activity the current one and return the one before."""
        now_ns = time.monotonic_ns()
        before = self._activity
        self._spent_ns[before] += now_ns - self._since_ns
        self._activity, self._since_ns = activity, now_ns
        return before

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Count the body as activity, then return to what was current before."""
        before = self.switch(activity)
        try:
            yield
        finally:
            self.switch(before)

    def snapshot(self) -> StageClock:
        """The totals up to this instant."""
        self.switch(self._activity)
        spent = self._spent_ns
        return StageClock(
            now_ns=self._since_ns,
            busy_ns=spent["busy"],
            wait_rows_ns=spent["wait_rows"],
            wait_experts_ns=spent["wait_experts"],
            wait_slot_ns=spent["wait_slot"],
            hand_off_ns=spent["hand_off"],
        )
