"""Wrong inputs: one line, the right exit code, and no process started."""

import json
import os
from pathlib import Path

import pytest
from launch_rig import Ran, run, write_config
from oracle.fixtures import TinyCase


@pytest.fixture
def config(tiny_qwen3moe_f32: TinyCase, tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_qwen3moe_f32.path)


def refused(done: Ran, code: int, *words: str) -> None:
    assert done.code == code, done.stderr
    assert len(done.errors) == 1, done.stderr
    for word in words:
        assert word in done.errors[0]
    assert "ready" not in done.stderr


def test_a_missing_configuration(tmp_path: Path) -> None:
    refused(run("launch", tmp_path / "none.toml", "--prompt", "x"), 2, "none.toml", "No such file")


def test_a_configuration_that_is_not_toml(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[model\npath = 3")
    refused(run("launch", path, "--prompt", "x"), 2, "bad.toml", "TOML", "line 1")


def test_a_truncated_model(config: Path, tiny_qwen3moe_f32: TinyCase, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_qwen3moe_f32.path.read_bytes()[:-100_000])
    refused(run("launch", config, "--model", cut, "--prompt", "x", "--json"), 6, "cut.gguf")


def test_a_file_that_is_no_model(config: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello " * 100)
    refused(run("launch", config, "--model", text, "--prompt", "x"), 6, "text.gguf")


def test_a_plan_that_does_not_fit(config: Path) -> None:
    done = run("launch", config, "--prompt", "x", "--set", "stage.1.vram_budget_mib=1")
    refused(done, 3, "stage 1", "MiB", "vram_budget_mib")


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "at least one"), ("[1, 512]", "entry 1 is 512"), ("{", "JSON"), ("[true]", "entry 0 is True")],
)
def test_wrong_token_ids(config: Path, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    refused(run("launch", config, "--prompt-ids", path), 2, "ids.json", words)


def test_an_empty_prompt(config: Path) -> None:
    done = run("launch", config, "--raw", "-", stdin=b"")
    assert done.code in {1, 2}
    refused(done, done.code, "empty")


def test_a_prompt_that_is_not_text(config: Path) -> None:
    refused(run("launch", config, "-", stdin=b"ab\xff"), 2, "standard input", "UTF-8", "byte 2")


def test_text_for_a_model_without_a_vocabulary(config: Path, bare_model: Path) -> None:
    refused(run("launch", config, "--model", bare_model, "--prompt", "x"), 2, "vocabulary", "--prompt-ids")


def test_logits_that_cannot_be_written(config: Path, tmp_path: Path) -> None:
    """Told before any stage is loaded, as every wrong input is."""
    folder = tmp_path / "folder"
    folder.mkdir()
    refused(run("launch", config, "--prompt", "x", "--logits", folder), 2, "folder")


def test_a_runtime_directory_that_others_may_enter(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strata-coord").mkdir()
    os.chmod(tmp_path / "strata-coord", 0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    refused(run("launch", config, "--prompt", "x"), 3, "runtime directory", "0755")


def test_errors_are_json_too_if_asked(config: Path, tmp_path: Path) -> None:
    done = run("launch", config, "--model", tmp_path / "none.gguf", "--prompt", "x", "--json")
    assert done.code == 6
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == 6
    assert "none.gguf" in error["messages"][0]
