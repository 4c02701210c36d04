"""Model, rig and configuration -> LaunchPlan; LaunchPlan and prompt length -> PromptPlan. Pure.

plan_launch fixes what stages allocate: the largest S whose rows fit every stage beside everything else, then
the window, then as many resident experts as are left room for. plan_prompt (prompt_planner.py) chooses how
one prompt is read within that. assignments.py turns a plan into what a stage is told.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strata_coord.coordinator.assignments import expert_bytes_once, stage_assignment
from strata_coord.coordinator.budget import (
    MIB,
    Shortfall,
    Sizes,
    StageShape,
    fixed_lines,
    min_window_slots,
    shortfall,
    upload_group,
    window_slot_bytes,
)
from strata_coord.coordinator.config_checks import GRID_TOKENS
from strata_coord.coordinator.device_choice import choose_devices, device_budgets
from strata_coord.coordinator.plan import PLAN_VERSION, BudgetLine, LaunchPlan
from strata_coord.coordinator.prompt_planner import STREAM_ALL_SHARE, plan_prompt, upload_policy
from strata_coord.coordinator.routes import choose_route, route_note
from strata_coord.coordinator.stage_planner import HostShare, StageRequest, divide_host, plan_stages
from strata_coord.coordinator.state_sizes import FP32_BYTES
from strata_coord.coordinator.super_chunks import round_up_to_grid
from strata_coord.ipc.assignment import KV_PAGE_TOKENS
from strata_coord.ipc.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from strata_coord.coordinator.config import Config
    from strata_coord.coordinator.device_choice import StageDevice
    from strata_coord.coordinator.planned_model import PlannedModel
    from strata_coord.coordinator.rig import Rig
    from strata_coord.ipc.assignment import KvDtype
    from strata_coord.ipc.messages import Route

__all__ = ["expert_bytes_once", "plan_launch", "plan_prompt", "stage_assignment", "upload_policy"]

# Longest context without a setting: room for keys and values is taken at the start, so a model's own limit of
# 262,144 tokens would take memory that few prompts need.
DEFAULT_CONTEXT_TOKENS = 32768
# Rows with permanent room without a setting.
DEFAULT_RESERVED_TOKENS = 16384
# Rows of a dense kernel call on the CPU: larger calls gain nothing there and cost scratch.
DEFAULT_SUB_CHUNK_TOKENS = 512
# On a GPU: matrix products reach the card's rate with some thousand rows.
DEVICE_SUB_CHUNK_TOKENS = 4096
# Two slots are enough: one is filled while the other is copied out.
DEFAULT_HAND_OFF_SLOTS = 2
# Rows of one expert multiplication; an expert with more is split.
DEFAULT_EXPERT_GROUP_ROWS = 1024
# On a GPU, where the experts of one upload are multiplied by one call.
DEVICE_EXPERT_GROUP_ROWS = 8192
# Layers whose streamed experts a GPU's window holds where there is room.
DEVICE_LAYERS_AHEAD = 2
_BF16_BYTES = 2
# A larger c is preferred while it leaves room for at least this share of the largest possible S.
SUPER_CHUNK_SHARE = 0.75


def plan_launch(model: PlannedModel, rig: Rig, config: Config) -> LaunchPlan:
    """Return every size of a launch.

    Raises:
        ConfigError: The configuration asks for what the model does not have.
        BindingError: A device or a NUMA node that the rig does not have.
        PlanError: Nothing fits; names stage, item, need, have and the setting that moves it.
    """
    notes: list[str] = []
    devices = choose_devices(config, rig, notes)
    routes = _routes(devices, notes)
    shapes = _stage_shapes(model, config, devices, routes)
    context = _context_tokens(model, config, notes)
    budgets = device_budgets(config, devices, notes)
    requests = tuple(
        StageRequest(shape=shape, settings=settings, device=device, budget_bytes=budget, route=route)
        for shape, settings, device, budget, route in zip(
            shapes, config.stage, devices, budgets, (*routes, None), strict=True
        )
    )
    host = divide_host(rig, requests, notes)
    sizes, lines = _fit_sizes(model, config, requests, host, context, notes)
    stages = plan_stages(model, rig, config, requests, host, sizes, lines, notes)
    return LaunchPlan(
        version=PLAN_VERSION,
        architecture=model.geometry.architecture,
        num_layers=model.geometry.num_layers,
        num_experts=model.geometry.experts.num_experts,
        experts_per_token=model.geometry.experts.experts_per_token,
        boundaries=tuple(shape.first_layer for shape in shapes[1:]),
        stages=stages,
        super_chunk_tokens=sizes.super_chunk_tokens,
        sub_chunk_tokens=sizes.sub_chunk_tokens,
        slot_rows=sizes.slot_rows,
        hand_off_slots=sizes.hand_off_slots,
        row_bytes=model.geometry.row_width * FP32_BYTES,
        kv_dtype=sizes.kv_dtype,
        kv_pool_tokens=sizes.kv_pool_tokens,
        max_sequences=sizes.max_sequences,
        context_tokens=context,
        upload=config.prefill.upload,
        stream_all_share=STREAM_ALL_SHARE,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What the user asked for; None: up to the plan."""

    most_rows: int
    sub_chunk_tokens: int | None
    slot_rows: int | None
    hand_off_slots: int
    kv_dtype: KvDtype
    kv_pool_tokens: int
    max_sequences: int
    context_tokens: int
    margin_bytes: int
    default_sub_chunk_tokens: int
    expert_group_rows: int

    def sizes(self, super_chunk_tokens: int, sub_chunk_tokens: int) -> Sizes:
        """Return the sizes for one S and c."""
        # The ring holds a whole super-chunk where it can, so that a stage may go on while the next one works.
        rows = -(-super_chunk_tokens // self.hand_off_slots) if self.slot_rows is None else self.slot_rows
        most = super_chunk_tokens // sub_chunk_tokens
        num_sub_chunks = max(1, min(-(-rows // sub_chunk_tokens), most))
        return Sizes(
            super_chunk_tokens=super_chunk_tokens,
            sub_chunk_tokens=sub_chunk_tokens,
            slot_rows=num_sub_chunks * sub_chunk_tokens,
            hand_off_slots=self.hand_off_slots,
            expert_group_rows=min(self.expert_group_rows, super_chunk_tokens),
            kv_dtype=self.kv_dtype,
            kv_pool_tokens=self.kv_pool_tokens,
            max_sequences=self.max_sequences,
            context_tokens=self.context_tokens,
            margin_bytes=self.margin_bytes,
        )


def _routes(devices: tuple[StageDevice, ...], notes: list[str]) -> tuple[Route, ...]:
    """Return the route of every link; only those between GPUs are worth a note."""
    routes: list[Route] = []
    for link, (sender, receiver) in enumerate(itertools.pairwise(devices)):
        peers = None if sender.facts is None else [f"cuda:{peer}" for peer in sender.facts.peers]
        choice = choose_route(sender.name, receiver.name, peers=peers)
        routes.append(choice.route)
        if sender.facts is not None or receiver.facts is not None:
            notes.append(route_note(link, choice))
    return tuple(routes)


def _stage_shapes(
    model: PlannedModel, config: Config, devices: tuple[StageDevice, ...], routes: tuple[Route, ...]
) -> tuple[StageShape, ...]:
    boundaries = config.split.boundaries
    if boundaries == "auto":
        message = 'split.boundaries: "auto" is not available in this version'
        raise ConfigError(message)
    num_layers = model.geometry.num_layers
    if boundaries and boundaries[-1] >= num_layers:
        message = f"split.boundaries: layer {boundaries[-1]} is past the model's last layer, {num_layers - 1}"
        raise ConfigError(message)
    edges = [0, *boundaries, num_layers]
    window = None if config.memory.window_mib == "auto" else config.memory.window_mib * MIB
    shapes = []
    for stage, (first, last) in enumerate(itertools.pairwise(edges)):
        shape = StageShape(
            stage=stage,
            first_layer=first,
            last_layer=last,
            is_first=stage == 0,
            is_last=last == num_layers,
        )
        device = devices[stage]
        if device.facts is not None:
            shape = replace(
                shape,
                compute_bytes=_BF16_BYTES if device.compute_dtype == "bf16" else FP32_BYTES,
                upload_group=upload_group(model, first, last, window_bytes=window),
                layers_ahead=DEVICE_LAYERS_AHEAD,
                slots_in_budget=stage > 0 and routes[stage - 1] == "device",
            )
        shapes.append(shape)
    return tuple(shapes)


def _context_tokens(model: PlannedModel, config: Config, notes: list[str]) -> int:
    limit = model.geometry.context_tokens
    if config.model.context_tokens == "auto":
        chosen = min(limit, DEFAULT_CONTEXT_TOKENS)
        notes.append(f"context: {chosen} tokens of the model's {limit}; model.context_tokens changes it")
        return chosen
    if config.model.context_tokens > limit:
        message = f"model.context_tokens: {config.model.context_tokens} is above the model's limit, {limit}"
        raise ConfigError(message)
    return config.model.context_tokens


def _wanted(config: Config, context: int, *, has_gpu: bool) -> _Wanted:
    prefill, kv = config.prefill, config.kv
    most = (
        min(DEFAULT_RESERVED_TOKENS, context)
        if prefill.reserved_tokens == "auto"
        else prefill.reserved_tokens
    )
    if prefill.super_chunk_tokens != "auto":
        most = min(most, prefill.super_chunk_tokens)
    pool = context if kv.pool_tokens == "auto" else kv.pool_tokens
    if pool < context:
        message = (
            f"kv.pool_tokens: {pool} cannot hold one sequence of {context} tokens (model.context_tokens)"
        )
        raise ConfigError(message)
    return _Wanted(
        # More rows than a context holds would be room for nothing.
        most_rows=min(round_up_to_grid(most), round_up_to_grid(context)),
        sub_chunk_tokens=None if prefill.sub_chunk_tokens == "auto" else prefill.sub_chunk_tokens,
        slot_rows=None if prefill.slot_rows == "auto" else prefill.slot_rows,
        hand_off_slots=DEFAULT_HAND_OFF_SLOTS if prefill.hand_off_slots == "auto" else prefill.hand_off_slots,
        kv_dtype=kv.dtype,
        kv_pool_tokens=-(-pool // KV_PAGE_TOKENS) * KV_PAGE_TOKENS,
        max_sequences=kv.max_sequences,
        context_tokens=context,
        margin_bytes=_mib(config.memory.vram_margin_mib) or 0,
        default_sub_chunk_tokens=DEVICE_SUB_CHUNK_TOKENS if has_gpu else DEFAULT_SUB_CHUNK_TOKENS,
        expert_group_rows=DEVICE_EXPERT_GROUP_ROWS if has_gpu else DEFAULT_EXPERT_GROUP_ROWS,
    )


def _fit_sizes(
    model: PlannedModel,
    config: Config,
    requests: tuple[StageRequest, ...],
    host: HostShare,
    context: int,
    notes: list[str],
) -> tuple[Sizes, tuple[tuple[BudgetLine, ...], ...]]:
    """Return the S and c that fit every stage, and the claims of every stage at these sizes."""
    wanted = _wanted(config, context, has_gpu=any(request.device.facts is not None for request in requests))
    found = [_largest_fit(model, requests, host, wanted, sub) for sub in _sub_chunk_choices(wanted)]
    most = max(blocks for blocks, _ in found)
    if not most:
        # The last choice is the smallest c: what is short there is short everywhere.
        raise _shortage(found[-1][1]).error()
    # A small c costs calls, a small S costs reading the experts again: c gives way only where S gains much.
    enough = [number for number, (blocks, _) in enumerate(found) if blocks >= most * SUPER_CHUNK_SHARE]
    sub = _sub_chunk_choices(wanted)[enough[0]]
    blocks, missing = found[enough[0]]
    sizes = wanted.sizes(blocks * GRID_TOKENS, _sub(sub, blocks))
    notes += _given_up(wanted, sizes)
    if sizes.super_chunk_tokens < wanted.most_rows:
        worst = _shortage(missing)
        notes.append(
            f"super-chunks: {sizes.super_chunk_tokens} tokens where {wanted.most_rows} were wanted: at "
            f"{sizes.super_chunk_tokens + GRID_TOKENS} tokens stage {worst.stage}, {worst.item}, needs "
            f"{worst.need_bytes / MIB:.1f} MiB of {worst.have_bytes / MIB:.1f} MiB left"
        )
    return sizes, tuple(fixed_lines(model, request.shape, sizes) for request in requests)


def _largest_fit(
    model: PlannedModel,
    requests: tuple[StageRequest, ...],
    host: HostShare,
    wanted: _Wanted,
    sub: int,
) -> tuple[int, Shortfall | None]:
    """Return the largest S that fits, in grid blocks, and what is short one block above it."""
    # All claims grow with S, so the largest that fits is found by halving the interval.
    low, high, best = 1, wanted.most_rows // GRID_TOKENS, 0
    missing: Shortfall | None = None
    while low <= high:
        middle = (low + high) // 2
        sizes = wanted.sizes(middle * GRID_TOKENS, _sub(sub, middle))
        found = _first_shortfall(model, requests, host, sizes)
        if found is None:
            best, low = middle, middle + 1
        else:
            missing, high = found, middle - 1
    return best, missing


def _shortage(missing: Shortfall | None) -> Shortfall:
    if missing is None:
        message = "a size below the wanted one was chosen although nothing was short"
        raise InvariantError(message)
    return missing


def _given_up(wanted: _Wanted, sizes: Sizes) -> list[str]:
    """Return a note for each size that is smaller than asked for."""
    notes = []
    for name, asked, got in (
        (
            "sub_chunk_tokens",
            wanted.sub_chunk_tokens or wanted.default_sub_chunk_tokens,
            sizes.sub_chunk_tokens,
        ),
        ("slot_rows", wanted.slot_rows or 0, sizes.slot_rows),
    ):
        if got < asked:
            notes.append(
                f"{name}: {got} in place of {asked}, beside super-chunks of {sizes.super_chunk_tokens}"
            )
    return notes


def _sub(sub_chunk_tokens: int, blocks: int) -> int:
    return min(sub_chunk_tokens, blocks * GRID_TOKENS)


def _sub_chunk_choices(wanted: _Wanted) -> list[int]:
    """The user's c alone, else the default and its halves, largest first."""
    if wanted.sub_chunk_tokens is not None:
        return [wanted.sub_chunk_tokens]
    choices = []
    sub = wanted.default_sub_chunk_tokens
    while sub >= GRID_TOKENS:
        if wanted.slot_rows is None or wanted.slot_rows % sub == 0:
            choices.append(sub)
        sub //= 2
    return choices


def _first_shortfall(
    model: PlannedModel, requests: tuple[StageRequest, ...], host: HostShare, sizes: Sizes
) -> Shortfall | None:
    for request in requests:
        lines = fixed_lines(model, request.shape, sizes)
        budget = request.budget_bytes if request.budget_bytes is not None else host.default_budget_bytes
        window = min_window_slots(request.shape) * window_slot_bytes(model, request.shape)
        found = shortfall(lines, stage=request.shape.stage, budget_bytes=budget, window_bytes=window)
        if found is not None:
            return found
    return None


def _mib(value: int | None) -> int | None:
    return None if value is None else value * MIB
