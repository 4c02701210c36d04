"""The stages of a launch once its sizes are fixed: experts by tier, binding, threads, costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.budget import (
    MIB,
    StageShape,
    blob_bytes,
    divide_expert_room,
    min_window_slots,
    window_slot_bytes,
)
from strata_coord.coordinator.plan import BudgetLine, StagePlan
from strata_coord.coordinator.stage_costs import stage_costs
from strata_coord.coordinator.state_sizes import FP32_BYTES
from strata_coord.ipc.errors import BindingError, PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata_coord.coordinator.budget import Sizes
    from strata_coord.coordinator.config import Config, StageConfig
    from strata_coord.coordinator.device_choice import StageDevice
    from strata_coord.coordinator.planned_model import PlannedModel
    from strata_coord.coordinator.rig import NodeFacts, Rig
    from strata_coord.ipc.messages import Route

__all__ = ["HostShare", "StageRequest", "divide_host", "plan_stages"]

# Share of the available host memory that budgets and arenas may take together; the rest is for the page
# cache, the interpreters (about 0.4 GiB a stage with torch) and other programs.
HOST_SHARE = 0.8
# Share of it that CPU stages without a budget get; the arenas have the rest.
DEFAULT_BUDGET_SHARE = 0.6
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One stage as the configuration asks for it."""

    shape: StageShape
    settings: StageConfig
    device: StageDevice
    budget_bytes: int | None  # None: what the host can spare
    route: Route | None  # of the rows to the next stage

    @property
    def is_on_host(self) -> bool:
        """Whether the budget is host memory."""
        return self.device.facts is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """How the host's memory is divided before any stage is planned."""

    usable_bytes: int
    default_budget_bytes: int  # of a stage without vram_budget_mib


def divide_host(rig: Rig, requests: Sequence[StageRequest], notes: list[str]) -> HostShare:
    """Return what CPU stages may take of the host's memory."""
    usable = int(rig.available_bytes * HOST_SHARE)
    named = sum(request.budget_bytes or 0 for request in requests if request.is_on_host)
    without = [request.shape.stage for request in requests if request.budget_bytes is None]
    default = max(0, int(usable * DEFAULT_BUDGET_SHARE) - named) // max(1, len(without))
    if without:
        stages = ", ".join(map(str, without))
        notes.append(
            f"stage {stages}: no vram_budget_mib; a CPU stage may take {default // MIB} MiB of host memory"
        )
    return HostShare(usable_bytes=usable, default_budget_bytes=default)


def plan_stages(
    model: PlannedModel,
    rig: Rig,
    config: Config,
    requests: Sequence[StageRequest],
    host: HostShare,
    sizes: Sizes,
    lines: Sequence[tuple[BudgetLine, ...]],
    notes: list[str],
) -> tuple[StagePlan, ...]:
    """Return the stages; lines are each stage's claims that come before the window.

    Raises:
        BindingError: A NUMA node that the rig does not have.
        PlanError: The host's memory does not hold budgets and arenas.
    """
    drafts = [
        _draft(model, request, host, config, fixed) for request, fixed in zip(requests, lines, strict=True)
    ]
    slots = sum(_host_slot_bytes(model, request, sizes) for request in requests)
    arenas = _divide_arena(config, requests, host, drafts, slots, notes)
    nodes = [_node(rig, request, len(requests)) for request in requests]
    plans = []
    for request, draft, arena, node in zip(requests, drafts, arenas, nodes, strict=True):
        threads = _threads(request, node, nodes)
        in_arena, arena_bytes = draft.ranking.take(draft.num_resident, arena)
        resident, _ = draft.ranking.take(0, draft.resident_bytes)
        shape = request.shape
        plans.append(
            StagePlan(
                stage=shape.stage,
                first_layer=shape.first_layer,
                last_layer=shape.last_layer,
                device=request.device.name,
                device_key=request.device.uuid,
                route=request.route,
                compute_dtype=request.device.compute_dtype,
                upload_group=shape.upload_group,
                numa_node=_bound_node(rig, request, node, notes),
                cpu_threads=threads,
                budget_bytes=draft.budget_bytes,
                lines=draft.lines,
                resident_experts=resident,
                arena_experts=in_arena,
                window_slots=draft.window_slots,
                expert_group_rows=sizes.expert_group_rows,
                resident_bytes=draft.resident_bytes,
                streamed_bytes=draft.streamed_bytes,
                arena_bytes=arena_bytes,
                costs=stage_costs(
                    model,
                    rig,
                    shape,
                    device=request.device,
                    route=request.route,
                    threads=threads,
                    arena_bytes=arena_bytes,
                    file_bytes=draft.streamed_bytes - arena_bytes,
                ),
            )
        )
    return tuple(plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranking:
    """The experts of a stage in the order in which they become resident, then move into the arena.

    Neutral, since no profile is known: even over the layers, lowest ids first.
    """

    first_layer: int
    num_layers: int
    experts: tuple[tuple[int, int], ...]  # layer, expert
    num_bytes: tuple[int, ...]  # room of each

    def take(self, start: int, room_bytes: int) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Return, per layer, the experts from start on that fit in room_bytes, and their bytes."""
        taken: list[list[int]] = [[] for _ in range(self.num_layers)]
        used = 0
        for (layer, expert), size in zip(self.experts[start:], self.num_bytes[start:], strict=True):
            if used + size > room_bytes:
                break
            used += size
            taken[layer - self.first_layer].append(expert)
        return tuple(map(tuple, taken)), used


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    budget_bytes: int
    lines: tuple[BudgetLine, ...]
    taken_bytes: int
    ranking: _Ranking
    window_slots: int
    num_resident: int
    resident_bytes: int
    streamed_bytes: int


def _draft(
    model: PlannedModel,
    request: StageRequest,
    host: HostShare,
    config: Config,
    fixed: tuple[BudgetLine, ...],
) -> _Draft:
    shape = request.shape
    ranking = _rank(model, shape)
    slot = window_slot_bytes(model, shape)
    claimed = sum(line.num_bytes for line in fixed)
    budget = request.budget_bytes
    if budget is None:
        # Enough for everything is enough: what is not claimed stays with the host.
        budget = min(
            host.default_budget_bytes, claimed + sum(ranking.num_bytes) + min_window_slots(shape) * slot
        )
    room = divide_expert_room(
        budget - claimed,
        ranked_bytes=ranking.num_bytes,
        ranked_layers=[layer for layer, _ in ranking.experts],
        num_experts=model.geometry.experts.num_experts,
        slot_bytes=slot,
        window_slots=_window_slots(config, shape, slot, budget - claimed),
        shape=shape,
    )
    resident = sum(ranking.num_bytes[: room.num_resident])
    window = room.window_slots * slot
    free = budget - claimed - window - resident
    num_experts = len(ranking.experts)
    lines = (
        *fixed,
        BudgetLine(name="window", num_bytes=window, why=f"{room.window_slots} slots x {slot} B"),
        BudgetLine(
            name="expert cache",
            num_bytes=resident,
            why=f"{room.num_resident} of {num_experts} experts resident",
        ),
        BudgetLine(name="free", num_bytes=free, why="left over"),
    )
    return _Draft(
        budget_bytes=budget,
        lines=lines,
        taken_bytes=budget - free,
        ranking=ranking,
        window_slots=room.window_slots,
        num_resident=room.num_resident,
        resident_bytes=resident,
        streamed_bytes=sum(ranking.num_bytes[room.num_resident :]),
    )


def _rank(model: PlannedModel, shape: StageShape) -> _Ranking:
    layers = range(shape.first_layer, shape.last_layer)
    counts = {layer: model.geometry.experts.count(layer) for layer in layers}
    experts = [
        (layer, expert)
        for expert in range(model.geometry.experts.num_experts)
        for layer in layers
        if expert < counts[layer]
    ]
    sizes = {layer: blob_bytes(model, layer) for layer in layers}
    return _Ranking(
        first_layer=shape.first_layer,
        num_layers=len(layers),
        experts=tuple(experts),
        num_bytes=tuple(sizes[layer] for layer, _ in experts),
    )


def _window_slots(config: Config, shape: StageShape, slot_bytes: int, room_bytes: int) -> int | None:
    if config.memory.window_mib == "auto" or slot_bytes == 0:
        return None
    asked = config.memory.window_mib * MIB // slot_bytes
    slots = max(min_window_slots(shape), min(asked, room_bytes // slot_bytes))
    return slots // shape.upload_group * shape.upload_group


def _host_slot_bytes(model: PlannedModel, request: StageRequest, sizes: Sizes) -> int:
    """Slots of an incoming link that lie in host memory although the stage's budget is a GPU's."""
    if request.is_on_host or request.shape.is_first or request.shape.slots_in_budget:
        return 0
    return sizes.hand_off_slots * sizes.slot_rows * model.geometry.row_width * FP32_BYTES


def _divide_arena(
    config: Config,
    requests: Sequence[StageRequest],
    host: HostShare,
    drafts: Sequence[_Draft],
    slot_bytes: int,
    notes: list[str],
) -> list[int]:
    """Return each stage's arena room: its own setting, or its share of the total by streamed bytes."""
    on_host = [
        draft.taken_bytes for request, draft in zip(requests, drafts, strict=True) if request.is_on_host
    ]
    taken = sum(on_host) + slot_bytes
    if taken > host.usable_bytes:
        message = (
            f"host memory: the stages need {taken / MIB:.0f} MiB, {host.usable_bytes / MIB:.0f} MiB are "
            "free; lower stage.N.vram_budget_mib, prefill.reserved_tokens or model.context_tokens"
        )
        raise PlanError(message)
    streamed = [draft.streamed_bytes for draft in drafts]
    left = host.usable_bytes - taken
    named = [
        None if request.settings.arena_gib is None else int(request.settings.arena_gib * GIB)
        for request in requests
    ]
    if config.memory.arena_gib == "auto":
        total = min(sum(streamed), left)
        own = sum(min(n, s) for n, s in zip(named, streamed, strict=True) if n is not None)
        shared = max(0, total - own)
    else:
        shared = int(config.memory.arena_gib * GIB)
    open_bytes = sum(s for n, s in zip(named, streamed, strict=True) if n is None)
    rooms = [
        min(s, n) if n is not None else min(s, shared * s // max(1, open_bytes))
        for n, s in zip(named, streamed, strict=True)
    ]
    if sum(rooms) > left:
        message = (
            f"host memory: the arenas need {sum(rooms) / MIB:.0f} MiB, {left / MIB:.0f} MiB are free; "
            "lower memory.arena_gib"
        )
        raise PlanError(message)
    if sum(rooms) < sum(streamed):
        notes.append(
            f"arena: {sum(rooms) / MIB:.1f} MiB for {sum(streamed) / MIB:.1f} MiB of streamed experts; "
            "the rest is read from the file each time it is needed"
        )
    return rooms


def _node(rig: Rig, request: StageRequest, num_stages: int) -> NodeFacts:
    """Return the stage's node: the one named, else its GPU's, else stages go over the nodes with CPUs."""
    asked, stage = request.settings.numa_node, request.shape.stage
    if isinstance(asked, int):
        for node in rig.nodes:
            if node.node == asked and node.cpus:
                return node
        known = ", ".join(str(node.node) for node in rig.nodes if node.cpus)
        message = f"stage.{stage}.numa_node: node {asked} is not here or has no CPU to use; there are {known}"
        raise BindingError(message)
    usable = [node for node in rig.nodes if node.cpus]
    own = [node for node in usable if request.device.facts and node.node == request.device.facts.numa_node]
    return own[0] if own else usable[stage * len(usable) // num_stages]


def _bound_node(rig: Rig, request: StageRequest, node: NodeFacts, notes: list[str]) -> int:
    """Return the node to bind to; -1 where binding is off, or could be to the far side of a GPU's link."""
    facts = request.device.facts
    if request.settings.numa_node == "off":
        return -1
    if request.settings.numa_node == "auto" and facts is not None and node.node != facts.numa_node:
        if len([one for one in rig.nodes if one.cpus]) == 1:
            return node.node
        notes.append(
            f"stage {request.shape.stage}: not bound, since the NUMA node of {facts.key} is not known or "
            "has no CPU to use; stage.N.numa_node names one"
        )
        return -1
    return node.node


def _threads(request: StageRequest, node: NodeFacts, nodes: Sequence[NodeFacts]) -> int:
    """Return the setting, else an even part of the node's CPUs: two stages must not fight over one core."""
    if request.settings.cpu_threads != "auto":
        return request.settings.cpu_threads
    sharing = sum(other.node == node.node for other in nodes)
    return max(1, len(node.cpus) // sharing)
