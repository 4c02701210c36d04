"""What a launch does about GPUs before any worker starts, and the news that stages have when they are up."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from planning_fakes import fake_config, fake_device, fake_model, fake_rig

from strata_coord.coordinator import engine, probe
from strata_coord.coordinator.gpus import FoundDevices
from strata_coord.coordinator.launch import Prepared, make_plan, running_engine
from strata_coord.coordinator.launch_options import LaunchOptions
from strata_coord.coordinator.plan import LaunchPlan, to_json
from strata_coord.ipc.errors import AlreadyRunningError, BindingError, ConfigError

MODEL = fake_model()
FULL, EMPTY = fake_device(free_mib=3_000), fake_device(free_mib=20_000)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A host whose card looks nearly full at first and free once it is locked."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "probe_rig", lambda: fake_rig(devices=(FULL,)))
    monkeypatch.setattr(probe, "usable_devices", lambda **_: FoundDevices(devices=(EMPTY,)))


def plan(locks: contextlib.ExitStack, plan_file: Path | None = None, **config) -> LaunchPlan:
    options = LaunchOptions(config=Path("x.toml"), plan_file=plan_file)
    return make_plan(options, fake_config(**config), MODEL, locks)  # type: ignore[arg-type]


def test_what_is_free_is_asked_under_the_lock():
    with contextlib.ExitStack() as locks:
        made = plan(locks, device="auto", budget_mib=None)
    assert sum(stage.budget_bytes for stage in made.stages) > FULL.free_bytes


def test_a_second_launch_that_takes_what_is_free_is_refused_and_one_with_budgets_is_not():
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        plan(first, device="auto", budget_mib=None)
        with pytest.raises(AlreadyRunningError, match=r"gpu-00000000-.* in use by another launch"):
            plan(second, device="auto", budget_mib=(None, 600))
        plan(second, device="auto", budget_mib=600)
        plan(second, device="cpu", budget_mib=600)
    with contextlib.ExitStack() as third:
        plan(third, device="auto", budget_mib=None)


def test_a_replayed_plan_locks_its_cards_and_has_to_find_them(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    with contextlib.ExitStack() as locks:
        file.write_text(to_json(plan(locks, device="auto", budget_mib=None)))
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        plan(first, file, device="auto", budget_mib=None)
        with pytest.raises(AlreadyRunningError):
            plan(second, file, device="auto", budget_mib=None)
    monkeypatch.setattr(probe, "usable_devices", lambda **_: FoundDevices(reason="no NVIDIA driver"))
    with contextlib.ExitStack() as locks, pytest.raises(BindingError, match="no NVIDIA driver"):
        plan(locks, file, device="auto", budget_mib=None)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "plan: not valid JSON"),
        (b"\xff\xfe", "not UTF-8 text, byte 0"),
        (b"[]", "plan: expected an object"),
    ],
    ids=["cut short", "not text", "something else"],
)
def test_a_plan_that_cannot_be_read_back_is_named(tmp_path, data, problem):
    file = tmp_path / "plan.json"
    file.write_bytes(data)
    with contextlib.ExitStack() as locks, pytest.raises(ConfigError) as refused:
        plan(locks, file)
    assert str(refused.value).startswith(f"{file}: {problem}")


def test_what_stages_had_to_do_without_is_shown_once_when_they_are_up(monkeypatch):
    said: list[str] = []
    stages = [
        SimpleNamespace(stage=0, notes=()),
        SimpleNamespace(stage=1, notes=("arena pageable: memlock 8 MiB", "no NVLink")),
    ]
    running = SimpleNamespace(start=lambda: None, stages=lambda: stages, close=lambda **_: [])
    monkeypatch.setattr(engine, "Engine", lambda **_: running)
    screen = SimpleNamespace(show=lambda _: None, note=said.append, warn=said.append, close=lambda: None)
    with contextlib.ExitStack() as locks:
        made = plan(locks, device="cpu")
    prepared = Prepared(config=fake_config(), model=MODEL, plan=made)  # type: ignore[arg-type]
    with running_engine(prepared, screen):  # type: ignore[arg-type]
        assert said == ["stage 1: arena pageable: memlock 8 MiB", "stage 1: no NVLink"]
    assert len(said) == 2
