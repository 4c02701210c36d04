"""One stage's device memory by purpose, in bytes. Pure.

Claims are met in a fixed order and the expert cache comes last: dense weights, expansion scratch, pool of
keys and values, sequence state, head, attention scratch for c rows, expert scratch and buffers for S rows,
hand-off slots, residual rows, margin, window, expert cache, free. Rows are claimed before the cache, so that
a large cache can never take the room that a prompt needs. The lines sum to the budget, exactly.

Embedding rows and n-gram rows are looked up in host memory and are not part of the budget.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.plan import BudgetLine
from strata_coord.coordinator.state_sizes import (
    FP32_BYTES,
    attention_scratch_bytes,
    pool_bytes_per_token,
    state_bytes_per_sequence,
)
from strata_coord.ipc.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from strata_coord.coordinator.planned_model import PlannedModel
    from strata_coord.ipc.assignment import KvDtype

__all__ = [
    "MIB",
    "ExpertRoom",
    "Shortfall",
    "Sizes",
    "StageShape",
    "blob_bytes",
    "divide_expert_room",
    "fixed_lines",
    "min_window_slots",
    "shortfall",
    "upload_group",
    "window_slot_bytes",
]

MIB = 1 << 20
# One group of slots is multiplied while the next is filled.
MIN_WINDOW_GROUPS = 2
# Smaller copies do not reach the rate of a GPU's link.
UPLOAD_BYTES = 16 * MIB
# Blobs begin on this many bytes in cache, arena and window.
BLOB_ALIGNMENT_BYTES = 64
# The output matrix is expanded this many rows at a time.
HEAD_BLOCK_ROWS = 8192
_F32_TYPE = 0  # ggml type of tensors that need no expansion

_LEVERS = {
    "dense weights": "raise stage.{stage}.vram_budget_mib or give the stage fewer layers in split.boundaries",
    "expansion scratch": "raise stage.{stage}.vram_budget_mib",
    "key-value pool": "lower kv.pool_tokens or model.context_tokens, or use a smaller kv.dtype",
    "sequence state": "lower kv.max_sequences",
    "head": "raise stage.{stage}.vram_budget_mib",
    "attention scratch": "lower prefill.sub_chunk_tokens or model.context_tokens",
    "expert buffers": "lower prefill.reserved_tokens",
    "hand-off slots": "lower prefill.slot_rows or prefill.hand_off_slots",
    "residual rows": "lower prefill.reserved_tokens",
    "margin": "lower memory.vram_margin_mib",
    "window": "raise stage.{stage}.vram_budget_mib, or lower memory.window_mib where it is set",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which part of the model a stage has, and where. Layers are [first_layer, last_layer)."""

    stage: int
    first_layer: int
    last_layer: int
    is_first: bool
    is_last: bool
    compute_bytes: int = FP32_BYTES  # of an expanded weight
    upload_group: int = 1  # experts per copy into the window
    layers_ahead: int = 1  # whose streamed experts the window holds where there is room
    slots_in_budget: bool = True  # the slots of its incoming link lie in the memory that is budgeted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers that decide how much room prompts need."""

    super_chunk_tokens: int  # S
    sub_chunk_tokens: int  # c
    slot_rows: int
    hand_off_slots: int
    expert_group_rows: int
    kv_dtype: KvDtype
    kv_pool_tokens: int
    max_sequences: int
    context_tokens: int
    margin_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRoom:
    """How the room that is left is divided."""

    window_slots: int
    num_resident: int  # experts, in the order of the ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The first claim that a budget cannot meet; a value, since smaller sizes may be tried."""

    stage: int
    item: str
    need_bytes: int
    have_bytes: int

    def error(self) -> PlanError:
        """Return the error that names stage, item, need, have and the setting that moves it."""
        lever = _LEVERS[self.item].format(stage=self.stage)
        need, have = f"{self.need_bytes / MIB:.1f}", f"{max(self.have_bytes, 0) / MIB:.1f}"
        message = f"stage {self.stage}: {self.item} needs {need} MiB, {have} MiB are free; {lever}"
        return PlanError(message)


def blob_bytes(model: PlannedModel, layer: int) -> int:
    """Return the room of one expert of a layer in cache, arena or window."""
    return -(-model.expert_blob_bytes(layer) // BLOB_ALIGNMENT_BYTES) * BLOB_ALIGNMENT_BYTES


def window_slot_bytes(model: PlannedModel, shape: StageShape) -> int:
    """Return the bytes of one window slot: the largest blob of the stage, 0 where no layer has experts."""
    return max(blob_bytes(model, layer) for layer in range(shape.first_layer, shape.last_layer))


def upload_group(model: PlannedModel, first: int, last: int, *, window_bytes: int | None) -> int:
    """Return how many experts of layers [first, last) one copy to a GPU should carry.

    Args:
        model: Its blobs decide.
        first: First layer.
        last: One past the last layer.
        window_bytes: The user's window, which must hold MIN_WINDOW_GROUPS of them; None: up to the plan.
    """
    largest = max(blob_bytes(model, layer) for layer in range(first, last))
    if largest == 0:
        return 1
    group = min(-(-UPLOAD_BYTES // largest), model.geometry.experts.num_experts)
    if window_bytes is not None:
        group = min(group, window_bytes // largest // MIN_WINDOW_GROUPS)
    return max(1, group)


def min_window_slots(shape: StageShape) -> int:
    """Return the fewest slots that a stage can work with."""
    return MIN_WINDOW_GROUPS * shape.upload_group


def fixed_lines(model: PlannedModel, shape: StageShape, sizes: Sizes) -> tuple[BudgetLine, ...]:
    """Return the claims of a stage that do not depend on its budget, in their order."""
    geometry = model.geometry
    first, last = shape.first_layer, shape.last_layer
    rows, sub = sizes.super_chunk_tokens, sizes.sub_chunk_tokens
    row_bytes = geometry.row_width * FP32_BYTES
    layers = range(first, last)
    pool = pool_bytes_per_token(geometry, first, last, kv_dtype=sizes.kv_dtype)
    state = state_bytes_per_sequence(geometry, first, last)
    slots = 0 if shape.is_first or not shape.slots_in_budget else sizes.hand_off_slots
    dtype = {FP32_BYTES: "fp32"}.get(shape.compute_bytes, "bf16")
    experts = "one expert" if shape.upload_group == 1 else f"{shape.upload_group} experts"
    lines = [
        ("dense weights", sum(map(model.dense_bytes, layers)), f"layers {first}-{last - 1}, as quantised"),
        ("expansion scratch", _expansion_bytes(model, shape), f"largest dense tensors of a layer in {dtype}"),
        ("key-value pool", sizes.kv_pool_tokens * pool, f"{sizes.kv_pool_tokens} tokens x {pool} B"),
        ("sequence state", sizes.max_sequences * state, f"{sizes.max_sequences} sequences x {state} B"),
        (
            "head",
            _head_bytes(model, shape, sizes) if shape.is_last else 0,
            "output matrix, one expanded block, logits",
        ),
        (
            "attention scratch",
            attention_scratch_bytes(geometry, first, last, rows=sub, context=sizes.context_tokens),
            f"c = {sub} rows",
        ),
        (
            "expert buffers",
            _expert_buffer_bytes(model, shape, sizes),
            f"S = {rows} rows, {experts} in {dtype}",
        ),
        (
            "hand-off slots",
            slots * sizes.slot_rows * row_bytes,
            f"{slots} slots x {sizes.slot_rows} rows x {row_bytes} B",
        ),
        ("residual rows", rows * row_bytes, f"S = {rows} rows x {row_bytes} B"),
        ("margin", sizes.margin_bytes, "kept spare"),
    ]
    return tuple(BudgetLine(name=name, num_bytes=number, why=why) for name, number, why in lines)


def shortfall(
    lines: Sequence[BudgetLine], *, stage: int, budget_bytes: int, window_bytes: int
) -> Shortfall | None:
    """Return the first claim that does not fit in the budget, the least window included, or None."""
    left = budget_bytes
    window = BudgetLine(name="window", num_bytes=window_bytes, why="")
    for line in (*lines, window):
        if line.num_bytes > left:
            return Shortfall(stage=stage, item=line.name, need_bytes=line.num_bytes, have_bytes=left)
        left -= line.num_bytes
    return None


def divide_expert_room(
    room_bytes: int,
    *,
    ranked_bytes: Sequence[int],
    ranked_layers: Sequence[int],
    num_experts: int,
    slot_bytes: int,
    window_slots: int | None,
    shape: StageShape,
) -> ExpertRoom:
    """Divide what is left between window and expert cache.

    Takes the largest number of resident experts, in the ranking's order, that leaves a window for all
    streamed experts of layers_ahead layers: with one, a layer is uploaded while the one before it is
    multiplied; with two, heavy layers also borrow time from light ones. Where not even the empty cache leaves
    that, the window takes all slots that fit. More room never makes fewer resident.

    Args:
        room_bytes: What is left; at least min_window_slots(shape) slots.
        ranked_bytes: Room of every expert of the stage, the first to become resident first.
        ranked_layers: The layer of each.
        num_experts: Of a layer.
        slot_bytes: Of the window.
        window_slots: The user's choice, or None.
        shape: Of the stage.
    """
    least, group = min_window_slots(shape), shape.upload_group
    if not ranked_bytes:
        return ExpertRoom(window_slots=window_slots or least, num_resident=0)
    num_layers = len(set(ranked_layers))
    cache_bytes = sum(ranked_bytes)
    streamed = dict.fromkeys(ranked_layers, 0)
    # Walk down from "all resident" to "none": the first division that fits is the largest.
    for num_resident in range(len(ranked_bytes), -1, -1):
        if num_resident < len(ranked_bytes):
            cache_bytes -= ranked_bytes[num_resident]
            streamed[ranked_layers[num_resident]] += 1
        # The ranking is even over layers, so the most streamed experts of a layer follow from the count.
        most = -(-(len(ranked_bytes) - num_resident) // num_layers)
        ahead = -(-most * shape.layers_ahead // group) * group
        wanted = window_slots if window_slots is not None else max(least, ahead)
        if cache_bytes + wanted * slot_bytes <= room_bytes:
            return ExpertRoom(window_slots=wanted, num_resident=num_resident)
    slots = min(num_experts * shape.layers_ahead, max(least, room_bytes // slot_bytes))
    return ExpertRoom(window_slots=slots // group * group, num_resident=0)


def _expansion_bytes(model: PlannedModel, shape: StageShape) -> int:
    """The layers share one scratch buffer for each block type, as large as the layer needs that has most."""
    largest: dict[int, int] = {}
    for layer in range(shape.first_layer, shape.last_layer):
        elements: Counter[int] = Counter()
        for tensor in model.layer_tensors(layer):
            if tensor.ggml_type != _F32_TYPE:
                elements[tensor.ggml_type] += math.prod(tensor.shape)
        for ggml_type, count in elements.items():
            largest[ggml_type] = max(largest.get(ggml_type, 0), count)
    return sum(largest.values()) * shape.compute_bytes


def _head_bytes(model: PlannedModel, shape: StageShape, sizes: Sizes) -> int:
    output = model.output()
    others = [tensor for tensor in model.head_tensors() if tensor.name != output.name]
    vocabulary, hidden = output.shape
    expanded = sum(
        math.prod(tensor.shape) * shape.compute_bytes for tensor in others if tensor.ggml_type != _F32_TYPE
    )
    block = min(vocabulary, HEAD_BLOCK_ROWS) * hidden * shape.compute_bytes
    logits = sizes.max_sequences * vocabulary * FP32_BYTES
    return output.num_bytes + sum(tensor.num_bytes for tensor in others) + expanded + block + logits


def _expert_buffer_bytes(model: PlannedModel, shape: StageShape, sizes: Sizes) -> int:
    """Input (twice: gathered, and per sub-chunk), accumulator, routing, scratch of one multiplication."""
    geometry = model.geometry
    rows, hidden, chosen = sizes.super_chunk_tokens, geometry.hidden_size, geometry.experts.experts_per_token
    streams = geometry.hyper_connections.num_streams if geometry.hyper_connections else 0
    # Ids, sort order and token of every choice are int64, its weight fp32, twice: as routed and as sorted.
    routing = rows * chosen * (3 * 8 + 2 * FP32_BYTES)
    per_row = (3 * hidden + streams) * FP32_BYTES
    width = max(geometry.experts.widths[shape.first_layer : shape.last_layer])
    expert = shape.upload_group * 3 * width * hidden * shape.compute_bytes
    group = sizes.expert_group_rows * (2 * hidden + 3 * width) * FP32_BYTES
    common = max(geometry.experts.shared_width, geometry.experts.dense_width)
    shared = sizes.sub_chunk_tokens * (hidden + 3 * common) * FP32_BYTES
    return rows * per_row + routing + expert + group + (shared if common else 0)
