"""The plan as plain records: printed, saved, compared and replayed. Pure.

A LaunchPlan is made once, from model, rig and configuration; it fixes every size that a stage allocates. A
PromptPlan is made for each prompt from the LaunchPlan alone, so that a saved plan can be replayed.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from strata_coord.coordinator.plan_json import record_from
from strata_coord.ipc.assignment import ComputeDtype, KvDtype
from strata_coord.ipc.errors import ConfigError
from strata_coord.ipc.messages import Route, UploadPolicy

__all__ = [
    "BudgetLine",
    "Candidate",
    "LaunchPlan",
    "PrefillMode",
    "PromptPlan",
    "StageCosts",
    "StagePlan",
    "differences",
    "launch_plan_from_json",
    "prompt_plan_from_json",
    "to_json",
]

PLAN_VERSION = 2

PrefillMode = Literal["layer-major", "chunk-major"]
ModeSetting = Literal["auto", "layer-major", "chunk-major"]
UploadSetting = Literal["auto", "stream-all", "routed-only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One claim on a stage's device memory."""

    name: str
    num_bytes: int
    why: str  # the formula in words, with its numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What the cost model needs of one stage; rates are those of all its threads together."""

    num_layers: int
    dense_flops_per_row: float
    expert_flops_per_row: float
    attention_flops_per_pair: float  # of one query row and one key row, all attention layers
    dense_expanded_bytes: int  # written once per super-chunk, in the compute type
    expert_expanded_bytes: int  # the same for all experts of all layers
    head_flops: float  # of the one row that is sampled; 0 but on the last stage
    head_expanded_bytes: int
    arena_bytes: int  # streamed experts that lie in the arena
    file_bytes: int  # streamed experts that are read from the file each time
    copy_bytes_per_s: float
    drive_bytes_per_s: float
    hand_off_bytes_per_s: float  # rows to the next stage
    expand_bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float
    call_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One stage. Layers are [first_layer, last_layer)."""

    stage: int
    first_layer: int
    last_layer: int
    device: str  # "cpu" or "cuda:N"
    device_key: str  # the card's UUID, which no setting renumbers; "" on the CPU
    route: Route | None  # of the rows to the next stage; None: it is the last
    compute_dtype: ComputeDtype
    upload_group: int  # streamed experts per copy
    numa_node: int  # -1: not bound
    cpu_threads: int
    budget_bytes: int
    lines: tuple[BudgetLine, ...]  # sums to budget_bytes exactly
    resident_experts: tuple[tuple[int, ...], ...]  # per own layer, ascending
    arena_experts: tuple[tuple[int, ...], ...]
    window_slots: int
    expert_group_rows: int
    resident_bytes: int
    streamed_bytes: int  # not resident: arena and file together
    arena_bytes: int
    costs: StageCosts

    @property
    def num_resident(self) -> int:
        """Resident experts of all layers."""
        return sum(map(len, self.resident_experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Every size of a launch."""

    version: int
    architecture: str
    num_layers: int
    num_experts: int
    experts_per_token: int
    boundaries: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    super_chunk_tokens: int  # the largest S any prompt may use
    sub_chunk_tokens: int
    slot_rows: int
    hand_off_slots: int
    row_bytes: int  # of one residual row
    kv_dtype: KvDtype
    kv_pool_tokens: int
    max_sequences: int
    context_tokens: int
    upload: UploadSetting
    stream_all_share: float  # of expected distinct experts, from which on all are streamed
    notes: tuple[str, ...]  # what was chosen or given up, one line each


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to read a prompt."""

    mode: PrefillMode
    super_chunk_tokens: int
    sub_chunk_tokens: int
    num_super_chunks: int
    predicted_ttft_s: float
    declined: str | None  # None: chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """How one prompt is read."""

    prompt_tokens: int
    mode: PrefillMode
    slot_rows: int
    super_chunk_tokens: int
    super_chunks: tuple[int, ...]
    sub_chunk_tokens: int
    hand_off_slots: int
    boundaries: tuple[int, ...]
    upload: UploadPolicy
    reason: str
    predicted_ttft_s: float
    predicted_expert_bytes: int
    candidates: tuple[Candidate, ...]

    @property
    def num_super_chunks(self) -> int:
        """Super-chunks that the prompt is cut into."""
        return len(self.super_chunks)


def to_json(plan: LaunchPlan | PromptPlan) -> str:
    """Return a plan as JSON text."""
    return json.dumps(asdict(plan), indent=2) + "\n"


def launch_plan_from_json(text: str) -> LaunchPlan:
    """Read a LaunchPlan back from the text of to_json.

    Raises:
        ConfigError: Not JSON, another version, or a field is missing, unknown or of the wrong type.
    """
    plan = record_from(LaunchPlan, _loads(text), what="plan")
    if plan.version != PLAN_VERSION:
        message = f"plan.version: expected {PLAN_VERSION}, got {plan.version}; make the plan again"
        raise ConfigError(message)
    return plan


def prompt_plan_from_json(text: str) -> PromptPlan:
    """Read a PromptPlan back from the text of to_json.

    Raises:
        ConfigError: Not JSON, or a field is missing, unknown or of the wrong type.
    """
    return record_from(PromptPlan, _loads(text), what="plan")


def differences(first: LaunchPlan | PromptPlan, second: LaunchPlan | PromptPlan) -> tuple[str, ...]:
    """Return a line "path: before -> after" for each value in which two plans differ."""
    return tuple(_differences("plan", asdict(first), asdict(second)))


def _differences(path: str, first: object, second: object) -> list[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        keys = list(dict.fromkeys([*first, *second]))
        return [
            line for key in keys for line in _differences(f"{path}.{key}", first.get(key), second.get(key))
        ]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for number, (a, b) in pairs for line in _differences(f"{path}.{number}", a, b)]
    return [] if first == second else [f"{path}: {first!r} -> {second!r}"]


def _loads(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        message = f"plan: not valid JSON: {error}"
        raise ConfigError(message) from error
    return value
