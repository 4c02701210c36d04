from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator.cost_model import expected_distinct_share, makespan_s, stage_time
from strata_coord.coordinator.planner import plan_launch

COSTS = plan_launch(fake_model(), fake_rig(), fake_config(budget_mib=400)).stages[1].costs

times = st.floats(0.01, 10.0)


def predict(costs, rows=1024, **changes):
    known = {
        "first_position": 0,
        "sub_chunk_tokens": 512,
        "streamed_share": 1.0,
        "touched_share": 1.0,
        "with_head": False,
    }
    return stage_time(costs, rows=rows, **(known | changes))


def test_equal_stages_with_a_deep_ring_follow_the_closed_form():
    # (N + S - 1) t for equal stages, where a hand-off costs nothing.
    assert makespan_s([[2.0] * 6] * 3, [0.0] * 6, ring_super_chunks=2) == pytest.approx(2.0 * (6 + 3 - 1))


def test_unequal_stages_are_bound_by_the_slowest():
    # sum of t + (N - 1) max t
    found = makespan_s([[1.0] * 5, [3.0] * 5, [2.0] * 5], [0.0] * 5, ring_super_chunks=2)
    assert found == pytest.approx(6.0 + 4 * 3.0)


def test_a_ring_below_one_super_chunk_holds_the_sender_up():
    jitter = [[1.0, 1.0, 4.0, 1.0] * 2, [4.0, 1.0, 1.0, 1.0] * 2]
    shallow = makespan_s(jitter, [0.0] * 8, ring_super_chunks=0)
    assert shallow > makespan_s(jitter, [0.0] * 8, ring_super_chunks=2)


@given(st.lists(st.lists(times, min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 3))
def test_the_makespan_lies_between_its_bounds(stages, ring):
    found = makespan_s(stages, [0.1] * 4, ring_super_chunks=ring)
    assert found >= max(sum(stage) for stage in stages) - 1e-9
    assert found >= sum(stage[0] for stage in stages) - 1e-9
    assert found <= sum(map(sum, stages)) + 0.2 * 4 * (len(stages) - 1) + 1e-9


@given(st.lists(st.lists(times, min_size=5, max_size=5), min_size=2, max_size=4), st.integers(1, 3))
def test_a_deeper_ring_is_never_slower(stages, ring):
    deep = makespan_s(stages, [0.05] * 5, ring_super_chunks=ring + 1)
    assert deep <= makespan_s(stages, [0.05] * 5, ring_super_chunks=ring) + 1e-9


def test_the_longest_of_upload_drive_and_compute_counts():
    base = replace(COSTS, arena_bytes=10**9, file_bytes=0, copy_bytes_per_s=1e9)
    slow_link = predict(replace(base, copy_bytes_per_s=1e7))
    assert slow_link.upload_s == pytest.approx(100.0)
    assert slow_link.total_s == pytest.approx(100.0 * (1 + 1 / base.num_layers))
    slow_drive = predict(replace(base, arena_bytes=0, file_bytes=10**9, drive_bytes_per_s=1e6))
    assert slow_drive.total_s == pytest.approx(1000.0 * (1 + 1 / base.num_layers))


def test_later_rows_cost_more_attention_and_the_head_costs_once():
    assert predict(COSTS, first_position=8192).compute_s > predict(COSTS).compute_s
    assert predict(COSTS, with_head=True).compute_s > predict(COSTS).compute_s


def test_attention_of_a_prompt_does_not_depend_on_where_it_is_cut():
    only = replace(COSTS, dense_flops_per_row=0, expert_flops_per_row=0, dense_expanded_bytes=0, call_s=0)
    whole = predict(only, rows=1000, touched_share=0.0).compute_s
    parts = predict(only, rows=400, touched_share=0.0).compute_s
    parts += predict(only, rows=600, first_position=400, touched_share=0.0).compute_s
    assert parts == pytest.approx(whole)


def test_distinct_experts():
    assert expected_distinct_share(1, num_experts=16, experts_per_token=4) == pytest.approx(0.25)
    assert expected_distinct_share(10**4, num_experts=128, experts_per_token=8) == pytest.approx(1.0)
    assert expected_distinct_share(1, num_experts=4, experts_per_token=4) == 1.0
