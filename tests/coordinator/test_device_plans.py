"""Plans for GPUs that are not here: devices, budgets, types, windows, links."""

from dataclasses import replace

import pytest
from planning_fakes import MIB, fake_config, fake_device, fake_model, fake_rig

from strata_coord.coordinator.device_choice import PROCESS_BYTES, check_planned_devices, choose_devices
from strata_coord.coordinator.plan import LaunchPlan, StagePlan, launch_plan_from_json, to_json
from strata_coord.coordinator.planner import plan_launch, stage_assignment
from strata_coord.ipc.errors import BindingError, ConfigError, PlanError

MODEL = fake_model()
TWO = (fake_device(0), fake_device(1, numa_node=1))
NODES = ((0, 1), (2, 3))


def lines(stage: StagePlan) -> dict[str, int]:
    assert sum(line.num_bytes for line in stage.lines) == stage.budget_bytes
    return {line.name: line.num_bytes for line in stage.lines}


def launch(*, devices=TWO, cpus=NODES, model=MODEL, **config) -> LaunchPlan:
    return plan_launch(model, fake_rig(cpus=cpus, devices=devices), fake_config(**config))


# --- which device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_devices", "names"),
    [
        (0, ["cpu", "cpu", "cpu"]),
        (1, ["cuda:0", "cuda:0", "cuda:0"]),
        (2, ["cuda:0", "cuda:1", "cuda:0"]),
        (4, ["cuda:0", "cuda:1", "cuda:2"]),
    ],
)
def test_auto_takes_the_gpus_in_turn_and_the_cpu_where_there_are_none(num_devices, names):
    devices = tuple(map(fake_device, range(num_devices)))
    plan = launch(devices=devices, boundaries=(8, 16), device="auto", budget_mib=400)
    assert [stage.device for stage in plan.stages] == names
    assert [stage.device_key for stage in plan.stages] == [
        "" if name == "cpu" else devices[int(name[-1])].uuid for name in names
    ]


def test_why_auto_became_the_cpu_is_said():
    rig = fake_rig(no_devices="1 GPU(s) are here, but the installed torch is a CPU build")
    plan = plan_launch(MODEL, rig, fake_config(device="auto"))
    assert "stages run on the CPU: 1 GPU(s) are here, but the installed torch is a CPU build" in plan.notes


@pytest.mark.parametrize(
    "name", ["cuda:1", "cuda:GPU-00000001", "cuda:GPU-00000001-0000-0000-0000-000000000000"]
)
def test_a_card_is_named_by_number_or_by_uuid(name):
    plan = launch(device=name)
    assert {stage.device for stage in plan.stages} == {"cuda:1"}


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("cuda:2", TWO, r"stage\.0\.device: cuda:2: there is no such GPU; there are cuda:0 \(GPU-00000000"),
        ("cuda:GPU-0000", TWO, "2 GPUs match"),
        ("cuda:0", (), "there is no such GPU; no NVIDIA driver"),
    ],
)
def test_a_card_that_is_not_here_is_refused_with_those_that_are(name, devices, said):
    rig = fake_rig(devices=devices, no_devices="" if devices else "no NVIDIA driver: libnvidia-ml.so")
    with pytest.raises(BindingError, match=said):
        plan_launch(MODEL, rig, fake_config(device=name))


def test_a_saved_plan_keeps_to_its_cards():
    plan = launch_plan_from_json(to_json(launch(device="auto")))
    check_planned_devices(plan, TWO, reason="", name="p.json")
    swapped = (replace(TWO[1], device=0), replace(TWO[0], device=1))
    for found in (swapped, ()):
        with pytest.raises(
            BindingError, match=r"p\.json: stage 0 is planned for cuda:0 .*; make the plan again"
        ):
            check_planned_devices(plan, found, reason="no NVIDIA driver", name="p.json")


# --- arithmetic --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "capability", "dtypes"),
    [
        ("auto", (9, 0), ["bf16", "fp32"]),
        ("auto", (7, 5), ["fp32", "fp32"]),
        ("bf16", (7, 5), ["bf16", "fp32"]),
        ("fp32", (9, 0), ["fp32", "fp32"]),
    ],
)
def test_the_type_follows_the_device(asked, capability, dtypes):
    card = fake_device(compute_capability=capability)
    plan = (
        launch(devices=(card,), device=("cuda:0", "cpu"), model=MODEL, budget_mib=400)
        if asked == "auto"
        else (
            plan_launch(
                MODEL,
                fake_rig(devices=(card,)),
                fake_config(device=("cuda:0", "cpu"), budget_mib=400, model=f'compute_dtype = "{asked}"'),
            )
        )
    )
    assert [stage.compute_dtype for stage in plan.stages] == dtypes
    assert [stage_assignment(plan, n, MODEL).compute_dtype for n in (0, 1)] == dtypes
    assert any("computes in fp32 on the CPU, not in bf16" in note for note in plan.notes) == (asked == "bf16")


def test_bf16_on_the_cpu_alone_is_refused():
    with pytest.raises(ConfigError, match=r"model\.compute_dtype: stage 0 is on the CPU"):
        choose_devices(fake_config(model='compute_dtype = "bf16"'), fake_rig(), [])


def test_expanded_weights_take_half_in_bf16_and_rows_stay_fp32():
    def planned(dtype: str) -> dict[str, int]:
        config = fake_config(device="cuda:0", budget_mib=600, model=f'compute_dtype = "{dtype}"')
        return lines(plan_launch(MODEL, fake_rig(devices=TWO), config).stages[1])

    half, full = planned("bf16"), planned("fp32")
    assert half["expansion scratch"] * 2 == full["expansion scratch"] > 0
    assert half["head"] < full["head"]
    assert half["expert buffers"] < full["expert buffers"]
    assert half["residual rows"] == full["residual rows"]
    assert half["attention scratch"] == full["attention scratch"]


# --- budgets -----------------------------------------------------------------------------------------------


def test_stages_without_a_budget_share_what_their_card_has_free():
    plan = launch(
        devices=(fake_device(free_mib=10_000),),
        device="auto",
        budget_mib=None,
        boundaries=(16, 32),
        stage="vram_reserve_mib = 1000",
    )
    room = 10_000 * MIB - 1000 * MIB - 3 * PROCESS_BYTES
    assert {stage.budget_bytes for stage in plan.stages} == {room // 3}


def test_a_budget_that_is_named_is_taken_off_the_others():
    plan = launch(devices=(fake_device(free_mib=10_000),), device="auto", budget_mib=(1500, None))
    assert [stage.budget_bytes for stage in plan.stages] == [
        1500 * MIB,
        10_000 * MIB - 1500 * MIB - 2 * PROCESS_BYTES,
    ]


def test_budgets_that_a_card_cannot_give_are_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"cuda:0: stages 0, 1 need 5536 MiB, 5000 MiB are free") as caught:
        launch(devices=(fake_device(free_mib=5000),), device="auto", budget_mib=2000)
    assert "lower stage.N.vram_budget_mib" in str(caught.value)


def test_a_gpu_takes_nothing_of_the_hosts_memory_but_the_arena():
    tight = fake_rig(devices=(fake_device(),), available_bytes=400 * MIB)
    config = fake_config(device="cuda:0", budget_mib=1000)
    plan = plan_launch(MODEL, tight, config)
    assert sum(stage.arena_bytes for stage in plan.stages) <= 400 * MIB
    with pytest.raises(PlanError, match="host memory"):
        plan_launch(MODEL, tight, fake_config(device="cpu", budget_mib=1000))


def test_slots_count_where_they_lie():
    same = lines(launch(device="cuda:0", budget_mib=800).stages[1])
    other = lines(launch(device="auto", budget_mib=800).stages[1])
    assert same["hand-off slots"] > 0
    assert other["hand-off slots"] == 0  # in host memory, on the receiver's node
    small = fake_rig(devices=TWO, cpus=NODES, available_bytes=64 * MIB)
    with pytest.raises(PlanError, match="host memory: the stages need"):
        plan_launch(MODEL, small, fake_config(device="auto", budget_mib=800))


# --- routes and nodes --------------------------------------------------------------------------------------


def test_routes_are_planned_and_said():
    plan = launch(device=("cuda:0", "cuda:0", "cuda:1", "cpu"), boundaries=(8, 16, 24), budget_mib=600)
    assert [stage.route for stage in plan.stages] == ["device", "host", "host", None]
    said = [note for note in plan.notes if note.startswith("hand-off ")]
    assert said == [
        "hand-off 0 -> 1: device route, both on cuda:0",
        "hand-off 1 -> 2: host route, from cuda:0 to cuda:1: the driver grants no peer access",
        "hand-off 2 -> 3: host route, from cuda:1 to cpu",
    ]
    assert not any("hand-off" in note for note in launch(devices=(), device="cpu").notes)


def test_a_stage_is_bound_to_its_gpus_node():
    plan = launch(device=("cuda:1", "cuda:0"), budget_mib=600)
    assert [stage.numa_node for stage in plan.stages] == [1, 0]


def test_an_unknown_node_binds_nothing_on_a_host_of_several_and_the_one_on_a_host_of_one():
    lost = (fake_device(numa_node=-1),)
    plan = launch(devices=lost, device="cuda:0", budget_mib=600)
    assert [stage.numa_node for stage in plan.stages] == [-1, -1]
    assert any("stage 1: not bound, since the NUMA node of cuda:0 is not known" in one for one in plan.notes)
    plan = launch(devices=lost, cpus=((0, 1),), device="cuda:0", budget_mib=600)
    assert [stage.numa_node for stage in plan.stages] == [0, 0]
    plan = launch(devices=lost, device="cuda:0", budget_mib=600, stage="numa_node = 1")
    assert [stage.numa_node for stage in plan.stages] == [1, 1]


# --- window and uploads ------------------------------------------------------------------------------------

BIG = fake_model(num_layers=8, num_experts=64, hidden_size=1024, widths=(512,) * 8)  # blobs of about 1 MiB


def test_copies_are_large_and_the_window_holds_whole_ones():
    plan = plan_launch(
        BIG, fake_rig(devices=TWO), fake_config(boundaries=(4,), device="cuda:0", budget_mib=2500)
    )
    for stage in plan.stages:
        blob = BIG.expert_blob_bytes(stage.first_layer)
        assert (stage.upload_group - 1) * blob < 16 * MIB <= stage.upload_group * blob
        assert stage.window_slots % stage.upload_group == 0
        assert stage.window_slots >= 2 * stage.upload_group
        assert stage_assignment(plan, stage.stage, BIG).upload_group == stage.upload_group


def test_the_window_spans_two_layers_where_there_is_room_and_one_on_the_cpu():
    for device, layers in (("cuda:0", 2), ("cpu", 1)):
        config = fake_config(boundaries=(), device=device, budget_mib=650, prefill="reserved_tokens = 512")
        (stage,) = plan_launch(BIG, fake_rig(devices=TWO), config).stages
        most = max(64 - len(resident) for resident in stage.resident_experts)
        assert 0 < stage.num_resident < 8 * 64
        assert layers * most <= stage.window_slots < layers * most + stage.upload_group


def test_a_copy_is_no_larger_than_a_layer_or_half_of_the_window_that_was_asked_for():
    plan = launch(device="cuda:0", budget_mib=600)
    assert {stage.upload_group for stage in plan.stages} == {16}
    config = fake_config(boundaries=(4,), device="cuda:0", budget_mib=2500, rest="[memory]\nwindow_mib = 20")
    for stage in plan_launch(BIG, fake_rig(devices=TWO), config).stages:
        window = lines(stage)["window"]
        assert window <= 20 * MIB
        assert 1 < 2 * stage.upload_group <= stage.window_slots


def test_cpu_stages_copy_one_expert_at_a_time():
    assert {stage.upload_group for stage in launch(devices=()).stages} == {1}


# --- rates -------------------------------------------------------------------------------------------------


def test_a_faster_link_is_a_faster_prediction_and_the_source_is_said():
    def copy_rate(**facts: object) -> float:
        plan = launch(devices=(fake_device(**facts),), device="cuda:0", budget_mib=600)
        return plan.stages[0].costs.copy_bytes_per_s

    assert copy_rate() == pytest.approx(1.969e9 * 16 * 0.85)
    assert copy_rate(max_link_generation=5) == pytest.approx(3.938e9 * 16 * 0.85)
    assert copy_rate(link_width=4) == pytest.approx(1.969e9 * 4 * 0.85)
    assert copy_rate(link_width=0, max_link_width=0) == pytest.approx(0.985e9 * 16 * 0.85)
    plan = launch(device="cuda:0", budget_mib=600)
    assert "stage 0: cuda:0, NVIDIA GeForce RTX 4090, bf16, 26.8 GB/s assumed, PCIe 4 x16" in plan.notes


def test_rows_cross_a_card_faster_than_a_link():
    same = launch(device="cuda:0", budget_mib=800).stages[0].costs
    other = launch(device="auto", budget_mib=800).stages[0].costs
    assert same.hand_off_bytes_per_s > other.hand_off_bytes_per_s == other.copy_bytes_per_s
