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

from strata_coord.coordinator.make_model import make_model
from strata_coord.coordinator.model_index import load_model_index
from strata_coord.coordinator.synthetic_blocks import IQ4_NL, Q2_0, Q4_K, Q5_1, Q6_K, Q8_0
from strata_coord.coordinator.synthetic_geometry import (
    PRESETS,
    ngram_geometry,
    ngram_table_rows,
    synthetic_shape,
)
from strata_coord.coordinator.synthetic_model import write_synthetic_model
from strata_coord.coordinator.synthetic_tensors import TypeRecipe, planned_tensors, recipe_for
from strata_coord.coordinator.synthetic_vocabulary import VocabularyShape
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from strata_coord.ipc.assignment import ModelGeometry

ARCHITECTURES = tuple(PRESETS)
_FLASH_VOCABULARY = VocabularyShape(
    num_rows=248_320, end_of_text=248_044, num_real=248_077, pre_tokenizer="qwen35"
)


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
    assert found.rms_epsilon == pytest.approx(wanted.rms_epsilon)
    assert dataclasses.replace(found, rms_epsilon=wanted.rms_epsilon) == wanted
    assert made.num_layers == found.num_layers == (layers or made.num_layers)
    assert made.num_bytes == made.path.stat().st_size


@pytest.mark.parametrize("architecture", ARCHITECTURES)
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
    ("like", "expert_parameters", "layers"),
    [("qwen3-30b-a3b", 28.99e9, 48), ("qwen3-235b-a22b", 227.1e9, 94)],
)
def test_published_qwen3_models_have_their_number_of_experts(
    like: str, expert_parameters: float, layers: int
) -> None:
    geometry = synthetic_shape("qwen3moe", like=like, layers=None).geometry
    tensors = list(planned_tensors(geometry, recipe_for(like, geometry)))
    experts = [tensor for tensor in tensors if "_exps." in tensor.name]
    assert sum(np.prod(tensor.shape, dtype=np.int64) for tensor in experts) == pytest.approx(
        expert_parameters, rel=1e-3
    )
    assert len(experts) == 3 * layers
    assert {tensor.ggml_type for tensor in experts} == {Q4_K, Q6_K}


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
        (("llama",), {}, 'architecture "llama".*qwen3moe, qwen4exp'),
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
