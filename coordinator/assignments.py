"""A plan -> what each stage is told, and the bytes that one pass over the experts costs. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from strata_coord.coordinator.state_sizes import FP32_BYTES
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from strata_coord.coordinator.plan import LaunchPlan
    from strata_coord.coordinator.planned_model import PlannedModel

__all__ = ["check_plan_fits", "expert_bytes_once", "stage_assignment"]


def stage_assignment(launch: LaunchPlan, stage: int, model: PlannedModel) -> StageAssignment:
    """Return one stage's work: its own layers' extents, nothing else, and its sizes."""
    plan = launch.stages[stage]
    is_last = stage == len(launch.stages) - 1
    return StageAssignment(
        stage=stage,
        num_stages=len(launch.stages),
        first_layer=plan.first_layer,
        last_layer=plan.last_layer,
        geometry=model.geometry,
        files=model.files,
        tensors=tuple(
            model.stage_tensors(plan.first_layer, plan.last_layer, is_first=stage == 0, is_last=is_last)
        ),
        device=plan.device,
        numa_node=plan.numa_node,
        cpu_threads=plan.cpu_threads,
        super_chunk_tokens=launch.super_chunk_tokens,
        sub_chunk_tokens=launch.sub_chunk_tokens,
        expert_group_rows=plan.expert_group_rows,
        resident_experts=plan.resident_experts,
        arena_experts=plan.arena_experts,
        window_slots=plan.window_slots,
        kv_dtype=launch.kv_dtype,
        kv_pool_tokens=launch.kv_pool_tokens,
        max_sequences=launch.max_sequences,
        context_tokens=launch.context_tokens,
        compute_dtype=plan.compute_dtype,
        upload_group=plan.upload_group,
    )


def expert_bytes_once(launch: LaunchPlan, model: PlannedModel) -> int:
    """Return the bytes of touching every non-resident expert once, from extents and residency alone."""
    num_experts = model.geometry.experts.num_experts
    total = 0
    for plan in launch.stages:
        for number, resident in enumerate(plan.resident_experts):
            layer = plan.first_layer + number
            total += (num_experts - len(resident)) * model.expert_blob_bytes(layer)
    return total


def check_plan_fits(launch: LaunchPlan, model: PlannedModel, *, name: str) -> None:
    """Check that a plan which was read back is one of this model.

    Args:
        launch: The plan.
        model: The model it is about to run.
        name: The plan's file, for errors.

    Raises:
        ConfigError: It is of another model, or its stages do not cover the layers.
    """
    geometry = model.geometry
    for what, planned, found in (
        ("architecture", launch.architecture, geometry.architecture),
        ("layers", launch.num_layers, geometry.num_layers),
        ("experts", launch.num_experts, geometry.experts.num_experts),
        ("experts per token", launch.experts_per_token, geometry.experts.experts_per_token),
        ("row bytes", launch.row_bytes, geometry.row_width * FP32_BYTES),
    ):
        if planned != found:
            message = f"{name}: made for {what} {planned}, but the model has {found}; make the plan again"
            raise ConfigError(message)
    edges = [(stage.first_layer, stage.last_layer) for stage in launch.stages]
    if edges != list(itertools.pairwise([0, *launch.boundaries, launch.num_layers])):
        message = (
            f"{name}: stages {edges} do not fit boundaries {list(launch.boundaries)}; make the plan again"
        )
        raise ConfigError(message)
    for stage in launch.stages:
        num_layers = stage.last_layer - stage.first_layer
        for placed in (stage.resident_experts, stage.arena_experts):
            known = all(0 <= expert < launch.num_experts for experts in placed for expert in experts)
            if len(placed) != num_layers or not known:
                message = (
                    f"{name}: stage {stage.stage} must place experts 0-{launch.num_experts - 1} of "
                    f"{num_layers} layers, got {len(placed)} layers; make the plan again"
                )
                raise ConfigError(message)
