from dataclasses import replace

import pytest
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator.assignments import check_plan_fits
from strata_coord.coordinator.plan import launch_plan_from_json, to_json
from strata_coord.coordinator.planner import plan_launch
from strata_coord.ipc.errors import ConfigError

MODEL = fake_model(num_layers=8)
LAUNCH = plan_launch(MODEL, fake_rig(), fake_config(boundaries=(4,), budget_mib=150))


def test_a_plan_fits_the_model_it_was_made_for():
    check_plan_fits(launch_plan_from_json(to_json(LAUNCH)), MODEL, name="p.json")
    with pytest.raises(ConfigError):
        check_plan_fits(replace(LAUNCH, architecture="qwen3moe"), MODEL, name="p.json")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (fake_model(num_layers=12), "p.json: made for layers 8, but the model has 12; make the plan again"),
        (fake_model(num_layers=8, num_experts=32), "made for experts 16, but the model has 32"),
        (fake_model(num_layers=8, experts_per_token=2), "made for experts per token 4, but the model has 2"),
        (fake_model(num_layers=8, streams=2), "made for row bytes 4096, but the model has 2048"),
    ],
)
def test_a_plan_of_another_model_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        check_plan_fits(LAUNCH, model, name="p.json")


def test_a_plan_whose_stages_do_not_cover_the_layers_is_refused():
    moved = replace(LAUNCH, boundaries=(5,))
    with pytest.raises(ConfigError, match="do not fit boundaries"):
        check_plan_fits(moved, MODEL, name="p.json")
    first = replace(LAUNCH.stages[0], resident_experts=((99,), (), (), ()))
    with pytest.raises(ConfigError, match="stage 0 must place experts 0-15 of 4 layers"):
        check_plan_fits(replace(LAUNCH, stages=(first, LAUNCH.stages[1])), MODEL, name="p.json")
