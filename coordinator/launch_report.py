"""Builds the object that launch --json prints; its names are a contract (design.md section 8). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.ipc.messages import ByteCounters, StageClock

if TYPE_CHECKING:
    from strata_coord.coordinator.plan import PromptPlan

JsonObject = dict[str, object]

NS_PER_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage over one request. clock and counters: the request's part, telemetry.clock_between."""

    stage: int
    pid: int
    device: str
    numa_node: int  # -1: not bound
    binding: str
    route: str | None  # of the link to the next stage: "device", "host", or None for the last
    first_layer: int
    last_layer: int  # exclusive
    clock: StageClock
    counters: ByteCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The answer to one prompt."""

    text: str
    prompt_tokens: int
    generated_tokens: int
    finish_reason: str
    ttft_s: float  # from acceptance to the first token
    total_s: float  # from acceptance to the last token
    expert_bytes_moved: int  # counted at the copy, while the prompt was read
    expert_bytes_once: int  # what touching every needed, non-resident expert once costs


def launch_report(result: RequestResult, plan: "PromptPlan", stages: Sequence[StageResult]) -> JsonObject:
    """Return the JSON object of one answered prompt."""
    decode_s = result.total_s - result.ttft_s
    decoded = result.generated_tokens - 1  # the first token belongs to reading the prompt
    return {
        "text": result.text,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "finish_reason": result.finish_reason,
        "ttft_s": _rounded(result.ttft_s),
        "prefill_tokens_per_s": _rounded(_rate(result.prompt_tokens, result.ttft_s)),
        "decode_tokens_per_s": _rounded(_rate(decoded, decode_s)),
        "plan": plan_summary(plan),
        "expert_bytes": {"moved": result.expert_bytes_moved, "once": result.expert_bytes_once},
        "stages": [stage_summary(stage) for stage in stages],
    }


def plan_summary(plan: "PromptPlan") -> JsonObject:
    """Return the plan of one prompt as the contract names its parts."""
    return {
        "mode": plan.mode,
        "slot_rows": plan.slot_rows,
        "super_chunk_tokens": plan.super_chunk_tokens,
        "num_super_chunks": len(plan.super_chunks),
        "sub_chunk_tokens": plan.sub_chunk_tokens,
        "hand_off_slots": plan.hand_off_slots,
        "boundaries": list(plan.boundaries),
        "reason": plan.reason,
        "predicted_ttft_s": _rounded(plan.predicted_ttft_s),
        "candidates": [
            {
                "mode": candidate.mode,
                "super_chunk_tokens": candidate.super_chunk_tokens,
                "predicted_ttft_s": _rounded(candidate.predicted_ttft_s),
                "declined": candidate.declined,
            }
            for candidate in plan.candidates
        ],
    }


def stage_summary(stage: StageResult) -> JsonObject:
    """Return one stage's entry. busy_s holds hand_off_s: busy_s and the waits are the wall time."""
    clock, counters = stage.clock, stage.counters
    return {
        "stage": stage.stage,
        "pid": stage.pid,
        "device": stage.device,
        "numa_node": stage.numa_node if stage.numa_node >= 0 else None,
        "binding": stage.binding,
        "route": stage.route,
        "first_layer": stage.first_layer,
        "last_layer": stage.last_layer,
        "wall_s": _seconds(clock.now_ns),
        "busy_s": _seconds(clock.busy_ns + clock.hand_off_ns),
        "wait_rows_s": _seconds(clock.wait_rows_ns),
        "wait_experts_s": _seconds(clock.wait_experts_ns),
        "wait_slot_s": _seconds(clock.wait_slot_ns),
        "hand_off_s": _seconds(clock.hand_off_ns),
        "bytes": {
            "resident_hit": counters.resident_hit,
            "ram_to_device": counters.ram_to_device,
            "file_read": counters.file_read,
            "rows_spilled": counters.rows_spilled,
            "handed_off": counters.handed_off,
        },
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0


def _seconds(nanoseconds: int) -> float:
    return _rounded(nanoseconds / NS_PER_S)


def _rounded(value: float) -> float:
    """Keep microseconds: more digits are noise, fewer would lose short waits."""
    return round(value, 6)
