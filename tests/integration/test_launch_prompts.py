"""Prompts as users give them: text, files, standard input, one line after the other."""

import json
from pathlib import Path

import pytest
from launch_rig import run, write_config
from oracle.fixtures import TinyCase

from strata_coord.coordinator.builtin_model import builtin_model_path

TEXT = "Tea, bread, 12 eggs and a pan: naïve café, 東京."


@pytest.fixture(scope="module")
def four_stages(tiny_qwen4exp_q: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("four"), tiny_qwen4exp_q.path, boundaries=(2, 4, 6), budgets_mib=(48,) * 4
    )


@pytest.fixture(scope="module")
def one_stage(tiny_qwen4exp_q: TinyCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("one"), tiny_qwen4exp_q.path, boundaries=(), budgets_mib=(64,)
    )


def test_four_stages_say_what_one_says_and_draws_are_reproducible(
    four_stages: Path, one_stage: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(TEXT)
    drawing = [
        "--set",
        "decode.temperature=1.2",
        "--set",
        "decode.seed=5",
        "--max-tokens",
        "12",
        "--raw",
        "--json",
    ]
    four = run("launch", four_stages, "--prompt-file", prompt, *drawing)
    one = run("launch", one_stage, "-", *drawing, stdin=TEXT.encode())
    assert (four.code, one.code) == (0, 0), four.stderr + one.stderr
    assert [stage["first_layer"] for stage in four.report["stages"]] == [0, 2, 4, 6]
    assert [stage["route"] for stage in four.report["stages"]] == ["host", "host", "host", None]
    assert four.report["text"] == one.report["text"]
    assert four.report["prompt_tokens"] == one.report["prompt_tokens"]


def test_a_piped_prompt_loop_answers_line_after_line_and_survives_bad_ones(one_stage: Path) -> None:
    lines = [
        b"first prompt",
        b"",
        b"word " * 3000,  # longer than the context
        b"not UTF-8: \xff\xfe",
        b"first prompt",
    ]
    done = run("launch", one_stage, "--max-tokens", "4", stdin=b"\n".join(lines) + b"\n")
    assert done.code == 0, done.stderr
    assert any("context" in line for line in done.errors)
    assert all(line.startswith("strata-coord: ") for line in done.errors)
    answers = done.stdout.split("\n")
    assert len(done.errors) <= 2
    # Four tokens may hold a newline of their own; the first and the last answer are the same all the same.
    half = done.stdout[: len(done.stdout) // 2]
    assert done.stdout == half * 2 or answers[0] == answers[-2], done.stdout


def test_an_answer_without_the_room_it_may_take_says_so(one_stage: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([5] * 60))
    limits = ["--set", "model.context_tokens=64", "--prompt-ids", ids, "--json"]
    cut = run("launch", one_stage, *limits, "--max-tokens", "9")
    assert cut.code == 0, cut.stderr
    assert cut.report["generated_tokens"] <= 4
    assert "model.context_tokens leaves the answer room for 4 of the 9 tokens" in cut.stderr
    whole = run("launch", one_stage, *limits, "--max-tokens", "4")
    assert whole.code == 0, whole.stderr
    assert "room" not in whole.stderr


def test_the_chat_template_is_used_unless_raw(one_stage: Path) -> None:
    """The number of tokens tells; a context that is too short is told before any stage starts."""
    short = ["--set", "model.context_tokens=64", "--max-tokens", "1", "--json"]
    text = "word " * 500
    with_template = run("launch", one_stage, "--prompt", text, *short)
    raw = run("launch", one_stage, "--prompt", text, "--raw", *short)
    assert (with_template.code, raw.code) == (1, 1)

    def tokens(line: str) -> int:
        return int(next(word for word in line.split() if word.replace(",", "").isdigit()).replace(",", ""))

    assert tokens(with_template.errors[0]) > tokens(raw.errors[0]) > 64


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_shipped_configuration_answers(tmp_path: Path) -> None:
    builtin_model_path("split24")  # built here if need be, outside the launch's own time
    shipped = Path(__file__).parents[2] / "configs" / "split24.toml"
    done = run(
        "launch", shipped, "--prompt", "Hello, who are you?", "--max-tokens", "4", "--json", timeout_s=120
    )
    assert done.code == 0, done.stderr
    report = done.report
    assert [(stage["first_layer"], stage["last_layer"]) for stage in report["stages"]] == [(0, 24), (24, 48)]
    assert report["plan"]["boundaries"] == [24]
    assert report["expert_bytes"]["moved"] == report["expert_bytes"]["once"] > 0
    assert json.dumps(report["text"])
