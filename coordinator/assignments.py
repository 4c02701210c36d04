"""A plan -> what each stage is told, and the bytes that one pass over the experts costs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_coord.ipc.assignment import StageAssignment

if TYPE_CHECKING:
    from strata_coord.coordinator.plan import LaunchPlan
    from strata_coord.coordinator.planned_model import PlannedModel

__all__ = ["expert_bytes_once", "stage_assignment"]


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
