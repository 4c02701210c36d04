"""What both ends of a link share in hand-off protocol H/1: epoch, generation, and the order of hand-offs."""

from abc import ABC, abstractmethod

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import Grant, Put, Return


class HandOffOrder:
    """Hand-offs of an epoch are counted from 0; their rows tile super-chunks 0, 1, 2, ... without gaps."""

    def __init__(self) -> None:
        self.hand_off = 0
        self.super_chunk = 0
        self.row = 0

    def objection(
        self, super_chunk: int, first_row: int, rows: int, max_rows: int, *, last: bool
    ) -> str | None:
        """Return why this hand-off cannot be the next one, or None."""
        if (super_chunk, first_row) != (self.super_chunk, self.row):
            return (
                f"rows from {first_row} of super-chunk {super_chunk} where row {self.row} of "
                f"super-chunk {self.super_chunk} is due"
            )
        if not 0 <= rows <= max_rows:
            return f"{rows} rows where a slot holds {max_rows}"
        if rows == 0 and not last:
            return f"no rows for super-chunk {super_chunk}, and it goes on"
        return None

    def advance(self, rows: int, *, last: bool) -> None:
        """Count a hand-off that had no objection."""
        self.hand_off += 1
        self.row = 0 if last else self.row + rows
        self.super_chunk += last


class LinkSide(ABC):
    """Epoch and generation, the same at both ends."""

    def __init__(self, num_slots: int, slot_rows: int, generation: int) -> None:
        if num_slots < 1 or slot_rows < 1:
            message = f"link with {num_slots} slots of {slot_rows} rows, at least 1 of 1 is needed"
            raise InvariantError(message)
        self.num_slots = num_slots
        self.slot_rows = slot_rows
        self.generation = generation
        self.epoch = 0  # the last one begun or aborted; epochs count from 1
        self.is_active = False  # an epoch runs and was not aborted
        self.num_stale = 0  # messages of older generations, dropped
        self.order = HandOffOrder()

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether the link is in its initial state, as BeginEpoch needs it."""

    def open_epoch(self, epoch: int) -> None:
        """Begin an epoch on a link in its initial state."""
        if not self.is_settled:
            message = f"epoch {epoch} begins while epoch {self.epoch} holds slots"
            raise InvariantError(message)
        if epoch <= self.epoch:
            message = f"epoch {epoch} begins after epoch {self.epoch}"
            raise InvariantError(message)
        self.epoch = epoch
        self.is_active = True
        self.order = HandOffOrder()

    def close_epoch(self, epoch: int) -> bool:
        """End the epoch; False when a later one was seen already, so that there is nothing to do."""
        if self.is_active and epoch > self.epoch:
            message = f"epoch {epoch} is aborted while epoch {self.epoch} runs"
            raise InvariantError(message)
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        self.is_active = False
        return True

    def is_current(self, message: Grant | Put | Return) -> bool:
        """Return whether a message is of this generation; its slot is then known to exist."""
        if message.generation != self.generation:
            self.num_stale += 1
            return False
        if not 0 <= message.slot < self.num_slots:
            error = f"{type(message).__name__} for slot {message.slot} of {self.num_slots}"
            raise ProtocolError(error)
        return True

    def renew(self, generation: int, num_slots: int | None, slot_rows: int | None) -> None:
        """Start a generation. It follows an abort; None keeps a size."""
        if generation <= self.generation:
            message = f"generation {generation} follows generation {self.generation}"
            raise InvariantError(message)
        if self.is_active:
            message = f"generation {generation} comes while epoch {self.epoch} runs"
            raise InvariantError(message)
        self.generation = generation
        self.num_slots = self.num_slots if num_slots is None else num_slots
        self.slot_rows = self.slot_rows if slot_rows is None else slot_rows
