import json

import pytest

from strata_coord.coordinator.launch_report import RequestResult, StageResult, launch_report
from strata_coord.coordinator.plan import Candidate, PromptPlan
from strata_coord.ipc.messages import ByteCounters, StageClock

PLAN = PromptPlan(
    prompt_tokens=100, mode="layer-major", slot_rows=64, super_chunk_tokens=64, super_chunks=(64, 36),
    sub_chunk_tokens=64, hand_off_slots=2, boundaries=(24,), upload="stream-all", reason="fastest",
    predicted_ttft_s=1.5, predicted_expert_bytes=10,
    candidates=(
        Candidate(
            mode="chunk-major", super_chunk_tokens=64, sub_chunk_tokens=64, num_super_chunks=2,
            predicted_ttft_s=2.0, declined="slower",
        ),
    ),
)  # fmt: skip
STAGE = StageResult(
    stage=0, pid=7, device="cpu", numa_node=-1, binding="none", route="host", first_layer=0, last_layer=24,
    clock=StageClock(
        now_ns=10_000_000_000, busy_ns=6_000_000_000, wait_rows_ns=1_000_000_000,
        wait_experts_ns=2_000_000_000,
        wait_slot_ns=500_000_000, hand_off_ns=500_000_000,
    ),
    counters=ByteCounters(resident_hit=1, ram_to_device=2, file_read=3, rows_spilled=4, handed_off=5),
)  # fmt: skip
RESULT = RequestResult(
    text="hi", prompt_tokens=100, generated_tokens=11, finish_reason="length", ttft_s=2.0, total_s=4.0,
    expert_bytes_moved=20, expert_bytes_once=10,
)  # fmt: skip


def test_the_names_are_those_of_the_contract() -> None:
    report = json.loads(json.dumps(launch_report(RESULT, PLAN, [STAGE]), allow_nan=False))
    assert set(report) >= {
        "text", "prompt_tokens", "generated_tokens", "finish_reason", "ttft_s", "prefill_tokens_per_s",
        "decode_tokens_per_s", "plan", "expert_bytes", "stages",
    }  # fmt: skip
    assert set(report["plan"]) >= {
        "mode", "slot_rows", "super_chunk_tokens", "num_super_chunks", "sub_chunk_tokens", "hand_off_slots",
        "boundaries", "reason", "predicted_ttft_s", "candidates",
    }  # fmt: skip
    assert set(report["plan"]["candidates"][0]) >= {
        "mode",
        "super_chunk_tokens",
        "predicted_ttft_s",
        "declined",
    }
    assert set(report["stages"][0]) >= {
        "stage", "pid", "device", "numa_node", "binding", "route", "first_layer", "last_layer", "busy_s",
        "wait_rows_s", "wait_experts_s", "wait_slot_s", "hand_off_s", "bytes",
    }  # fmt: skip
    assert report["expert_bytes"] == {"moved": 20, "once": 10}
    assert report["plan"]["num_super_chunks"] == 2


def test_busy_time_and_waits_are_the_wall_time() -> None:
    (stage,) = json.loads(json.dumps(launch_report(RESULT, PLAN, [STAGE])))["stages"]
    parts = ("busy_s", "wait_rows_s", "wait_experts_s", "wait_slot_s")
    assert sum(stage[part] for part in parts) == pytest.approx(stage["wall_s"])
    assert stage["wall_s"] == pytest.approx(10.0)
    assert stage["numa_node"] is None


def test_rates_leave_the_first_token_to_the_prompt() -> None:
    report = launch_report(RESULT, PLAN, [])
    assert report["prefill_tokens_per_s"] == pytest.approx(50.0)
    assert report["decode_tokens_per_s"] == pytest.approx(5.0)


def test_one_token_or_none_has_no_decode_rate() -> None:
    alone = RequestResult(
        text="", prompt_tokens=1, generated_tokens=1, finish_reason="length", ttft_s=0.0, total_s=0.0,
        expert_bytes_moved=0, expert_bytes_once=0,
    )  # fmt: skip
    report = launch_report(alone, PLAN, [])
    assert (report["prefill_tokens_per_s"], report["decode_tokens_per_s"]) == (0.0, 0.0)
