"""The shipped configurations with the packaged model: budgets that keep their promises."""

from pathlib import Path

import pytest
from planning_fakes import fake_rig

from strata_coord.coordinator.builtin_model import builtin_model_path
from strata_coord.coordinator.config import load_config
from strata_coord.coordinator.model_index import load_model_index
from strata_coord.coordinator.planner import expert_bytes_once, plan_launch, plan_prompt, stage_assignment

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load_model_index(builtin_model_path())


@pytest.mark.parametrize("name", ["split24", "single", "split_four"])
def test_every_stage_has_room_for_its_rows_and_half_of_its_experts_must_be_streamed(index, name):
    launch = plan_launch(index, fake_rig(), load_config(CONFIGS / f"{name}.toml"))
    assert (launch.super_chunk_tokens, launch.sub_chunk_tokens) == (8192, 512)
    for stage in launch.stages:
        num_experts = (stage.last_layer - stage.first_layer) * launch.num_experts
        # Some are resident, so that the cache is used; most are not, so that uploads are.
        assert 0 < stage.num_resident <= num_experts // 2
        assert stage.arena_bytes == stage.streamed_bytes


def test_split24_reads_a_prompt_of_4096_tokens_in_one_super_chunk_when_asked(index):
    launch = plan_launch(index, fake_rig(), load_config(CONFIGS / "split24.toml"))
    plan = plan_prompt(launch, 4096, mode="layer-major")
    assert plan.super_chunks == (4096,)
    assert plan.predicted_expert_bytes == expert_bytes_once(launch, index) > 0


def test_stages_of_split24_get_extents_of_their_own_half(index):
    launch = plan_launch(index, fake_rig(), load_config(CONFIGS / "split24.toml"))
    names = [{extent.name for extent in stage_assignment(launch, stage, index).tensors} for stage in (0, 1)]
    blocks = [{int(name.split(".")[1]) for name in own if name.startswith("blk.")} for own in names]
    assert blocks == [set(range(24)), set(range(24, 48))]
