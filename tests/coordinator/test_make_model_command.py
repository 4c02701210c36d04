"""make-model from the command line: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from strata_coord.coordinator import cli
from strata_coord.coordinator.inspect_model import inspect

if TYPE_CHECKING:
    from pathlib import Path


def exit_code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_types_and_layers_reach_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    options = ["--layers", "1", "--types", "experts=Q2_0,dense=Q8_0", "--seed", "3", "--json"]
    assert exit_code_of("make-model", "glm4moe", str(out), *options) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["architecture"], made["num_layers"], made["seed"]) == ("glm4moe", 1, 3)
    assert made["num_bytes"] == out.stat().st_size
    assert inspect(out)["layers"][0]["expert_types"] == ["Q2_0"] * 3


def test_a_header_alone_has_true_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, header = tmp_path / "whole.gguf", tmp_path / "header.gguf"
    assert exit_code_of("make-model", "llama", str(whole), "--layers", "2") == 0
    assert exit_code_of("make-model", "llama", str(header), "--layers", "2", "--header-only") == 0
    assert "2 layers" in capsys.readouterr().out
    assert header.stat().st_size == whole.stat().st_size
    assert inspect(header)["totals"] == inspect(whole)["totals"]


def test_a_type_that_does_not_fit_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert exit_code_of("make-model", "qwen3moe", str(out), "--types", "down=Q4_K") == 2
    assert "down=Q4_K does not fit blk.0.ffn_down_exps.weight" in capsys.readouterr().err
    assert not out.exists()
