import json
from pathlib import Path

import pytest

from strata_coord.coordinator import cli
from strata_coord.coordinator.plan import launch_plan_from_json

CONFIG = """
[model]
path = "tiny.gguf"
context_tokens = 2048
[split]
boundaries = [2]
[[stage]]
device = "cpu"
vram_budget_mib = 64
[[stage]]
device = "cpu"
vram_budget_mib = 64
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration of two stages beside the model that the make-model command wrote."""
    folder = tmp_path_factory.mktemp("plan")
    assert run("make-model", "qwen3moe", str(folder / "tiny.gguf"), "--like", "tiny", "--layers", "4") == 0
    (folder / "c.toml").write_text(CONFIG)
    return folder / "c.toml"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_plan_is_shown_with_its_reason_and_candidates(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", str(config), "--prompt-tokens", "1000") == 0
    shown = capsys.readouterr().out
    assert "prompt of 1000 tokens" in shown
    assert all(words in shown for words in ("Candidates", "chosen", "budget", "layer-major"))


def test_the_plan_as_json_covers_the_prompt(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", str(config), "--prompt-tokens", "1000", "--mode", "layer-major", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(plan["prompt"]["super_chunks"]) == 1000
    assert plan["prompt"]["mode"] == "layer-major"
    assert plan["launch"]["boundaries"] == [2]


def test_a_prompt_without_a_length_fits_the_context(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", str(config), "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"]["prompt_tokens"] == 2048


def test_a_saved_plan_can_be_read_back(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert run("plan", str(config), "--out", str(out), "--json") == 0
    launch = json.loads(capsys.readouterr().out)["launch"]
    saved = launch_plan_from_json(out.read_text())
    assert list(saved.boundaries) == launch["boundaries"]
    assert saved.super_chunk_tokens == launch["super_chunk_tokens"]


def test_another_machine_is_planned_from_its_rig_file(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from strata_coord.coordinator.probe import probe_rig
    from strata_coord.coordinator.rig import rig_to_toml

    rig = tmp_path / "rig.toml"
    rig.write_text(rig_to_toml(probe_rig(measure=False)))
    assert run("plan", str(config), "--rig", str(rig), "--json") == 0
    assert json.loads(capsys.readouterr().out)["launch"]["num_layers"] == 4
    rig.write_bytes(b"\xff")
    assert run("plan", str(config), "--rig", str(rig)) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "stage.0.vram_budget_mib=1"], 3, ["stage 0"]),
        (["--set", "prefill.mood=auto"], 2, ["prefill", "mood", "mode"]),
        (["--model", "absent.gguf"], 6, ["absent.gguf"]),
    ],
)
def test_a_refused_plan_is_one_line_and_its_own_exit_code(
    arguments: list[str], code: int, words: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", str(config), *arguments) == code
    stderr = capsys.readouterr().err
    assert all(word in stderr for word in words)
    assert stderr.count("\n") == 1


def test_make_model_says_what_it_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert run("make-model", "qwen4exp", str(out), "--like", "tiny", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["path"], made["architecture"]) == (str(out), "qwen4exp")
    assert made["num_bytes"] == out.stat().st_size
    assert run("make-model", "qwen4exp", str(out), "--like", "tiny") == 2
    assert "--force" in capsys.readouterr().err
    assert run("inspect", str(out), "--json") == 0
    assert json.loads(capsys.readouterr().out)["geometry"]["architecture"] == "qwen4exp"
    assert run("inspect", str(out)) == 0
    assert "qwen4exp" in capsys.readouterr().out


def test_inspecting_what_is_no_model_is_exit_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model")
    assert run("inspect", str(path)) == 6
    assert "x.gguf" in capsys.readouterr().err
