"""Links made by the device route, with stages and their messages played by the test."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator import stage_set
from strata_coord.coordinator.planner import plan_launch
from strata_coord.coordinator.stage_set import GENERATION, INCARNATION, StageEntry, StageSet
from strata_coord.ipc.errors import ProtocolError, StageFailedError, StageTimeoutError
from strata_coord.ipc.messages import BeginEpoch, Hello, LinkReady, Relink, SlotsReady, StageReady
from strata_coord.ipc.status_page import StagePhase

HANDLE = bytes(range(64))


class FakeServer:
    """Stands for the control sockets: keeps what is sent, and gives what stages are made to say."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.said: list[Any] = []

    def send(self, stage: int, incarnation: int, message: Any) -> str:
        assert incarnation == INCARNATION
        self.sent.append((stage, message))
        return "sent"

    def recv_all(self) -> list[Any]:
        said, self.said = self.said, []
        return said

    def take(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent


class World:
    """A StageSet whose processes and memory are not there."""

    def __init__(self, routes: tuple[str | None, ...]) -> None:
        boundaries = tuple(range(4, 4 * len(routes), 4))
        model = fake_model(num_layers=4 * len(routes))
        plan = plan_launch(model, fake_rig(), fake_config(boundaries=boundaries))
        stages = tuple(
            replace(stage, route=route, device="cuda:0")  # type: ignore[arg-type]
            for stage, route in zip(plan.stages, routes, strict=True)
        )
        self.stages = StageSet(
            plan=replace(plan, stages=stages),
            model=model,  # type: ignore[arg-type]
            hang_s=1.0,
            start_s=1.0,
            debug_delay_s=0.0,
            memory_lock=threading.Lock(),
        )
        self.server = FakeServer()
        self.stages._server = self.server  # type: ignore[assignment]
        memory = SimpleNamespace(status=SimpleNamespace(snapshot=lambda: None))
        for number in range(len(routes)):
            entry = StageEntry(memory=memory)  # type: ignore[arg-type]
            entry.hello = Hello(stage=number, incarnation=INCARNATION, pid=9, binding="none", numa_node=-1)
            self.stages.entries.append(entry)

    def say(self, *messages: Any) -> list[tuple[int, Any]]:
        """What the coordinator sends once stages have said these."""
        self.server.said += messages
        self.stages.receive()
        return self.server.take()

    def all_ready(self, *, notes: tuple[str, ...] = ()) -> list[tuple[int, Any]]:
        return self.say(*(ready(number, notes) for number in range(len(self.stages.entries))))


def ready(stage: int, notes: tuple[str, ...] = ()) -> StageReady:
    return StageReady(
        stage=stage,
        incarnation=INCARNATION,
        device="cuda:0",
        device_bytes=0,
        arena_bytes=0,
        load_file_read=0,
        load_seconds=0.0,
        notes=notes,
    )


def slots(stage: int, link: int, handle: bytes = HANDLE, generation: int = GENERATION) -> SlotsReady:
    return SlotsReady(stage=stage, incarnation=INCARNATION, link=link, generation=generation, handle=handle)


def linked(stage: int, link: int, direction: str) -> LinkReady:
    return LinkReady(
        stage=stage,
        incarnation=INCARNATION,
        link=link,
        generation=GENERATION,
        direction=direction,  # type: ignore[arg-type]
    )


def test_the_sender_is_told_of_device_slots_once_the_receiver_has_them():
    world = World(("device", None))
    ((stage, first),) = world.all_ready()
    assert (stage, first.direction, first.route, first.handle) == (1, "in", "device", b"")
    ((stage, second),) = world.say(slots(1, 0))
    assert isinstance(second, Relink)
    assert (stage, second.direction, second.route, second.handle) == (0, "out", "device", HANDLE)
    assert (second.num_slots, second.slot_bytes) == (first.num_slots, first.slot_bytes)


def test_no_epoch_begins_before_both_ends_of_every_link_are_up():
    world = World(("device", "host", None))
    relinks = world.all_ready()
    assert [(stage, one.route, one.direction) for stage, one in relinks] == [
        (1, "device", "in"),
        (2, "host", "in"),
        (1, "host", "out"),
    ]
    assert world.say(linked(2, 1, "in"), linked(1, 1, "out")) == []
    assert world.say(linked(1, 0, "in")) == []  # stage 0 has not even been told to link
    assert [type(message) for _, message in world.say(slots(1, 0))] == [Relink]
    begun = world.say(linked(0, 0, "out"))
    assert [(stage, type(message)) for stage, message in begun] == [(n, BeginEpoch) for n in range(3)]
    assert world.stages.is_open


@pytest.mark.parametrize(
    "message",
    [slots(1, 0, generation=GENERATION + 1), slots(0, 0), slots(2, 1)],
    ids=["another generation", "the sender's", "a link of the host route"],
)
def test_slots_that_nobody_asked_for_break_the_protocol(message):
    world = World(("device", "host", None))
    world.all_ready()
    with pytest.raises(ProtocolError, match="unasked"):
        world.say(message)


def test_a_stage_that_never_links_is_named(monkeypatch):
    world = World(("device", None))
    world.stages._watch.started(0, 0.0)
    world.stages._watch.started(1, 0.0)
    monkeypatch.setattr(stage_set.time, "monotonic", lambda: 0.0)
    world.all_ready()
    world.say(slots(1, 0), linked(0, 0, "out"))
    monkeypatch.setattr(stage_set.time, "monotonic", lambda: 1.5)
    patient = SimpleNamespace(phase=StagePhase.READY, progress=1)
    for entry in world.stages.entries:
        entry.memory.status.snapshot = lambda: patient  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(StageTimeoutError, match="stage 1 did not link within 2 s, the limit is 1 s"):
        world.stages.check_progress(None)


def test_slots_are_told_once():
    world = World(("device", None))
    world.all_ready()
    world.say(slots(1, 0))
    with pytest.raises(ProtocolError, match=r"stage 1 sends slots of link 0, generation 1, unasked"):
        world.say(slots(1, 0))


def test_a_device_without_a_handle_fails_the_stage_by_name():
    world = World(("device", None))
    world.all_ready()
    with pytest.raises(StageFailedError, match="stage 1: the device gives no handle"):
        world.say(slots(1, 0, handle=b""))


def test_identities_tell_the_route_and_what_a_stage_had_to_do_without():
    world = World(("device", None))
    world.all_ready(notes=("arena pageable: memlock 8 MiB",))
    first, last = world.stages.identities()
    assert (first.route, last.route) == ("device", None)
    assert first.notes == ("arena pageable: memlock 8 MiB",)
