from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_fakes import fake_config, fake_model, fake_rig, tight_budgets

from strata_coord.coordinator.planner import expert_bytes_once, plan_launch, plan_prompt, upload_policy
from strata_coord.ipc.errors import RequestError

MODEL = fake_model(num_layers=8, num_experts=64, context_tokens=8192)
ROWS = "reserved_tokens = 2048\nsub_chunk_tokens = 512"
TIGHT = tight_budgets(MODEL, resident_share=0.4, prefill=ROWS)
LAUNCH = plan_launch(MODEL, fake_rig(), fake_config(boundaries=(4,), budget_mib=TIGHT, prefill=ROWS))


def with_costs(launch, **changes):
    return replace(launch, stages=tuple(replace(s, costs=replace(s.costs, **changes)) for s in launch.stages))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 8192), st.sampled_from(["auto", "layer-major", "chunk-major"]))
def test_every_token_is_read_once_within_the_room(tokens, mode):
    plan = plan_prompt(LAUNCH, tokens, mode=mode)
    assert sum(plan.super_chunks) == tokens
    assert max(plan.super_chunks) <= plan.super_chunk_tokens <= LAUNCH.super_chunk_tokens
    assert plan.slot_rows % plan.sub_chunk_tokens == 0
    assert plan.slot_rows <= LAUNCH.slot_rows
    assert sum(candidate.declined is None for candidate in plan.candidates) == 1
    is_chunk_major = plan.super_chunk_tokens <= plan.sub_chunk_tokens and plan.num_super_chunks > 1
    assert plan.mode == ("chunk-major" if is_chunk_major else "layer-major")
    if mode == "auto":
        assert plan.predicted_ttft_s == min(one.predicted_ttft_s for one in plan.candidates)


def test_a_forced_mode_is_obeyed():
    layer_major = plan_prompt(LAUNCH, 4096, mode="layer-major")
    assert layer_major.super_chunks == (2048, 2048)
    assert layer_major.mode == "layer-major"
    chunk_major = plan_prompt(LAUNCH, 4096, mode="chunk-major")
    assert chunk_major.super_chunks == (512,) * 8
    assert (chunk_major.mode, chunk_major.super_chunk_tokens) == ("chunk-major", chunk_major.sub_chunk_tokens)


def test_the_reason_says_what_a_forced_mode_costs():
    costly = with_costs(LAUNCH, arena_bytes=10**11)
    plan = plan_prompt(costly, 4096, mode="chunk-major")
    assert "forced by --mode chunk-major; layer-major with 2 super-chunks is predicted to be" in plan.reason
    free = plan_prompt(costly, 4096, mode="layer-major")
    assert free.reason.endswith("which is also predicted to be fastest")


def test_a_slow_link_favours_layer_major_and_a_fast_one_the_overlap_of_stages():
    slow = plan_prompt(with_costs(LAUNCH, arena_bytes=10**11), 4096)
    assert (slow.mode, slow.num_super_chunks) == ("layer-major", 2)
    fast = plan_prompt(
        with_costs(LAUNCH, copy_bytes_per_s=1e12, expand_bytes_per_s=1e12, drive_bytes_per_s=1e12), 4096
    )
    assert fast.num_super_chunks > 2


def test_a_prompt_within_one_sub_chunk_has_one_candidate():
    plan = plan_prompt(LAUNCH, 100, mode="chunk-major")
    assert plan.super_chunks == (100,)
    assert (plan.mode, len(plan.candidates)) == ("layer-major", 1)
    assert "the only cut" in plan.reason


def test_predicted_bytes_are_once_times_super_chunks_where_all_are_streamed():
    once = expert_bytes_once(LAUNCH, MODEL)
    assert once > 0
    plan = plan_prompt(LAUNCH, 4096, mode="layer-major")
    assert (plan.upload, plan.predicted_expert_bytes) == ("stream-all", 2 * once)
    assert plan_prompt(LAUNCH, 1500, mode="layer-major").predicted_expert_bytes == once
    assert 0 < plan_prompt(LAUNCH, 1).predicted_expert_bytes < once


def test_few_rows_are_routed_only_and_many_stream_all():
    assert upload_policy(LAUNCH, 1) == "routed-only"
    assert upload_policy(LAUNCH, 512) == "stream-all"
    assert upload_policy(replace(LAUNCH, upload="routed-only"), 512) == "routed-only"
    policies = [upload_policy(LAUNCH, rows) for rows in range(1, 200)]
    assert policies == sorted(policies)  # "routed-only" < "stream-all": one switch, never back


@pytest.mark.parametrize(
    ("tokens", "message"), [(0, "0 tokens; at least 1"), (8193, "8193 tokens, more than the context of 8192")]
)
def test_a_prompt_that_cannot_be_read_is_refused(tokens, message):
    with pytest.raises(RequestError, match=message):
        plan_prompt(LAUNCH, tokens)


def test_the_same_prompt_has_the_same_plan():
    assert plan_prompt(LAUNCH, 5000) == plan_prompt(LAUNCH, 5000)
