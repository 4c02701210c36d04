"""Which device each stage runs on, in which type, and how much of the card's memory it gets. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.device_facts import link_text, takes_bf16
from strata_coord.ipc.errors import BindingError, ConfigError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata_coord.coordinator.config import Config, StageConfig
    from strata_coord.coordinator.plan import LaunchPlan
    from strata_coord.coordinator.rig import DeviceFacts, Rig
    from strata_coord.ipc.assignment import ComputeDtype

__all__ = ["StageDevice", "check_planned_devices", "choose_devices", "device_budgets"]

MIB = 1 << 20
# Device memory of a process besides what the plan counts: the context with its kernels, and the workspaces
# of the libraries. Measured on an H200 with torch 2.11: 685 MiB after one bf16 product, cupy loaded.
PROCESS_BYTES = 768 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    """Where one stage runs."""

    facts: DeviceFacts | None  # None: the CPU
    compute_dtype: ComputeDtype

    @property
    def uuid(self) -> str:
        """The card's; "" on the CPU."""
        return "" if self.facts is None else self.facts.uuid

    @property
    def name(self) -> str:
        """What the stage is told: "cpu" or "cuda:N"."""
        return "cpu" if self.facts is None else self.facts.key


def choose_devices(config: Config, rig: Rig, notes: list[str]) -> tuple[StageDevice, ...]:
    """Return every stage's device and type; says in notes what "auto" became.

    Raises:
        BindingError: A device that the rig does not have.
        ConfigError: A type that a stage's device does not compute in.
    """
    chosen = []
    for stage, settings in enumerate(config.stage):
        facts = _device(stage, settings, rig)
        dtype = _compute_dtype(stage, config, facts, notes)
        chosen.append(StageDevice(facts=facts, compute_dtype=dtype))
    wants_any = any(settings.device == "auto" for settings in config.stage)
    if wants_any and not rig.devices and rig.no_devices:
        notes.append(f"stages run on the CPU: {rig.no_devices}")
    for stage, device in enumerate(chosen):
        if device.facts is not None:
            facts = device.facts
            notes.append(
                f"stage {stage}: {facts.key}, {facts.name}, {device.compute_dtype}, {link_text(facts)}"
            )
    return tuple(chosen)


def device_budgets(config: Config, devices: Sequence[StageDevice], notes: list[str]) -> list[int | None]:
    """Return each stage's budget in bytes; None: a CPU stage that names none.

    A stage on a GPU that names no budget gets an even part of what the card has free, after what it leaves
    to others, the budgets named by stages on the same card, and every process's own room.

    Raises:
        PlanError: A card does not have what its stages name.
    """
    budgets = [_bytes(settings.vram_budget_mib) for settings in config.stage]
    cards = {device.facts.uuid: device.facts for device in devices if device.facts is not None}
    for uuid, facts in cards.items():
        here = [
            n for n, device in enumerate(devices) if device.facts is not None and device.facts.uuid == uuid
        ]
        reserve = max(_bytes(config.stage[stage].vram_reserve_mib) or 0 for stage in here)
        named = sum(budgets[stage] or 0 for stage in here)
        left = facts.free_bytes - reserve - len(here) * PROCESS_BYTES - named
        without = [stage for stage in here if budgets[stage] is None]
        if left < 0:
            stages = ", ".join(map(str, here))
            message = (
                f"{facts.key}: stages {stages} need {(facts.free_bytes - left) / MIB:.0f} MiB, "
                f"{facts.free_bytes / MIB:.0f} MiB are free; that is {named / MIB:.0f} MiB of budgets, "
                f"{len(here)} x {PROCESS_BYTES // MIB} MiB of contexts and {reserve / MIB:.0f} MiB of "
                "reserve; lower stage.N.vram_budget_mib or vram_reserve_mib, or free the card"
            )
            raise PlanError(message)
        for stage in without:
            budgets[stage] = left // len(without)
            notes.append(
                f"stage {stage}: no vram_budget_mib; {left // len(without) // MIB} MiB of "
                f"{facts.free_bytes // MIB} MiB free on {facts.key}"
            )
    return budgets


def check_planned_devices(
    plan: LaunchPlan, devices: Sequence[DeviceFacts], *, reason: str, name: str
) -> None:
    """Check that the cards of a plan which was read back are here, under the same numbers.

    Args:
        plan: The plan.
        devices: The usable cards of this host.
        reason: Why there are none.
        name: The plan's file, for errors.

    Raises:
        BindingError: One is not.
    """
    here = {(device.key, device.uuid) for device in devices}
    for stage in plan.stages:
        if stage.device_key and (stage.device, stage.device_key) not in here:
            there = ", ".join(f"{key} ({uuid})" for key, uuid in sorted(here)) or reason
            message = (
                f"{name}: stage {stage.stage} is planned for {stage.device} ({stage.device_key}), but there "
                f"are {there}; make the plan again"
            )
            raise BindingError(message)


def _device(stage: int, settings: StageConfig, rig: Rig) -> DeviceFacts | None:
    asked = settings.device
    if asked == "cpu":
        return None
    if asked == "auto":
        return rig.devices[stage % len(rig.devices)] if rig.devices else None
    word = asked.removeprefix("cuda:")
    if word.isdecimal():
        found = [device for device in rig.devices if device.device == int(word)]
    else:
        found = [device for device in rig.devices if device.uuid.lower().startswith(word.lower())]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{device.key} ({device.uuid})" for device in rig.devices)
    what = f"{len(found)} GPUs match" if found else "there is no such GPU"
    there = f"there are {known}" if known else rig.no_devices or "there is none"
    message = f"stage.{stage}.device: {asked}: {what}; {there}"
    raise BindingError(message)


def _compute_dtype(stage: int, config: Config, facts: DeviceFacts | None, notes: list[str]) -> ComputeDtype:
    asked = config.model.compute_dtype
    if asked == "fp16":
        message = 'model.compute_dtype: "fp16" is not available in this version; use "bf16" or "fp32"'
        raise ConfigError(message)
    if facts is None:
        if asked == "bf16" and all(one.device == "cpu" for one in config.stage):
            message = f'model.compute_dtype: stage {stage} is on the CPU, which computes in fp32, not "bf16"'
            raise ConfigError(message)
        if asked == "bf16":
            notes.append(f"stage {stage}: computes in fp32 on the CPU, not in bf16 (model.compute_dtype)")
        return "fp32"
    if asked == "auto":
        # Cards before compute capability 8.0 have no bf16 products; emulated ones are slower than fp32.
        return "bf16" if takes_bf16(facts) else "fp32"
    return asked


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB
