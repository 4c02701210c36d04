import io
import json
from pathlib import Path

import handmade_gguf as made
import pytest
from rich.console import Console

from strata_coord.coordinator.inspect_model import inspect, render
from strata_coord.ipc.errors import ModelError


@pytest.fixture
def report(tmp_path: Path) -> dict:
    keys, shapes = made.qwen4exp()
    keys["general.name"] = "[bold]tiny\x1b[31m[/bold]"
    return inspect(made.write_model(tmp_path / "m.gguf", keys, shapes))


def shown(report: dict, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(render(report))
    return out.getvalue()


def test_the_parts_add_up_to_the_whole(report: dict) -> None:
    totals = report["totals"]
    parts = ("expert_bytes", "dense_bytes", "embedding_bytes", "head_bytes", "ngram_bytes")
    assert sum(totals[part] for part in parts) == totals["tensor_bytes"]
    assert totals["bytes_by_type"] == {"F32": totals["tensor_bytes"]}


def test_each_layer_says_its_mixer_and_sizes(report: dict) -> None:
    layers = report["layers"]
    assert [layer["mixer"] for layer in layers] == ["deltanet", "deltanet", "deltanet", "sparse attention"]
    assert [layer["ngram"] for layer in layers] == [False, True, False, False]
    assert {layer["expert_blob_bytes"] for layer in layers} == {3 * 16 * 32 * 4}
    assert layers[0]["expert_types"] == ["F32", "F32", "F32"]
    assert layers[0]["expert_bytes"] == 4 * layers[0]["expert_blob_bytes"]


def test_the_report_is_json_with_exact_integers(report: dict) -> None:
    again = json.loads(json.dumps(report, allow_nan=False))
    assert again["geometry"]["ngram"]["multipliers"] == [1 << 63, (1 << 64) - 1, 1 << 40]
    assert again["tokenizer"] is None
    assert again["chat_template"] is False


@pytest.mark.parametrize("width", [20, 40, 110])
def test_any_width_of_terminal_is_kept(report: dict, width: int) -> None:
    assert max(map(len, shown(report, width).splitlines())) <= width


def test_names_from_the_file_are_shown_as_they_are_and_escaped(report: dict) -> None:
    text = shown(report, 110)
    assert "[bold]tiny\\x1b[31m[/bold]: qwen4exp" in text
    assert "\x1b" not in text


def test_the_tables_hold_the_sizes(report: dict) -> None:
    text = shown(report, 110)
    assert "n-gram table" in text
    assert "0 2" in text
    assert "6.0 KiB" in text  # one expert
    assert "none; only --prompt-ids works" in text


def test_a_tied_head_takes_no_bytes_of_its_own(tmp_path: Path) -> None:
    keys, shapes = made.qwen3moe()
    del shapes["output.weight"]
    report = inspect(made.write_model(tmp_path / "m.gguf", keys, shapes))
    assert report["output"]["tied"] is True
    assert report["totals"]["head_bytes"] == 32 * 4
    assert "tied to the embedding" in shown(report, 110)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = made.write_model(tmp_path / "m.gguf", *made.qwen3moe())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="damaged or not fully downloaded"):
        inspect(path)
