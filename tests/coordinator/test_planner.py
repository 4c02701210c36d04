from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_fakes import MIB, fake_config, fake_model, fake_rig, tight_budgets

from strata_coord.coordinator.planner import expert_bytes_once, plan_launch, stage_assignment
from strata_coord.ipc.errors import BindingError, ConfigError, PlanError

SMALL = fake_model(num_layers=8, num_experts=64, context_tokens=2048)
FIXED_ROWS = "reserved_tokens = 512\nsub_chunk_tokens = 256"
TIGHT = tight_budgets(SMALL, resident_share=0.4, prefill=FIXED_ROWS)


def plan(*, model=SMALL, rig=None, **config):
    config.setdefault("boundaries", (4,))
    return plan_launch(model, rig or fake_rig(), fake_config(**config))


def budgets(launch):
    return [{line.name: line.num_bytes for line in stage.lines} for stage in launch.stages]


@settings(max_examples=40, deadline=None)
@given(
    budget=st.integers(20, 200),
    boundaries=st.sampled_from([(), (4,), (1, 7), (2, 4, 6)]),
    slots=st.integers(1, 4),
    reserved=st.sampled_from([64, 256, 1024, 2048]),
)
def test_lines_sum_to_the_budget_and_every_expert_has_one_place(budget, boundaries, slots, reserved):
    prefill = f"reserved_tokens = {reserved}\nhand_off_slots = {slots}"
    try:
        launch = plan(budget_mib=budget, boundaries=boundaries, prefill=prefill)
    except PlanError:
        return
    assert [stage.first_layer for stage in launch.stages] == [0, *boundaries]
    assert [stage.last_layer for stage in launch.stages] == [*boundaries, 8]
    for stage in launch.stages:
        assert sum(line.num_bytes for line in stage.lines) == stage.budget_bytes == budget * MIB
        assert all(line.num_bytes >= 0 for line in stage.lines)
        assert stage.window_slots >= 2
        for resident, arena in zip(stage.resident_experts, stage.arena_experts, strict=True):
            assert list(resident) == sorted(set(resident))
            assert list(arena) == sorted(set(arena))
            assert not set(resident) & set(arena)
            assert set(resident) | set(arena) <= set(range(64))
        counts = [len(resident) for resident in stage.resident_experts]
        assert max(counts) - min(counts) <= 1
    assert launch.super_chunk_tokens % 64 == 0
    assert launch.sub_chunk_tokens <= launch.super_chunk_tokens <= reserved
    assert launch.slot_rows % launch.sub_chunk_tokens == 0
    assert launch.slot_rows <= launch.super_chunk_tokens


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=2), st.integers(1, 3))
def test_a_bigger_budget_never_has_fewer_resident_experts(pair, scale):
    model = fake_model(num_layers=8, context_tokens=2048, widths=(64, 64, 64, 64 * scale * 4, 64, 64, 64, 64))
    least = tight_budgets(model, resident_share=0.0, prefill=FIXED_ROWS)
    first, second = (
        plan(model=model, budget_mib=tuple(one + more for one in least), prefill=FIXED_ROWS)
        for more in sorted(pair)
    )
    assert first.super_chunk_tokens == second.super_chunk_tokens
    for less, more in zip(first.stages, second.stages, strict=True):
        assert less.num_resident <= more.num_resident


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(22, 80), min_size=2, max_size=2))
def test_a_bigger_budget_never_has_smaller_super_chunks(pair):
    small, large = sorted(pair)
    first, second = (plan(budget_mib=one, prefill="sub_chunk_tokens = 64") for one in (small, large))
    assert first.super_chunk_tokens <= second.super_chunk_tokens


def test_the_same_inputs_give_the_same_plan():
    assert plan(budget_mib=50) == plan(budget_mib=50)


def test_rows_are_reserved_before_the_expert_cache():
    # As in the field: caches that had taken the rows' room kept layer-major off.
    launch = plan(budget_mib=28, prefill="reserved_tokens = 2048")
    roomy = plan(budget_mib=400, prefill="reserved_tokens = 2048")
    assert launch.super_chunk_tokens < roomy.super_chunk_tokens == 2048
    assert sum(stage.num_resident for stage in launch.stages) < 2 * 4 * 64
    assert any("super-chunks:" in note for note in launch.notes)


def test_hand_off_slots_lie_at_the_receiver_and_the_head_on_the_last_stage():
    first, last = budgets(plan(budget_mib=100))
    assert first["hand-off slots"] == 0 < last["hand-off slots"]
    assert first["head"] == 0 < last["head"]
    assert last["hand-off slots"] == 2 * plan(budget_mib=100).slot_rows * 256 * 4 * 4


def test_the_ring_holds_a_whole_super_chunk():
    launch = plan(budget_mib=200)
    assert launch.hand_off_slots * launch.slot_rows >= launch.super_chunk_tokens


def test_state_bytes_are_those_of_the_geometry():
    launch = plan(budget_mib=100, rest="[kv]\ndtype = 'fp32'\nmax_sequences = 3")
    lines = budgets(launch)[0]
    # One attention layer: keys and values of 2 heads x 64, and an indexer key of 64 for every 4 tokens.
    assert lines["key-value pool"] == 2048 * (2 * 2 * 64 * 4 + 64 * 4 // 4)
    delta = 3 * (2 * 2 + 6) * 32 * 4 + 6 * 32 * 32 * 4
    ngram = 3 * 3 * 1024 * 4 + 2 * 8
    assert lines["sequence state"] == 3 * (3 * delta + 3 * 64 * 4 + ngram)


def test_a_half_width_pool_takes_half_the_room():
    full, half = (
        budgets(plan(budget_mib=100, rest=f"[kv]\ndtype = '{kind}'"))[0]["key-value pool"]
        for kind in ("fp32", "fp16")
    )
    assert full - half == 2048 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (2, r"^stage 0: key-value pool needs 1\.1 MiB, \d\.\d MiB are free; lower kv.pool_tokens"),
        (4, r"^stage 0: [a-z ]+ needs \d+\.\d MiB, \d+\.\d MiB are free; "),
    ],
)
def test_when_nothing_fits_stage_item_need_have_and_lever_are_named(budget, message):
    with pytest.raises(PlanError, match=message):
        plan(budget_mib=budget)


def test_a_smaller_sub_chunk_is_tried_before_giving_up():
    launch = plan(budget_mib=28)
    assert launch.sub_chunk_tokens < 512
    assert any(note.startswith("sub_chunk_tokens: ") for note in launch.notes)


def test_a_stage_without_a_budget_holds_everything_where_the_host_has_room():
    launch = plan(budget_mib=None)
    assert all(stage.num_resident == 4 * 64 for stage in launch.stages)
    assert all(stage.streamed_bytes == 0 for stage in launch.stages)
    assert "no vram_budget_mib" in launch.notes[1]


def test_budgets_and_arenas_never_exceed_the_host():
    rig = fake_rig(available_bytes=64 * MIB)
    with pytest.raises(PlanError, match="host memory: the stages need"):
        plan(budget_mib=200, rig=rig, prefill="reserved_tokens = 2048")
    launch = plan(budget_mib=None, rig=fake_rig(available_bytes=120 * MIB))
    taken = sum(stage.budget_bytes + stage.arena_bytes for stage in launch.stages)
    assert taken <= 0.8 * 120 * MIB


def test_the_arena_is_divided_by_streamed_bytes_and_the_rest_stays_in_the_file():
    whole = plan(budget_mib=TIGHT, prefill=FIXED_ROWS)
    streamed = [stage.streamed_bytes for stage in whole.stages]
    assert min(streamed) > 0
    assert [stage.arena_bytes for stage in whole.stages] == streamed
    none = plan(budget_mib=TIGHT, prefill=FIXED_ROWS, rest="[memory]\narena_gib = 0")
    assert [stage.arena_bytes for stage in none.stages] == [0, 0]
    part = plan(budget_mib=TIGHT, prefill=FIXED_ROWS, rest="[memory]\narena_gib = 0.001")
    for stage in part.stages:
        assert 0 < stage.arena_bytes <= 0.001 * 2**30 * stage.streamed_bytes / sum(streamed) + 1
        assert stage.costs.arena_bytes + stage.costs.file_bytes == stage.streamed_bytes
    assert any(note.startswith("arena: ") for note in part.notes)
    with pytest.raises(PlanError, match="the arenas need"):
        plan(
            budget_mib=TIGHT,
            prefill=FIXED_ROWS,
            rig=fake_rig(available_bytes=int((sum(TIGHT) + 3) * MIB / 0.8)),
            rest="[memory]\narena_gib = 4",
        )


def test_the_window_holds_a_layer_and_can_be_set():
    launch = plan(budget_mib=TIGHT, prefill=FIXED_ROWS)
    for stage in launch.stages:
        most = max(64 - len(resident) for resident in stage.resident_experts)
        assert stage.window_slots == max(2, most)
    small = fake_model(num_layers=8, context_tokens=2048).expert_blob_bytes(0)
    fixed = plan(budget_mib=TIGHT, prefill=FIXED_ROWS, rest="[memory]\nwindow_mib = 1")
    assert {stage.window_slots for stage in fixed.stages} == {MIB // (-(-small // 64) * 64)}


def test_stages_go_over_the_nodes_and_share_their_cpus():
    launch = plan(rig=fake_rig(cpus=((0, 1, 2, 3), (4, 5))), boundaries=(2, 4, 6), budget_mib=60)
    assert [stage.numa_node for stage in launch.stages] == [0, 0, 1, 1]
    assert [stage.cpu_threads for stage in launch.stages] == [2, 2, 1, 1]


def test_one_cpu_still_gives_every_stage_a_thread():
    launch = plan(rig=fake_rig(cpus=((0,),)), boundaries=(2, 4, 6), budget_mib=60)
    assert [stage.cpu_threads for stage in launch.stages] == [1, 1, 1, 1]


def test_a_node_that_is_not_there_is_a_binding_error():
    with pytest.raises(BindingError, match=r"stage\.0\.numa_node: node 7 .* there are 0"):
        plan(stage="numa_node = 7")
    assert [stage.numa_node for stage in plan(stage='numa_node = "off"').stages] == [-1, -1]
    assert [stage.cpu_threads for stage in plan(stage="cpu_threads = 5").stages] == [5, 5]


def test_settings_that_the_model_cannot_meet_are_configuration_errors():
    with pytest.raises(ConfigError, match="layer 8 is past the model's last layer, 7"):
        plan(boundaries=(8,))
    config = fake_config(boundaries=(4,))
    longer = config.model_copy(update={"model": config.model.model_copy(update={"context_tokens": 4096})})
    with pytest.raises(ConfigError, match="4096 is above the model's limit, 2048"):
        plan_launch(SMALL, fake_rig(), longer)


def test_explicit_sizes_are_kept():
    prefill = (
        "super_chunk_tokens = 512\nsub_chunk_tokens = 128\nslot_rows = 256\nhand_off_slots = 3\n"
        'upload = "routed-only"'
    )
    launch = plan(budget_mib=100, prefill=prefill)
    sizes = (launch.super_chunk_tokens, launch.sub_chunk_tokens, launch.slot_rows, launch.hand_off_slots)
    assert sizes == (512, 128, 256, 3)
    assert launch.upload == "routed-only"


def test_assignments_carry_the_plan_and_only_their_own_tensors():
    launch = plan(budget_mib=40, prefill=FIXED_ROWS)
    for stage in launch.stages:
        told = stage_assignment(launch, stage.stage, SMALL)
        assert (told.first_layer, told.last_layer) == (stage.first_layer, stage.last_layer)
        assert told.resident_experts == stage.resident_experts
        assert told.arena_experts == stage.arena_experts
        assert told.super_chunk_tokens == launch.super_chunk_tokens
        layers = {int(t.name.split(".")[1]) for t in told.tensors if t.name.startswith("blk.")}
        assert layers == set(range(stage.first_layer, stage.last_layer))
        assert told.num_stages == 2


def test_bytes_once_are_the_non_resident_extents():
    launch = plan(budget_mib=TIGHT, prefill=FIXED_ROWS)
    resident = sum(stage.num_resident for stage in launch.stages)
    blob = SMALL.expert_blob_bytes(0)
    assert expert_bytes_once(launch, SMALL) == (8 * 64 - resident) * blob > 0
    all_resident = replace(
        launch, stages=tuple(replace(s, resident_experts=(tuple(range(64)),) * 4) for s in launch.stages)
    )
    assert expert_bytes_once(all_resident, SMALL) == 0
