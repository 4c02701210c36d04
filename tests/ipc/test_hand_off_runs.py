"""Random runs of both link ends with the invariants of the design, by seed and by hypothesis.

The mutants at the end are the faults that the protocol is there to exclude: runs that miss one are worth
nothing.
"""

import pytest
from hand_off_world import SLOT_ROWS, World, random_run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.slots import ReceiverLink, SenderLink, SlotState


def test_seeded_runs_keep_the_invariants():
    taken = sum(random_run(World(1 + seed % 4), seed, 200).total_taken for seed in range(1000))
    assert taken > 10_000  # the runs get somewhere


class Joined(RuleBasedStateMachine):
    """The same world, with its actions chosen by hypothesis, which shrinks a failing run."""

    @initialize(num_slots=st.integers(1, 3))
    def start(self, num_slots):
        self.world = World(num_slots)
        self.world.begin_epoch()

    @rule(times=st.integers(1, 4))
    def take_commands(self, times):
        for _ in range(times):
            self.world.sender_command()
            self.world.receiver_command()

    @rule(up=st.integers(0, 3), down=st.integers(0, 3))
    def deliver(self, up, down):
        for _ in range(up):
            self.world.deliver_up()
        for _ in range(down):
            self.world.deliver_down()

    @rule(rows=st.integers(0, SLOT_ROWS), last=st.booleans(), finish=st.booleans())
    def copy(self, rows, last, finish):
        self.world.start_copy(rows, last=last)
        if finish:
            self.world.finish_copy()

    @rule(index=st.integers(0, 3), start=st.booleans(), finish=st.booleans())
    def read(self, index, start, finish):
        if start:
            self.world.read()
        if finish:
            self.world.finish_read(index)

    @rule(fault=st.sampled_from(["abort", "lose", "sender", "receiver", "none", "none", "none"]))
    def epoch(self, fault):
        if fault == "abort":
            self.world.abort_epoch()
        elif fault == "lose":
            self.world.lose_all()
        elif fault != "none":
            self.world.restart(fault)
        self.world.begin_epoch()

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()


TestJoined = Joined.TestCase
TestJoined.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class KeepsFullSlots(ReceiverLink):
    """A full slot outlives its epoch: every later prompt finds the link in use."""

    def abort(self, epoch):
        if self.close_epoch(epoch):
            self._full.clear()


class FreesGrantedSlots(ReceiverLink):
    """Takes slots back before the sender has answered."""

    def abort(self, epoch):
        super().abort(epoch)
        self.states = [SlotState.FREE if s is SlotState.GRANTED else s for s in self.states]


class IgnoresGeneration(ReceiverLink):
    def is_current(self, message):
        return True


class GrantsBeforeTheReadEnds(ReceiverLink):
    def take(self):
        put = super().take()
        if put is not None:
            self.states[put.slot] = SlotState.FREE
        return put

    def release(self, slot):
        return [self._grant(slot)] if self.is_active else []


class TakesNewestFirst(ReceiverLink):
    def take(self):
        self._full.reverse()
        return super().take()


class KeepsCredits(SenderLink):
    """Forgets to return what it holds when the epoch ends."""

    def abort(self, epoch):
        super().abort(epoch)
        return []


class DropsStaleGrants(SenderLink):
    """Does not answer a grant that comes after the abort."""

    def on_grant(self, grant):
        super().on_grant(grant)
        return []


class ForgetsEarlyGrants(SenderLink):
    def on_grant(self, grant):
        return [] if grant.epoch > self.epoch else super().on_grant(grant)


class RelinksWhileCopying(SenderLink):
    @property
    def can_relink(self):
        return not self.is_active

    def relink(self, generation, *, num_slots=None, slot_rows=None):
        copying, self.copying = self.copying, {}
        super().relink(generation, num_slots=num_slots, slot_rows=slot_rows)
        self.copying = copying


class AcceptsAnyOrder(ReceiverLink):
    def _objection(self, put):
        return None


class RelinksWhileReading(ReceiverLink):
    """Takes a slot for free that the walk still reads."""

    @property
    def can_relink(self):
        return not self.is_active

    def relink(self, generation, *, num_slots=None, slot_rows=None):
        self.states = [SlotState.FREE] * self.num_slots
        super().relink(generation, num_slots=num_slots, slot_rows=slot_rows)


MUTANTS = [
    {"receiver_class": KeepsFullSlots},
    {"receiver_class": FreesGrantedSlots},
    {"receiver_class": IgnoresGeneration},
    {"receiver_class": GrantsBeforeTheReadEnds},
    {"receiver_class": TakesNewestFirst},
    {"receiver_class": AcceptsAnyOrder},
    {"receiver_class": RelinksWhileReading},
    {"sender_class": KeepsCredits},
    {"sender_class": DropsStaleGrants},
    {"sender_class": ForgetsEarlyGrants},
    {"sender_class": RelinksWhileCopying},
    {"put_before_copy": True},
    {"begin_before_relinked": True},
]


def mutant_name(change: dict[str, object]) -> str:
    ((key, value),) = change.items()
    return getattr(value, "__name__", key)


@pytest.mark.parametrize("change", MUTANTS, ids=mutant_name)
def test_seeded_runs_find_every_planted_fault(change):
    mutant = type("Mutant", (World,), change)

    def search():
        for seed in range(1000):
            random_run(mutant(1 + seed % 4), seed, 200)

    with pytest.raises((AssertionError, ProtocolError, InvariantError)):
        search()
