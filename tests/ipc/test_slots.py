"""Hand-off protocol H/1, rule by rule. Random runs are in test_hand_off_runs.py."""

import pytest
from hand_off_world import SLOT_ROWS

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import Grant, Put, Return
from strata_coord.ipc.slots import ReceiverLink, SenderLink, SlotState


def joined(num_slots: int = 2) -> tuple[SenderLink, ReceiverLink]:
    """Both ends of a link in epoch 1, all credits at the sender."""
    sender = SenderLink(num_slots, SLOT_ROWS, generation=1)
    receiver = ReceiverLink(num_slots, SLOT_ROWS, generation=1)
    sender.begin(1)
    for grant in receiver.begin(1):
        assert sender.on_grant(grant) == []
    return sender, receiver


def put_next(sender: SenderLink, super_chunk: int, first_row: int, rows: int, *, last: bool) -> Put:
    slot = sender.acquire()
    assert slot is not None
    answer = sender.filled(slot, super_chunk=super_chunk, first_row=first_row, rows=rows, last=last)
    assert isinstance(answer, Put)
    return answer


def test_rows_cross_in_order_and_slots_are_granted_again():
    sender, receiver = joined()
    receiver.on_put(put_next(sender, 0, 0, 4, last=False))
    receiver.on_put(put_next(sender, 0, 4, 1, last=True))
    assert sender.acquire() is None
    first, second = receiver.take(), receiver.take()
    assert receiver.take() is None
    assert (first.hand_off, first.first_row, second.hand_off, second.first_row) == (0, 0, 1, 4)
    assert receiver.release(second.slot) == [Grant(generation=1, epoch=1, slot=second.slot)]
    assert receiver.release(first.slot) == [Grant(generation=1, epoch=1, slot=first.slot)]


def test_grants_stay_out_while_the_stream_idles():
    sender, receiver = joined()
    assert receiver.states == [SlotState.GRANTED] * 2
    assert not receiver.is_settled
    assert list(sender.credits) == [0, 1]


def test_a_cancelled_super_chunk_passes_without_rows_at_its_start_or_after_some():
    sender, receiver = joined(4)
    receiver.on_put(put_next(sender, 0, 0, 0, last=True))
    receiver.on_put(put_next(sender, 1, 0, 4, last=False))
    receiver.on_put(put_next(sender, 1, 4, 0, last=True))
    receiver.on_put(put_next(sender, 2, 0, 1, last=True))
    assert [receiver.take().rows for _ in range(4)] == [0, 4, 0, 1]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hand_off": 1}, "hand-off 0 is due"),
        ({"super_chunk": 1}, "super-chunk 0 is due"),
        ({"first_row": 1}, "row 0"),
        ({"rows": SLOT_ROWS + 1}, f"holds {SLOT_ROWS}"),
        ({"rows": -1}, f"holds {SLOT_ROWS}"),
        ({"rows": 0}, "goes on"),
        ({"slot": 2}, "slot 2 of 2"),
        ({"slot": -1}, "slot -1 of 2"),
        ({"epoch": 2}, "granted in epoch 1"),
    ],
)
def test_a_put_that_is_not_the_next_one_is_refused(change, complaint):
    fields = {"generation": 1, "epoch": 1, "hand_off": 0, "slot": 0, "super_chunk": 0, "first_row": 0}
    good = fields | {"rows": 2, "last": False}
    _, receiver = joined()
    with pytest.raises(ProtocolError, match=complaint):
        receiver.on_put(Put(**(good | change)))
    assert receiver.take() is None


def test_after_a_gap_nothing_is_accepted_until_relink():
    sender, receiver = joined(3)
    lost, second, third = (put_next(sender, n, 0, 1, last=True) for n in range(3))
    with pytest.raises(ProtocolError, match="hand-off 0 is due"):
        receiver.on_put(second)
    receiver.on_put(lost)
    receiver.on_put(third)
    assert receiver.take() is None
    receiver.abort(1)
    assert not receiver.is_settled
    receiver.relink(2)
    assert receiver.is_settled


def test_a_put_or_return_without_a_grant_is_refused():
    sender, receiver = joined()
    put = put_next(sender, 0, 0, 1, last=True)
    receiver.on_put(put)
    with pytest.raises(ProtocolError, match="is full and not granted"):
        receiver.on_put(put)
    with pytest.raises(ProtocolError, match="is full and not granted"):
        receiver.on_return(Return(generation=1, epoch=1, slot=put.slot))


def test_a_slot_granted_twice_is_refused():
    sender, _ = joined()
    with pytest.raises(ProtocolError, match="granted twice"):
        sender.on_grant(Grant(generation=1, epoch=1, slot=0))
    sender.acquire()
    with pytest.raises(ProtocolError, match="granted twice"):
        sender.on_grant(Grant(generation=1, epoch=1, slot=0))


def test_a_grant_that_comes_before_the_epoch_counts_when_it_begins():
    sender = SenderLink(2, SLOT_ROWS, generation=1)
    assert sender.on_grant(Grant(generation=1, epoch=1, slot=1)) == []
    assert sender.acquire() is None
    sender.begin(1)
    assert sender.acquire() == 1


def test_an_early_grant_of_an_epoch_that_never_begins_is_returned():
    sender = SenderLink(2, SLOT_ROWS, generation=1)
    sender.on_grant(Grant(generation=1, epoch=1, slot=1))
    assert sender.abort(1) == [Return(generation=1, epoch=1, slot=1)]
    assert sender.on_grant(Grant(generation=1, epoch=1, slot=0)) == [Return(generation=1, epoch=1, slot=0)]


def test_abort_frees_full_slots_and_waits_for_granted_ones_and_reads():
    sender, receiver = joined(3)
    receiver.on_put(put_next(sender, 0, 0, 1, last=True))
    receiver.on_put(put_next(sender, 1, 0, 1, last=True))
    reading = receiver.take()
    receiver.abort(1)
    assert receiver.take() is None
    assert sorted(state.value for state in receiver.states) == ["free", "granted", "reading"]
    assert receiver.release(reading.slot) == []
    for answer in sender.abort(1):
        receiver.on_return(answer)
    assert receiver.is_settled
    assert sender.is_settled


def test_a_copy_that_ends_after_the_abort_is_answered_by_a_return():
    sender, receiver = joined(1)
    slot = sender.acquire()
    assert sender.abort(1) == []
    assert not sender.is_settled
    answer = sender.filled(slot, super_chunk=0, first_row=0, rows=1, last=True)
    assert answer == Return(generation=1, epoch=1, slot=slot)
    receiver.on_return(answer)
    receiver.abort(1)
    assert receiver.is_settled


def test_abort_is_idempotent_and_an_old_one_changes_nothing():
    sender, receiver = joined()
    assert sender.abort(0) == []
    receiver.abort(0)
    assert sender.is_active
    assert receiver.is_active
    assert len(sender.abort(1)) == 2
    assert sender.abort(1) == []


def test_messages_of_an_older_generation_are_dropped_and_counted():
    sender, receiver = joined()
    stale = put_next(sender, 0, 0, 1, last=True)
    sender.abort(1)
    receiver.abort(1)
    sender.relink(2)
    receiver.relink(2)
    receiver.on_put(stale)
    assert sender.on_grant(Grant(generation=1, epoch=2, slot=0)) == []
    assert (receiver.num_stale, sender.num_stale) == (1, 1)
    sender.begin(2)
    assert [grant.generation for grant in receiver.begin(2)] == [2, 2]


def test_a_generation_may_change_the_number_of_slots():
    _, receiver = joined(1)
    receiver.abort(1)
    receiver.relink(2, num_slots=3, slot_rows=7)
    assert [grant.slot for grant in receiver.begin(2)] == [0, 1, 2]
    assert receiver.slot_rows == 7


def misuse():
    sender, receiver = joined()
    yield "epoch 2 begins while epoch 1", lambda: receiver.begin(2)
    yield "epoch 2 begins while epoch 1", lambda: sender.begin(2)
    yield "generation 2 comes while epoch 1", lambda: receiver.relink(2)
    yield "generation 2 comes while epoch 1", lambda: sender.relink(2)
    yield "is granted, reading is needed", lambda: receiver.release(0)
    yield "slot 9 of 2 is not there", lambda: receiver.release(9)
    yield "is not being copied", lambda: sender.filled(0, super_chunk=0, first_row=0, rows=1, last=True)
    yield "epoch 2 is aborted while epoch 1 runs", lambda: receiver.abort(2)
    yield "0 slots", lambda: SenderLink(0, 1, generation=1)
    copying, _ = joined()
    slot = copying.acquire()
    yield "comes back while epoch 1 runs", lambda: copying.give_back(slot)
    yield "super-chunk 0 is due", lambda: copying.filled(slot, super_chunk=1, first_row=0, rows=1, last=True)
    stopped, reading = joined()
    stopped.acquire()
    reading.on_put(put_next(stopped, 0, 0, 1, last=True))
    reading.take()
    stopped.abort(1)
    reading.abort(1)
    yield "is copied", lambda: stopped.relink(2)
    yield "is read", lambda: reading.relink(2)
    idle = ReceiverLink(1, 1, generation=3)
    idle.abort(5)
    yield "epoch 5 begins after epoch 5", lambda: idle.begin(5)
    yield "generation 3 follows generation 3", lambda: idle.relink(3)
    early = SenderLink(1, 1, generation=1)
    early.on_grant(Grant(generation=1, epoch=1, slot=0))
    yield "credit of epoch 1", lambda: early.begin(2)


@pytest.mark.parametrize(("complaint", "call"), list(misuse()), ids=lambda value: str(value)[:40])
def test_a_caller_that_breaks_the_rules_is_told(complaint, call):
    with pytest.raises(InvariantError, match=complaint):
        call()
