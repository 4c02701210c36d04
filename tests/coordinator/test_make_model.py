"""make-model: files that our reader and transformers both accept, sizes as published, nothing left behind."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from oracle.export import load_gguf
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model

from strata_coord.coordinator import synthetic_model
from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.inspect_model import inspect
from strata_coord.coordinator.make_model import make_model
from strata_coord.coordinator.model_geometry import FAMILIES
from strata_coord.coordinator.model_index import load_model_index
from strata_coord.coordinator.synthetic_blocks import IQ4_NL, Q2_0, Q4_K, Q5_1, Q6_K, Q8_0
from strata_coord.coordinator.synthetic_geometry import PRESETS, synthetic_shape
from strata_coord.coordinator.synthetic_model import write_synthetic_model
from strata_coord.coordinator.synthetic_ngram import ngram_geometry, ngram_table_rows
from strata_coord.coordinator.synthetic_tensors import planned_tensors
from strata_coord.coordinator.synthetic_types import TypeRecipe, recipe_for, with_types
from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from strata_coord.ipc.assignment import ModelGeometry

ARCHITECTURES = tuple(PRESETS)
_FLASH_VOCABULARY = VocabularyShape(
    num_rows=248_320, end_of_text=248_044, num_real=248_077, pre_tokenizer="qwen35"
)


def _in_float32(value: Any) -> Any:
    """Return value with its floats as a file holds them."""
    if isinstance(value, dict):
        return {key: _in_float32(part) for key, part in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


def _tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("layers", [None, 1, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_our_reader_finds_the_geometry_that_was_asked_for(
    tmp_path: Path, architecture: str, layers: int | None
) -> None:
    made = make_model(architecture, tmp_path / "m.gguf", layers=layers, vocabulary_rows=384)
    wanted = synthetic_shape(architecture, like="tiny", layers=layers, vocabulary_rows=384).geometry
    found = load_model_index(made.path).geometry
    assert _in_float32(dataclasses.asdict(found)) == _in_float32(dataclasses.asdict(wanted))
    assert made.num_layers == found.num_layers == (layers or made.num_layers)
    assert made.num_bytes == made.path.stat().st_size


def test_every_supported_architecture_can_be_made() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)
    assert all("tiny" in presets and len(presets) > 1 for presets in PRESETS.values())


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen4exp"])
def test_transformers_runs_the_model_and_its_values_are_sane(tmp_path: Path, architecture: str) -> None:
    made = make_model(architecture, tmp_path / "m.gguf", layers=4, vocabulary_rows=512)
    vocabulary = synthetic_shape(architecture, like="tiny", layers=4, vocabulary_rows=512).vocabulary
    config: dict[str, Any] = {"eos_token_id": vocabulary.end_of_text, "vocab_size": 512}
    if architecture == "qwen4exp":
        config |= {
            "heads_per_ngram": 4,
            "ngram_vocab_size_base": 1_000,
            "make_ngram_vocab_size_divisible_by": 128,
        }
    model = tiny_model(
        architecture, TinyOptions(num_layers=4, is_drawn=False, indexer_budget=512, config=config)
    )
    load_gguf(model, made.path)
    logits = reference_logits(model, list(range(40)))
    assert 0.7 < float(logits.std()) < 2.5
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_ngram_constants_are_the_published_ones() -> None:
    ngram = ngram_geometry(_FLASH_VOCABULARY, heads_per_ngram=8, row_width=160, base=20_000_000)
    assert ngram.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert ngram.head_vocab_sizes[0] == 20_000_003
    assert ngram.head_offsets[:2] == (0, 20_000_003)
    assert sum(ngram.head_vocab_sizes) == 320_001_446
    assert ngram_table_rows(ngram) == 320_001_536


def test_flash_next_has_the_published_size_to_the_byte() -> None:
    geometry = synthetic_shape("qwen4exp", like="flash-next", layers=None).geometry
    ngram = ngram_geometry(_FLASH_VOCABULARY, heads_per_ngram=8, row_width=160, base=20_000_000)
    geometry = dataclasses.replace(geometry, ngram=ngram)
    total = sum(tensor.num_bytes for tensor in planned_tensors(geometry, recipe_for("flash-next", geometry)))
    assert total == 111_323_630_080


@pytest.mark.parametrize(
    ("architecture", "like", "experts", "rest"),
    [
        ("qwen3moe", "qwen3-30b-a3b", 28.99e9, 1.54e9),
        ("qwen3moe", "qwen3-235b-a22b", 227.1e9, 8.0e9),
        ("qwen3next", "qwen3-next-80b-a3b", 77.31e9, 2.36e9),
        ("qwen35moe", "qwen3.5-35b-a3b", 32.21e9, 2.45e9),
        ("qwen4exp", "flash-next", 120.80e9, 4.89e9),
        ("qwen3vlmoe", "qwen3-vl-30b-a3b", 28.99e9, 1.54e9),
        ("qwen2moe", "qwen2-57b-a14b", 49.3e9, 8.1e9),
        ("llama", "mixtral-8x7b", 45.1e9, 1.6e9),
        ("glm4moe", "glm-4.5-air", 99.7e9, 7.1e9),
        ("gpt-oss", "gpt-oss-20b", 19.1e9, 1.8e9),
        ("gpt-oss", "gpt-oss-120b", 114.7e9, 2.17e9),
    ],
)
def test_published_models_have_their_number_of_parameters(
    architecture: str, like: str, experts: float, rest: float
) -> None:
    geometry = synthetic_shape(architecture, like=like, layers=None).geometry
    counts = {True: 0, False: 0}
    for tensor in planned_tensors(geometry, recipe_for(like, geometry)):
        if tensor.name != "per_layer_token_embd.weight":
            counts["_exps.weight" in tensor.name] += int(np.prod(tensor.shape, dtype=np.int64))
    assert counts[True] == pytest.approx(experts, rel=2e-3)
    assert counts[False] == pytest.approx(rest, rel=2e-2)


def test_q4_k_m_gives_down_more_bits_in_half_of_the_layers() -> None:
    geometry = synthetic_shape("qwen3moe", like="qwen3-30b-a3b", layers=None).geometry
    tensors = planned_tensors(geometry, recipe_for("qwen3-30b-a3b", geometry))
    down = [tensor.ggml_type for tensor in tensors if "down_exps" in tensor.name]
    assert (down.count(Q6_K), down.count(Q4_K)) == (24, 24)


def test_types_follow_the_length_of_a_row() -> None:
    geometry = synthetic_shape("qwen4exp", like="flash-next", layers=6).geometry
    types = {
        tensor.name: tensor.ggml_type
        for tensor in planned_tensors(geometry, recipe_for("flash-next", geometry))
    }
    assert types["blk.0.ffn_gate_exps.weight"] == Q4_K
    assert types["blk.0.ffn_down_exps.weight"] == Q5_1
    assert types["blk.4.ffn_down_exps.weight"] == Q8_0
    assert types["blk.3.attn_q.weight"] == Q8_0
    assert types["per_layer_token_embd.weight"] == IQ4_NL


def test_same_seed_same_bytes_and_another_seed_other_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model("qwen3moe", tmp_path / name, layers=1, seed=seed, vocabulary_rows=384)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again
    assert first != other
    assert len(first) == len(other)


def test_a_model_with_more_layers_begins_with_the_same_layers(tmp_path: Path) -> None:
    for layers in (1, 2):
        make_model("qwen3moe", tmp_path / str(layers), layers=layers, vocabulary_rows=384)
    short, long = _tensors(tmp_path / "1"), _tensors(tmp_path / "2")
    name = "blk.0.ffn_gate_exps.weight"
    assert np.array_equal(short[name].data, long[name].data)
    assert not np.array_equal(long[name].data, long["blk.1.ffn_gate_exps.weight"].data)


def test_a_type_that_the_gguf_package_does_not_know_is_written(tmp_path: Path) -> None:
    shape = synthetic_shape("qwen3moe", like="tiny", layers=1, vocabulary_rows=384)
    path = tmp_path / "m.gguf"
    write_synthetic_model(path, shape, TypeRecipe(gate_up=Q2_0, down=Q2_0), name="two bits", seed=0)
    experts = load_model_index(path).expert_tensors(0)
    assert [(tensor.ggml_type, tensor.num_bytes) for tensor in experts] == [
        (42, 16 * 64 * 256 // 64 * 18)
    ] * 3


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make_model(
        "qwen3moe",
        tmp_path / "m.gguf",
        layers=1,
        vocabulary_rows=384,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert {total for _, total in seen} == {seen[-1][1]}


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"m\.gguf: is there already .*--force"):
        make_model("qwen3moe", path, layers=1)
    assert path.read_text() == "mine"
    make_model("qwen3moe", path, layers=1, vocabulary_rows=384, force=True)
    assert path.read_bytes()[:4] == b"GGUF"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_model("qwen3moe", tmp_path / "m.gguf", vocabulary_rows=384, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_names_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=3 << 20))
    with pytest.raises(ConfigError, match=r"needs \d{5} MiB, .* has 3 MiB free"):
        make_model("qwen3moe", tmp_path / "m.gguf", like="qwen3-30b-a3b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("gemma",), {}, 'architecture "gemma".*qwen3moe, .*qwen4exp'),
        (("qwen3moe",), {"like": "flash-next"}, '"flash-next"; known are tiny, qwen3-30b-a3b'),
        (("qwen3moe",), {"layers": 0}, "0 layers.*1 to 1000"),
        (("qwen3moe",), {"vocabulary_rows": 100}, "100 rows is too small; the smallest is 320"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_model(*arguments, tmp_path / "m.gguf", **options)
    assert "\n" not in str(caught.value)


def test_the_smallest_vocabulary_that_the_message_names_can_be_made(tmp_path: Path) -> None:
    geometry: ModelGeometry = load_model_index(
        make_model("qwen3moe", tmp_path / "m.gguf", layers=1, vocabulary_rows=320).path
    ).geometry
    assert geometry.vocabulary_size == 320
    with pytest.raises(ConfigError):
        synthetic_shape("qwen3moe", like="tiny", layers=1, vocabulary_rows=319)


def test_a_folder_that_is_missing_or_a_folder_as_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        make_model("qwen3moe", tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        make_model("qwen3moe", tmp_path / "missing" / "m.gguf", layers=1)


# --- types that a user names --------------------------------------------------------------------------


def _types_of(path: Path) -> dict[str, int]:
    return {name: tensor.ggml_type for name, tensor in load_model_index(path).tensors.items()}


def test_named_types_are_taken_for_their_kind_alone(tmp_path: Path) -> None:
    types = "experts=q2_k, down=Q2_0,dense=Q6_K,embedding=Q4_K,output=F16"
    found = _types_of(
        make_model("qwen3moe", tmp_path / "m.gguf", layers=1, vocabulary_rows=384, types=types).path
    )
    named = {name: GGML_TYPES[kind].name for name, kind in found.items()}
    assert named["blk.0.ffn_gate_exps.weight"] == named["blk.0.ffn_up_exps.weight"] == "Q2_K"
    assert named["blk.0.ffn_down_exps.weight"] == "Q2_0"
    assert named["blk.0.attn_q.weight"] == "Q6_K"
    assert (named["token_embd.weight"], named["output.weight"]) == ("Q4_K", "F16")
    assert named["blk.0.attn_norm.weight"] == named["blk.0.ffn_gate_inp.weight"] == "F32"


def test_narrow_names_the_type_of_rows_that_do_not_fit() -> None:
    geometry = synthetic_shape("qwen4exp", like="flash-next", layers=4).geometry
    recipe = with_types(recipe_for("flash-next", geometry), "experts=IQ3_S,dense=Q6_K,narrow=IQ4_NL")
    named = {tensor.name: GGML_TYPES[tensor.ggml_type].name for tensor in planned_tensors(geometry, recipe)}
    assert named["blk.0.ffn_up_exps.weight"] == named["blk.2.ffn_up_exps.weight"] == "IQ3_S"
    assert named["blk.0.ffn_down_exps.weight"] == "IQ4_NL"
    assert (named["blk.0.hc_attn_down.weight"], named["blk.0.hc_attn_up.weight"]) == ("Q6_K", "IQ4_NL")


@pytest.mark.parametrize(
    ("types", "text"),
    [
        (
            "down=Q4_K",
            r"down=Q4_K does not fit blk\.0\.ffn_down_exps\.weight.*64 values.*these fit: F32.*Q2_0",
        ),
        ("experts=Q4_K", r"down=Q4_K does not fit blk\.0\.ffn_down"),
        ("experts=Q4_K,narrow=Q3_K", r"narrow=Q3_K does not fit blk\.0\.ffn_down"),
        ("gate=Q4_K", '"gate" is not known; known are experts, gate_up'),
        ("experts", 'experts: "" is not a type'),
        ("experts=Q8_K", '"Q8_K" is not a type; known are F32, F16'),
        ("experts=F32,experts=F16", '"experts" is given twice'),
        ("", '"" is not known'),
    ],
)
def test_types_that_cannot_be_are_refused_in_one_line(tmp_path: Path, types: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_model("qwen3moe", tmp_path / "m.gguf", layers=1, types=types)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# --- large files ----------------------------------------------------------------------------------------


def test_inspect_tells_the_truth_about_the_published_file(tmp_path: Path) -> None:
    made = make_model("qwen4exp", tmp_path / "m.gguf", like="flash-next", header_only=True)
    totals = inspect(made.path)["totals"]
    assert (totals["tensor_bytes"], totals["tensors"]) == (111_323_630_080, 1224)
    assert totals["ngram_bytes"] == 28_800_138_240
    parts = ("expert_bytes", "dense_bytes", "embedding_bytes", "head_bytes", "ngram_bytes")
    assert sum(totals[part] for part in parts) == totals["tensor_bytes"]
    assert made.num_bytes > 111_323_630_080
    assert made.path.stat().st_blocks * 512 < 64 << 20


def test_pieces_beyond_the_first_are_its_rows_in_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _tensors(make_model("qwen3moe", tmp_path / "a", layers=1, vocabulary_rows=384).path)
    monkeypatch.setattr(synthetic_model, "_PIECE_BYTES", 100 * 144 + 1)  # 100 rows of experts
    pieces = _tensors(make_model("qwen3moe", tmp_path / "b", layers=1, vocabulary_rows=384).path)
    name = "blk.0.ffn_gate_exps.weight"
    rows = pieces[name].data.reshape(-1, 144)
    assert rows.shape == whole[name].data.reshape(-1, 144).shape == (1_024, 144)
    first = {row.tobytes() for row in rows[:100]}
    assert len(first) == 100
    assert {row.tobytes() for row in rows} == first
    assert len({rows[at : at + 64].tobytes() for at in range(0, 1_024, 64)}) == 16  # experts differ
    assert np.array_equal(whole["output_norm.weight"].data, pieces["output_norm.weight"].data)
