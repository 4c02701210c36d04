"""The launch command: from options to a running engine, one answer or a prompt loop, and a clean end.

Answers go to stdout, everything else to stderr. Every way out of here, errors and signals included, passes
through one close of the engine.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from strata_coord.coordinator.launch_options import LaunchOptions

if TYPE_CHECKING:
    from strata_coord.coordinator.config import Config
    from strata_coord.coordinator.engine import Engine
    from strata_coord.coordinator.model_index import ModelIndex
    from strata_coord.coordinator.plan import LaunchPlan
    from strata_coord.coordinator.screen import Screen

ORDERLY_GRACE_S = 2.0  # an idle worker ends within milliseconds
FAST_GRACE_S = 0.2  # after Ctrl-C: a worker in the middle of a layer is not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is settled before any process starts."""

    config: "Config"
    model: "ModelIndex"
    plan: "LaunchPlan"


def run_launch(options: LaunchOptions) -> int:
    """Run one launch; returns the exit code, raises StrataError or KeyboardInterrupt for the others."""
    from strata_coord.coordinator.screen import Screen
    from strata_coord.coordinator.session import Session
    from strata_coord.coordinator.signals import Terminated, terminable

    with terminable(), contextlib.ExitStack() as locks:
        screen = Screen(options)
        try:
            prepared = prepare(options, screen, locks)
            session = Session(options=options, prepared=prepared, screen=screen)
            prompt = session.first_prompt()  # before any process starts: a wrong prompt costs no loading time
            with running_engine(prepared, screen) as engine:
                return session.run(engine, prompt)
        except Terminated:
            return 0


def prepare(options: LaunchOptions, screen: "Screen", locks: contextlib.ExitStack) -> Prepared:
    """Read configuration and model header, and plan.

    Args:
        options: Of the command line.
        screen: Where news goes.
        locks: Gets what keeps other launches off the cards, for as long as this one runs.

    Raises:
        StrataError: the configuration, the model or the plan is refused.
    """
    from strata_coord.coordinator.config import load_config
    from strata_coord.coordinator.model_index import load_model_index

    config = load_config(options.config, options.overrides, model=options.model)
    screen.configure(config.log)
    model = load_model_index(model_path(config.model.path, note=screen.note))
    plan = make_plan(options, config, model, locks)
    for line in plan.notes:
        screen.note(line)
    return Prepared(config=config, model=model, plan=plan)


def model_path(path: str, *, note: Callable[[str], None]) -> str:
    """The file behind model.path; a built-in model is built into the user's cache if it is not there yet."""
    if not path.startswith("builtin:"):
        return path
    from strata_coord.coordinator.builtin_model import builtin_model_path

    announced = False

    def progress(done: int, total: int) -> None:
        nonlocal announced
        if not announced and done < total:
            announced = True
            note(f"building the small model {path}, once: {total / 1e6:.0f} MB into the user's cache")

    return str(builtin_model_path(path.removeprefix("builtin:"), progress=progress))


def make_plan(
    options: LaunchOptions, config: "Config", model: "ModelIndex", locks: contextlib.ExitStack
) -> "LaunchPlan":
    """The launch plan: replayed from a file, or made for this machine.

    Cards are locked before they are planned with: what another launch is about to take still looks free.

    Raises:
        PlanError: nothing fits.
        BindingError: a card that the saved plan is made for is not here.
        AlreadyRunningError: another launch has one of the cards.
        ConfigError: the saved plan is damaged or is of another model.
    """
    from strata_coord.coordinator.assignments import check_plan_fits
    from strata_coord.coordinator.card_locks import lock_cards
    from strata_coord.coordinator.device_choice import check_planned_devices, choose_devices
    from strata_coord.coordinator.planner import plan_launch
    from strata_coord.coordinator.probe import probe_rig, usable_devices

    if options.plan_file is None:
        rig = probe_rig()
        devices = choose_devices(config, rig, [])
        if lock_cards(locks, config, [device.uuid for device in devices]):
            # Once more: what was free before the lock may have been another launch's, or still is its.
            rig = replace(rig, devices=usable_devices(num_nodes=len(rig.nodes)).devices)
        return plan_launch(model, rig, config)
    plan = read_plan(options.plan_file)
    check_plan_fits(plan, model, name=str(options.plan_file))
    if any(stage.device_key for stage in plan.stages):
        found = usable_devices(num_nodes=1)
        check_planned_devices(plan, found.devices, reason=found.reason, name=str(options.plan_file))
    lock_cards(locks, config, [stage.device_key for stage in plan.stages])
    return plan


def read_plan(path: Path) -> "LaunchPlan":
    """Read a saved plan.

    Raises:
        ConfigError: it cannot be read, or is damaged; names the file.
    """
    from strata_coord.coordinator.plan import launch_plan_from_json
    from strata_coord.ipc.errors import ConfigError

    try:
        return launch_plan_from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        message = f"{path}: not UTF-8 text, byte {error.start}"
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
    except ConfigError as error:
        message = f"{path}: {error}"
    raise ConfigError(message)


@contextlib.contextmanager
def running_engine(prepared: Prepared, screen: "Screen") -> Iterator["Engine"]:
    """Start the engine and show it; both have ended when the block is left, however it is left."""
    from strata_coord.coordinator.engine import Engine, Supervision
    from strata_coord.coordinator.signals import unhurried

    engine = Engine(
        plan=prepared.plan,
        model=prepared.model,
        supervision=Supervision(hang_s=prepared.config.supervision.hang_s),
    )
    grace_s = FAST_GRACE_S
    try:
        screen.show(engine)
        engine.start()
        for stage in engine.stages():
            for note in stage.notes:
                screen.note(f"stage {stage.stage}: {note}")
        yield engine
        grace_s = ORDERLY_GRACE_S
    finally:
        with unhurried():
            screen.close()
            for line in engine.close(grace_s=grace_s):
                screen.warn(line)
