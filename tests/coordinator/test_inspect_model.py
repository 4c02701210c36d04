import io
import json
import re
from pathlib import Path

import handmade_gguf as made
import pytest
from real_geometries import flash_next
from rich.console import Console

from strata_coord.coordinator.inspect_model import _state, inspect, render
from strata_coord.coordinator.model_index import load_model_index
from strata_coord.ipc.assignment import KV_PAGE_TOKENS
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.sequence_state import StatePool


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


def test_state_is_what_a_stage_allocates(tmp_path: Path) -> None:
    for number, (keys, shapes) in enumerate((made.qwen3moe(), made.qwen4exp())):
        path = made.write_model(tmp_path / f"{number}.gguf", keys, shapes)
        state = inspect(path)["state"]
        geometry = load_model_index(path).geometry
        for kv_dtype, per_token in state["bytes_per_token"].items():
            pool = StatePool(
                geometry,
                0,
                geometry.num_layers,
                kv_dtype=kv_dtype,
                kv_pool_tokens=KV_PAGE_TOKENS,
                max_sequences=1,
                device="meta",
            )
            per_sequence = dict(state["bytes_per_sequence"])
            del per_sequence["ngram_ids"]  # read from the token table, which all stages share
            told = KV_PAGE_TOKENS * sum(per_token.values()) + sum(per_sequence.values())
            assert pool.num_bytes == told, kv_dtype


def test_state_of_the_real_model_is_the_published_one() -> None:
    state = _state(flash_next())
    per_token = {kind: found["key_values"] for kind, found in state["bytes_per_token"].items()}
    assert per_token == {"fp32": 49_152, "fp16": 24_576, "bf16": 24_576, "int8": 12_480}
    assert state["bytes_per_token"]["fp16"]["indexer_keys"] == 2 * 768  # fp32 here, fp16 there
    assert state["bytes_per_sequence"] == {
        "recurrent": 36 * 3_145_728,
        "convolution": 36 * 122_880,
        "incomplete_block": 12 * 3 * 128 * 4,
        "ngram_convolution": 368_640,
        "ngram_ids": 16,
    }


def test_state_is_shown(report: dict, tmp_path: Path) -> None:
    text = shown(report, 200)
    assert re.search(r"state per token +fp32 \d", text)
    assert re.search(r"state per sequence +[\d.]+ KiB \(recurrent ", text)
    plain = inspect(made.write_model(tmp_path / "plain.gguf", *made.qwen3moe()))
    assert "state per sequence  none besides" in shown(plain, 200)
