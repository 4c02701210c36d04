"""What a stage knows of one snapshot; sequence_state.py takes, restores and frees it."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """A sequence's state at one position. It counts once every layer has copied its histories."""

    position: int
    sequence: int  # whose state it is
    slot: int
    pages: list[int]
    layers_due: set[int]  # that have not copied yet
    past: dict[int, int]  # the sequence's earlier snapshots: number -> position
