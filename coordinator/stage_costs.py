"""What the cost model needs of one stage: work from the model's shapes, rates from rig or device. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from strata_coord.coordinator.device_facts import device_rates
from strata_coord.coordinator.plan import StageCosts

if TYPE_CHECKING:
    from strata_coord.coordinator.budget import StageShape
    from strata_coord.coordinator.device_choice import StageDevice
    from strata_coord.coordinator.planned_model import PlannedModel
    from strata_coord.coordinator.rig import Rates, Rig
    from strata_coord.ipc.messages import Route

__all__ = ["stage_costs"]


def stage_costs(
    model: PlannedModel,
    rig: Rig,
    shape: StageShape,
    *,
    device: StageDevice,
    route: Route | None,
    threads: int,
    arena_bytes: int,
    file_bytes: int,
) -> StageCosts:
    """Return the costs of a stage.

    Args:
        model: Shapes of its tensors.
        rig: Rates of the host.
        shape: The stage.
        device: Its device; a GPU has rates of its own.
        route: Of its rows to the next stage.
        threads: Of a CPU stage, whose rates are those of one thread.
        arena_bytes: Streamed experts that lie in the arena.
        file_bytes: Streamed experts that are read each time.
    """
    geometry = model.geometry
    rates, threads = _rates(rig, device, threads)
    layers = range(shape.first_layer, shape.last_layer)
    dense = sum(
        math.prod(tensor.shape)
        for layer in layers
        for tensor in model.layer_tensors(layer)
        if len(tensor.shape) > 1
    )
    expert = sum(math.prod(tensor.shape) for layer in layers for tensor in model.expert_tensors(layer))
    per_token = geometry.experts.experts_per_token / geometry.experts.num_experts
    attention_layers = sum(not geometry.recurrent_layers[layer] for layer in layers)
    attention = geometry.attention
    output = math.prod(model.output().shape) if shape.is_last else 0
    # On the card rows are read and written once, at the rate at which expanded weights are written.
    hand_off = rates.expand_bytes_per_s if route == "device" else rates.copy_bytes_per_s
    return StageCosts(
        num_layers=len(layers),
        dense_flops_per_row=2.0 * dense,
        expert_flops_per_row=2.0 * expert * per_token,
        attention_flops_per_pair=4.0 * attention.num_heads * attention.head_dim * attention_layers,
        dense_expanded_bytes=dense * shape.compute_bytes,
        expert_expanded_bytes=expert * shape.compute_bytes,
        head_flops=2.0 * output,
        head_expanded_bytes=output * shape.compute_bytes,
        arena_bytes=arena_bytes,
        file_bytes=file_bytes,
        copy_bytes_per_s=rates.copy_bytes_per_s.value,
        drive_bytes_per_s=rates.drive_bytes_per_s.value,
        hand_off_bytes_per_s=hand_off.value,
        expand_bytes_per_s=rates.expand_bytes_per_s.value * threads,
        flops_per_s=rates.flops_per_s.value * threads,
        attention_flops_per_s=rates.attention_flops_per_s.value * threads,
        call_s=rates.call_s.value,
    )


def _rates(rig: Rig, device: StageDevice, threads: int) -> tuple[Rates, int]:
    if device.facts is None:
        return rig.rates, threads
    rates = device_rates(device.facts, device.compute_dtype)
    return replace(rates, drive_bytes_per_s=rig.rates.drive_bytes_per_s), 1
