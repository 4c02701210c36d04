import io

import pytest
from planning_fakes import fake_config, fake_model, fake_rig
from rich.console import Console

from strata_coord.coordinator.plan_view import render_launch, render_prompt
from strata_coord.coordinator.planner import plan_launch, plan_prompt

LAUNCH = plan_launch(fake_model(num_layers=8), fake_rig(), fake_config(boundaries=(2, 4, 6), budget_mib=100))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render_launch(LAUNCH))
    console.print(render_prompt(plan_prompt(LAUNCH, 5000)))
    lines = console.file.getvalue().splitlines()
    assert lines
    assert max(map(len, lines)) <= width


def test_the_plan_shows_every_budget_line_and_every_candidate():
    console = Console(file=io.StringIO(), width=160, color_system=None)
    prompt = plan_prompt(LAUNCH, 5000)
    console.print(render_launch(LAUNCH))
    console.print(render_prompt(prompt))
    text = console.file.getvalue()
    for line in LAUNCH.stages[0].lines:
        assert line.name in text
    for candidate in prompt.candidates:
        assert f"{candidate.predicted_ttft_s:.3f}" in text
    assert "chosen" in text
    assert prompt.reason in text.replace("\n", " ")
