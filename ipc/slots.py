"""One link's hand-off protocol H/1, sans I/O: slot states, credits, order, epochs. No clock, no socket.

The receiver owns the slots of a link:

    FREE -> GRANTED -> FULL -> READING -> FREE
    grant   Put      take    release (grants again at once)

A Grant is permission to fill one slot once, and has exactly one answer: Put (filled; sent only after the copy
is complete) or Return. An epoch is an endless stream, so grants stay out while it idles. It ends by abort:
the sender returns what it holds, the receiver frees what is full, and each side is settled when
nothing is out, being copied or being read. A new epoch begins on settled links only.

A new generation of a link (relink) follows an abort. It revokes grants that will never be answered, since the
other end died or messages were lost; messages of older generations are dropped.

ProtocolError: the peer broke a rule; the link is over until relink. InvariantError: our own caller did.
The classes are not thread-safe; in a stage the control thread alone calls them.
"""

import enum
from collections import deque

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.link_side import LinkSide
from strata_coord.ipc.messages import Grant, Put, Return


class SlotState(enum.Enum):
    """Who may touch a slot's bytes."""

    FREE = "free"  # nobody
    GRANTED = "granted"  # the sender
    FULL = "full"  # nobody: waits for the receiver
    READING = "reading"  # the receiver


class ReceiverLink(LinkSide):
    """The side that owns the slots and grants them."""

    def __init__(self, num_slots: int, slot_rows: int, *, generation: int) -> None:
        super().__init__(num_slots, slot_rows, generation)
        self.states = [SlotState.FREE] * num_slots
        self.is_broken = False  # the sender broke the order; nothing is accepted until relink
        self._granted_in = [0] * num_slots  # epoch of each slot's last grant
        self._full: deque[Put] = deque()

    @property
    def is_settled(self) -> bool:
        """Whether all slots are free and no epoch runs."""
        return not self.is_active and all(state is SlotState.FREE for state in self.states)

    @property
    def can_relink(self) -> bool:
        """Whether no slot is being read: a read has to end before the memory is replaced."""
        return not self.is_active and SlotState.READING not in self.states

    def begin(self, epoch: int) -> list[Grant]:
        """Open an epoch and grant every slot.

        Raises:
            InvariantError: the link is not settled, or the epoch is not a new one.
        """
        self.open_epoch(epoch)
        return [self._grant(slot) for slot in range(self.num_slots)]

    def on_put(self, put: Put) -> None:
        """A slot was filled. After an abort, and from an older generation, it counts for nothing.

        Raises:
            ProtocolError: it answers no grant, or is not the next hand-off.
        """
        if not self._is_answer(put):
            return
        if not self.is_active:
            self.states[put.slot] = SlotState.FREE
            return
        if self.is_broken:
            return  # stays granted until relink: what the sender still copies is unknown
        problem = self._objection(put)
        if problem is not None:
            self.is_broken = True
            message = f"hand-off {put.hand_off} of epoch {put.epoch}: {problem}"
            raise ProtocolError(message)
        self.order.advance(put.rows, last=put.last)
        self.states[put.slot] = SlotState.FULL
        self._full.append(put)

    def on_return(self, answer: Return) -> None:
        """A credit came back unused: the sender knows of an abort that may be on its way to us.

        Raises:
            ProtocolError: it answers no grant.
        """
        if self._is_answer(answer):
            self.states[answer.slot] = SlotState.FREE

    def take(self) -> Put | None:
        """Start to read the next full slot; None when none is full. Several may be read at a time."""
        if not self.is_active or not self._full:
            return None
        put = self._full.popleft()
        self._expect(put.slot, SlotState.FULL)
        self.states[put.slot] = SlotState.READING
        return put

    def release(self, slot: int) -> list[Grant]:
        """End a read. The slot is granted again, unless the epoch ended meanwhile.

        Raises:
            InvariantError: the slot is not being read.
        """
        self._expect(slot, SlotState.READING)
        self.states[slot] = SlotState.FREE
        return [self._grant(slot)] if self.is_active and not self.is_broken else []

    def abort(self, epoch: int) -> None:
        """End an epoch, begun or not. Full slots are freed; granted ones wait for the sender's answer.

        Raises:
            InvariantError: an earlier epoch runs.
        """
        if self.close_epoch(epoch):
            for put in self._full:
                self.states[put.slot] = SlotState.FREE
            self._full.clear()

    def relink(self, generation: int, *, num_slots: int | None = None, slot_rows: int | None = None) -> None:
        """Start a new generation on new memory, after the epoch was aborted. Grants are revoked.

        Raises:
            InvariantError: a slot is being read, an epoch runs, or the generation is not a new one.
        """
        if SlotState.READING in self.states:
            message = (
                f"generation {generation} comes while slot {self.states.index(SlotState.READING)} is read"
            )
            raise InvariantError(message)
        self.renew(generation, num_slots, slot_rows)
        self.states = [SlotState.FREE] * self.num_slots
        self._granted_in = [0] * self.num_slots
        self.is_broken = False

    def _grant(self, slot: int) -> Grant:
        self._expect(slot, SlotState.FREE)
        self.states[slot] = SlotState.GRANTED
        self._granted_in[slot] = self.epoch
        return Grant(generation=self.generation, epoch=self.epoch, slot=slot)

    def _is_answer(self, answer: Put | Return) -> bool:
        if not self.is_current(answer):
            return False
        state = self.states[answer.slot]
        if state is not SlotState.GRANTED:
            message = (
                f"{type(answer).__name__} for slot {answer.slot}, which is {state.value} and not granted"
            )
            raise ProtocolError(message)
        if answer.epoch != self._granted_in[answer.slot]:
            message = (
                f"{type(answer).__name__} of epoch {answer.epoch} for slot {answer.slot}, "
                f"which was granted in epoch {self._granted_in[answer.slot]}"
            )
            raise ProtocolError(message)
        return True

    def _objection(self, put: Put) -> str | None:
        if put.hand_off != self.order.hand_off:
            return f"hand-off {self.order.hand_off} is due"
        return self.order.objection(put.super_chunk, put.first_row, put.rows, self.slot_rows, last=put.last)

    def _expect(self, slot: int, state: SlotState) -> None:
        if not 0 <= slot < self.num_slots or self.states[slot] is not state:
            found = self.states[slot].value if 0 <= slot < self.num_slots else "not there"
            message = f"slot {slot} of {self.num_slots} is {found}, {state.value} is needed"
            raise InvariantError(message)


class SenderLink(LinkSide):
    """The side that fills slots while it holds their credits."""

    def __init__(self, num_slots: int, slot_rows: int, *, generation: int) -> None:
        super().__init__(num_slots, slot_rows, generation)
        self.credits: deque[int] = deque()  # in the order granted
        self.copying: dict[int, int] = {}  # slot -> epoch of its grant
        self._early: dict[int, int] = {}  # slot -> epoch: granted before our own BeginEpoch came

    @property
    def is_settled(self) -> bool:
        """Whether no epoch runs, no credit of one is held and no copy runs. Early credits may be here."""
        return not self.is_active and not self.credits and not self.copying

    @property
    def can_relink(self) -> bool:
        """Whether no copy runs: it has to end before the memory is replaced."""
        return not self.is_active and not self.copying

    def begin(self, epoch: int) -> None:
        """Open an epoch; credits that came early count.

        Raises:
            InvariantError: the link is not settled, or the epoch is not a new one.
        """
        self.open_epoch(epoch)
        for slot, granted in self._early.items():
            if granted != epoch:
                message = f"epoch {epoch} begins with a credit of epoch {granted}"
                raise InvariantError(message)
            self.credits.append(slot)
        self._early.clear()

    def on_grant(self, grant: Grant) -> list[Return]:
        """A slot may be filled. Returns the answer to send when the epoch is over.

        Raises:
            ProtocolError: the slot's last grant was not answered yet.
        """
        if not self.is_current(grant):
            return []
        if grant.slot in self.credits or grant.slot in self.copying or grant.slot in self._early:
            message = f"slot {grant.slot} is granted twice"
            raise ProtocolError(message)
        if grant.epoch > self.epoch:
            self._early[grant.slot] = grant.epoch
        elif grant.epoch == self.epoch and self.is_active:
            self.credits.append(grant.slot)
        else:
            return [self._return(grant.slot, grant.epoch)]
        return []

    def acquire(self) -> int | None:
        """Return a slot to copy rows into, or None while there is no credit."""
        if not self.is_active or not self.credits:
            return None
        slot = self.credits.popleft()
        self.copying[slot] = self.epoch
        return slot

    def filled(self, slot: int, *, super_chunk: int, first_row: int, rows: int, last: bool) -> Put | Return:
        """End a copy and return the message to send. The caller vouches that the copy is complete.

        Several copies may run, and are reported in the order of their rows. rows 0 with last set passes a
        cancelled super-chunk. When the epoch ended meanwhile, the answer is a Return.

        Raises:
            InvariantError: the slot was not acquired, or these are not the next rows.
        """
        self._expect_copying(slot)
        if not self.is_active:
            return self.give_back(slot)
        problem = self.order.objection(super_chunk, first_row, rows, self.slot_rows, last=last)
        if problem is not None:
            message = f"hand-off {self.order.hand_off} of epoch {self.epoch}: {problem}"
            raise InvariantError(message)
        put = Put(
            generation=self.generation,
            epoch=self.epoch,
            hand_off=self.order.hand_off,
            slot=slot,
            super_chunk=super_chunk,
            first_row=first_row,
            rows=rows,
            last=last,
        )
        del self.copying[slot]
        self.order.advance(rows, last=last)
        return put

    def give_back(self, slot: int) -> Return:
        """End a copy whose rows are not needed, after an abort; the copy must have stopped.

        Raises:
            InvariantError: the slot was not acquired, or the epoch still runs.
        """
        self._expect_copying(slot)
        if self.is_active:
            message = f"slot {slot} comes back while epoch {self.epoch} runs"
            raise InvariantError(message)
        return self._return(slot, self.copying.pop(slot))

    def abort(self, epoch: int) -> list[Return]:
        """End an epoch, begun or not, and return every credit of it. Running copies answer when they end.

        Raises:
            InvariantError: an earlier epoch runs.
        """
        if not self.close_epoch(epoch):
            return []
        over = dict.fromkeys(self.credits, epoch)
        over |= {slot: granted for slot, granted in self._early.items() if granted <= epoch}
        self.credits.clear()
        self._early = {slot: granted for slot, granted in self._early.items() if granted > epoch}
        return [self._return(slot, granted) for slot, granted in over.items()]

    def relink(self, generation: int, *, num_slots: int | None = None, slot_rows: int | None = None) -> None:
        """Start a new generation on new memory, after the epoch was aborted. Credits are dropped.

        Raises:
            InvariantError: a copy runs, an epoch runs, or the generation is not a new one.
        """
        if self.copying:
            message = f"generation {generation} comes while slot {min(self.copying)} is copied"
            raise InvariantError(message)
        self.renew(generation, num_slots, slot_rows)
        self.credits.clear()
        self._early.clear()

    def _return(self, slot: int, epoch: int) -> Return:
        return Return(generation=self.generation, epoch=epoch, slot=slot)

    def _expect_copying(self, slot: int) -> None:
        if slot not in self.copying:
            message = f"slot {slot} of {self.num_slots} is not being copied"
            raise InvariantError(message)
