import json
from dataclasses import replace

import pytest
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator.plan import (
    differences,
    launch_plan_from_json,
    prompt_plan_from_json,
    to_json,
)
from strata_coord.coordinator.planner import plan_launch, plan_prompt
from strata_coord.ipc.errors import ConfigError

LAUNCH = plan_launch(fake_model(num_layers=8), fake_rig(), fake_config(boundaries=(4,), budget_mib=100))
PROMPT = plan_prompt(LAUNCH, 3000)


def test_plans_are_read_back_unchanged():
    assert launch_plan_from_json(to_json(LAUNCH)) == LAUNCH
    assert prompt_plan_from_json(to_json(PROMPT)) == PROMPT


def test_a_plan_that_was_read_back_plans_prompts_the_same():
    assert plan_prompt(launch_plan_from_json(to_json(LAUNCH)), 3000) == PROMPT


def changed(**values):
    return json.dumps(json.loads(to_json(LAUNCH)) | values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: not valid JSON"),
        ("[]", r"plan: expected an object, got \[\]"),
        (changed(version=99), "plan.version: expected 2, got 99; make the plan again"),
        (changed(extra=1), "plan.extra: unknown"),
        (changed(slot_rows="a"), "plan.slot_rows: expected a whole number, got 'a'"),
        (changed(slot_rows=True), "plan.slot_rows: expected a whole number, got True"),
        (changed(upload="none"), "plan.upload: expected 'auto' or 'stream-all' or 'routed-only', got 'none'"),
        (changed(stream_all_share=float("nan")), "plan.stream_all_share: expected a finite number"),
        (changed(stages=[{}]), r"plan\.stages\.0\.stage: missing"),
        (changed(notes=[1]), r"plan\.notes\.0: expected a text, got 1"),
    ],
)
def test_a_damaged_plan_is_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        launch_plan_from_json(text)
    assert "\n" not in str(caught.value)


def test_differences_name_the_values():
    assert differences(LAUNCH, LAUNCH) == ()
    other = replace(LAUNCH, slot_rows=64, notes=("a", "b", "c", "d"))
    found = differences(LAUNCH, other)
    assert f"plan.slot_rows: {LAUNCH.slot_rows} -> 64" in found
    assert len(found) == 2
