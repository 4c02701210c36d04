"""What a super-chunk's record asks of a stage's states: before the rows, and after them.

A sequence is lost when a walk with its rows was given up or its values were not finite: its layers have no
common state from that super-chunk's first row on. Later records that were already on their way pass over it,
until it is dropped or cut back to a position before the loss. lost: sequence -> that first position.
"""

from collections.abc import Collection, Iterable, Sequence

from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import Segment, StateOperation
from strata_coord.stage_worker.sequence_state import StatePool


def apply_operations(
    states: StatePool, operations: Iterable[StateOperation], *, lost: dict[int, int]
) -> None:
    """Apply the operations, in order.

    Raises:
        InvariantError: an operation names a state or snapshot that is not there, or is taken.
        RequestError: there is no room, or a sequence cannot be cut back as asked.
    """
    for operation in operations:
        sequence = operation.sequence
        if operation.kind == "drop-snapshot":
            states.drop_snapshot(operation.snapshot)
        elif operation.kind == "truncate":
            if operation.position <= lost.get(sequence, operation.position):
                states.truncate(sequence, operation.position, snapshot=operation.snapshot)
                lost.pop(sequence, None)
        elif operation.kind == "snapshot":
            if sequence not in lost:
                _snapshot_as_it_stands(states, sequence, operation.snapshot)
        else:
            lost.pop(sequence, None)
            if operation.kind == "create":
                states.create(sequence)
            elif operation.kind == "restore":
                states.restore(sequence, operation.snapshot)
            else:
                states.drop(sequence)


def _snapshot_as_it_stands(states: StatePool, sequence: int, snapshot: int) -> None:
    states.begin_snapshot(snapshot, sequence, states.get(sequence).shortest)
    for layer in range(states.first_layer, states.last_layer):
        states.copy_histories(snapshot, layer)
    states.finish_snapshot(snapshot)


def reserve_segments(states: StatePool, segments: Sequence[Segment], *, lost: Collection[int]) -> None:
    """Take all pages of all segments, and begin the snapshots that are due in them.

    Running out inside a layer would leave some segments ahead of others.

    Raises:
        InvariantError: a snapshot lies outside its segment or out of order.
        RequestError: there is no room for the pages or the snapshots.
    """
    for segment in segments:
        _check_marks(segment)
        states.get(segment.sequence).reserve(segment.first_position + segment.count)
    for segment in segments:
        if segment.sequence not in lost:
            for mark in segment.snapshots:
                states.begin_snapshot(mark.snapshot, segment.sequence, mark.position)


def _check_marks(segment: Segment) -> None:
    before, last = segment.first_position, segment.first_position + segment.count
    for mark in segment.snapshots:
        if not before < mark.position <= last:
            message = (
                f"sequence {segment.sequence}: snapshot {mark.snapshot} at position {mark.position} is not "
                f"after {before} and up to {last}"
            )
            raise InvariantError(message)
        before = mark.position


def settle_segments(
    states: StatePool,
    segments: Sequence[Segment],
    *,
    lost: dict[int, int],
    given_up: Collection[int] | None,
) -> None:
    """Make the snapshots of the segments that were walked count, and note the sequences that are lost.

    given_up: sequences of the walk that are of no use from here on; None: all, there was no walk.
    """
    for segment in segments:
        was_lost = segment.sequence in lost
        if given_up is None or segment.sequence in given_up:
            lost.setdefault(segment.sequence, segment.first_position)
        if was_lost:
            continue
        for mark in segment.snapshots:
            if segment.sequence in lost:
                states.drop_snapshot(mark.snapshot)
            else:
                states.finish_snapshot(mark.snapshot)
