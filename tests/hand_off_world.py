"""One hand-off link with both ends, its memory, queues and coordinator, and everything that can go wrong.

Slot memory is a list of stamps (epoch, hand-off) that a copy writes when it ends; a read must find the stamp
that its Put announced. Broken invariants are assertion errors named as in the design (I1 ... I8). Every
action may be called at any time; one that is not possible does nothing and returns False.
"""

import random
from collections import deque
from typing import TYPE_CHECKING

from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.messages import Grant, Put, Return
from strata_coord.ipc.slots import ReceiverLink, SenderLink, SlotState

if TYPE_CHECKING:
    from collections.abc import Callable

SLOT_ROWS = 4


class World:
    """State of the link and of the two stages around it. Rows are numbers only."""

    sender_class: type[SenderLink] = SenderLink
    receiver_class: type[ReceiverLink] = ReceiverLink
    put_before_copy = False  # the fault that publish-after-write excludes
    begin_before_relinked = False  # the fault that a credit outruns the new generation

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.epoch = 0
        self.generation = 1
        self.ending = True  # no epoch runs, as far as the coordinator knows
        self.lossy = False  # messages of the current epoch were lost
        self.sender = self.sender_class(num_slots, SLOT_ROWS, generation=1)
        self.receiver = self.receiver_class(num_slots, SLOT_ROWS, generation=1)
        self.up: deque[Grant] = deque()
        self.down: deque[Put | Return] = deque()
        self.commands: dict[str, deque[tuple[str, int]]] = {"sender": deque(), "receiver": deque()}
        self.relinking = {"sender": False, "receiver": False}
        self.memory: list[tuple[int, int] | None] = [None] * num_slots
        self.sender_memory = self.memory  # the memory that the sender has mapped
        self.copies: dict[int, tuple[int, int, int, bool]] = {}  # slot -> super_chunk, row, rows, last
        self.published: dict[int, tuple[int, int]] = {}  # put_before_copy: stamps still to be written
        self.reads: list[Put] = []
        self.num_taken = 0  # in this epoch
        self.total_taken = 0
        self.next_row = (0, 0)  # super-chunk and row that the sender's walk is at

    # --- the coordinator -----------------------------------------------------------------------------

    def begin_epoch(self) -> bool:
        settled = self.sender.is_settled and self.receiver.is_settled
        relinked = self.begin_before_relinked or not any(self.relinking.values())
        waiting = [name for commands in self.commands.values() for name, _ in commands]
        if self.begin_before_relinked:
            waiting = [name for name in waiting if name != "relink"]
        if not (self.ending and settled and relinked and not waiting):
            return False
        self.epoch += 1
        self.ending = self.lossy = False
        self.command("begin", self.epoch)
        return True

    def abort_epoch(self) -> bool:
        if self.ending:
            return False
        self.ending = True
        self.command("abort", self.epoch)
        return True

    def command(self, name: str, number: int) -> None:
        for side, commands in self.commands.items():
            commands.append((name, number))
            if name == "relink":
                self.relinking[side] = True

    def lose_all(self) -> bool:
        """A link fault: everything under way is gone."""
        return self.lose(len(self.up), len(self.down))

    def lose(self, num_up: int, num_down: int) -> bool:
        """The oldest messages are gone; the coordinator aborts and makes a new generation."""
        if not self.epoch:
            return False
        for queue, count in ((self.up, num_up), (self.down, num_down)):
            for _ in range(min(count, len(queue))):
                queue.popleft()
        self.lossy = True
        self.abort_epoch()
        self.generation += 1
        self.memory = [None] * self.num_slots
        self.command("relink", self.generation)
        return True

    def restart(self, side: str) -> bool:
        """A stage is killed and reaped: what it copied or read ends, its end of the link starts anew."""
        if not self.epoch:
            return False
        self.abort_epoch()
        self.lossy = True
        self.generation += 1
        self.memory = [None] * self.num_slots
        other = "receiver" if side == "sender" else "sender"
        self.commands[side].clear()
        self.relinking[side] = False
        self.commands[other].append(("relink", self.generation))
        self.relinking[other] = True
        if side == "sender":
            self.copies.clear()
            self.published.clear()
            self.sender = self.sender_class(self.num_slots, SLOT_ROWS, generation=self.generation)
            self.sender.abort(self.epoch)
            self.sender_memory = self.memory
        else:
            self.reads.clear()
            self.receiver = self.receiver_class(self.num_slots, SLOT_ROWS, generation=self.generation)
            self.receiver.abort(self.epoch)
        return True

    # --- the stages take their commands, in order ----------------------------------------------------

    def sender_command(self) -> bool:
        commands = self.commands["sender"]
        if not commands or (commands[0][0] == "relink" and (not self.sender.can_relink or self.published)):
            return False
        name, number = commands.popleft()
        if name == "begin":
            self.next_row = (0, 0)
            self.sender.begin(number)
        elif name == "abort":
            self.down.extend(self.sender.abort(number))
        else:
            self.sender.relink(number)
            if number == self.generation:
                self.sender_memory = self.memory
            self.relinking["sender"] = any(name == "relink" for name, _ in commands)
        return True

    def receiver_command(self) -> bool:
        commands = self.commands["receiver"]
        if not commands or (commands[0][0] == "relink" and not self.receiver.can_relink):
            return False
        name, number = commands.popleft()
        if name == "begin":
            self.num_taken = 0
            self.up.extend(self.receiver.begin(number))
        elif name == "abort":
            self.receiver.abort(number)
        else:
            self.receiver.relink(number)
            self.relinking["receiver"] = any(name == "relink" for name, _ in commands)
        return True

    # --- rows ----------------------------------------------------------------------------------------

    def start_copy(self, rows: int, *, last: bool) -> bool:
        slot = self.sender.acquire()
        if slot is None:
            return False
        if self.sender.generation == self.receiver.generation:
            assert slot not in [put.slot for put in self.reads], "I4: written while read"
        last = last or rows == 0
        super_chunk, row = self.next_row
        self.next_row = (super_chunk + 1, 0) if last else (super_chunk, row + rows)
        self.copies[slot] = (super_chunk, row, rows, last)
        if self.put_before_copy:
            self.publish(slot)
        return True

    def finish_copy(self) -> bool:
        if self.published:
            slot, stamp = next(iter(self.published.items()))
            del self.published[slot]
            self.sender_memory[slot] = stamp
        elif self.copies:
            self.publish(next(iter(self.copies)))
        else:
            return False
        return True

    def publish(self, slot: int) -> None:
        super_chunk, row, rows, last = self.copies.pop(slot)
        answer = self.sender.filled(slot, super_chunk=super_chunk, first_row=row, rows=rows, last=last)
        if isinstance(answer, Put):
            stamp = (answer.epoch, answer.hand_off)
            if self.put_before_copy:
                self.published[slot] = stamp
            else:
                self.sender_memory[slot] = stamp
        self.down.append(answer)

    def deliver_up(self) -> bool:
        if not self.up:
            return False
        self.down.extend(self.sender.on_grant(self.up.popleft()))
        return True

    def deliver_down(self) -> bool:
        if not self.down:
            return False
        message = self.down.popleft()
        try:
            if isinstance(message, Put):
                self.receiver.on_put(message)
            else:
                self.receiver.on_return(message)
        except ProtocolError:
            if not self.lossy:  # else it is the fault that the relink under way mends
                raise
        return True

    def read(self) -> bool:
        put = self.receiver.take()
        if put is None:
            return False
        assert put.epoch == self.receiver.epoch, "I3: rows of another epoch"
        assert put.hand_off == self.num_taken, "I2: out of order"
        self.check_bytes(put)
        self.num_taken += 1
        self.total_taken += 1
        self.reads.append(put)
        return True

    def finish_read(self, index: int) -> bool:
        if not self.reads:
            return False
        put = self.reads.pop(index % len(self.reads))
        self.check_bytes(put)
        self.up.extend(self.receiver.release(put.slot))
        return True

    def check_bytes(self, put: Put) -> None:
        """The bytes are those announced, as long as the memory of that generation is the current one."""
        if put.generation == self.generation:
            assert self.memory[put.slot] == (put.epoch, put.hand_off), "I3: bytes of another hand-off"

    # --- what must always hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Every grant is in exactly one place, as long as nothing was lost."""
        current = self.receiver.generation
        if self.lossy or self.sender.generation != current:
            return
        under_way = [message.slot for message in (*self.up, *self.down) if message.generation == current]
        held = [*self.sender.credits, *self.sender.copying, *self.sender._early]
        granted = [slot for slot, state in enumerate(self.receiver.states) if state is SlotState.GRANTED]
        assert sorted(under_way + held) == granted, "I1: a credit was lost or doubled"

    def settle(self) -> None:
        """End the epoch, let all that is under way arrive, and find the link in its initial state."""
        if self.epoch == 0:
            return
        self.abort_epoch()
        actions = (
            self.sender_command,
            self.receiver_command,
            self.finish_copy,
            lambda: self.finish_read(0),
            self.deliver_up,
            self.deliver_down,
        )
        while any(action() for action in actions):
            self.check()
        assert self.receiver.states == [SlotState.FREE] * self.num_slots, "I5: a slot did not come back"
        assert self.sender.is_settled, "I5: a credit did not come back"
        assert not any(self.relinking.values()), "I6: a relink waits for ever"
        assert self.begin_epoch(), "I6: no epoch can begin"
        while self.sender_command() or self.receiver_command() or self.deliver_up():
            self.check()
        assert sorted(self.sender.credits) == list(range(self.num_slots)), "I8: not a fresh start"


def random_run(world: World, seed: int, num_steps: int) -> World:
    """Run one seeded schedule to its end; a third of the runs has no fault but aborts."""
    rng = random.Random(seed)
    fault_rate = rng.choice((0.0, 0.003, 0.03))
    abort_rate = rng.choice((0.002, 0.02))
    actions: list[Callable[[], bool]] = [
        world.begin_epoch,
        world.sender_command,
        world.receiver_command,
        lambda: world.start_copy(rng.randint(0, SLOT_ROWS), last=rng.random() < 0.4),
        world.finish_copy,
        world.deliver_up,
        world.deliver_down,
        world.read,
        lambda: world.finish_read(rng.randrange(8)),
    ]
    faults: list[Callable[[], bool]] = [
        world.lose_all,
        lambda: world.lose(rng.randint(0, 2), rng.randint(0, 2)),
        lambda: world.restart("sender"),
        lambda: world.restart("receiver"),
    ]
    for _ in range(num_steps):
        chance = rng.random()
        if chance < fault_rate:
            rng.choice(faults)()
        elif chance < fault_rate + abort_rate:
            world.abort_epoch()
        else:
            rng.shuffle(actions)
            next((action for action in actions if action()), None)
        world.check()
    world.settle()
    return world
