"""builtin:split24: small, quick, the same bytes each time, built once however many ask."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

import pytest
from oracle.export import load_gguf
from oracle.reference import reference_logits
from oracle.tiny import TinyOptions, tiny_model

from strata_coord.coordinator.builtin_model import builtin_model_path, cache_folder
from strata_coord.coordinator.chat_template import chat_prompt
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.coordinator.synthetic_vocabulary import packaged_text
from strata_coord.coordinator.tokenizer import Tokenizer
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "strata-coord"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return builtin_model_path("split24")


@pytest.fixture(scope="module")
def index(built: Path) -> ModelIndex:
    return load_model_index(built)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_it_is_a_whole_qwen4exp_of_48_layers_under_40_mb(built: Path, index: ModelIndex) -> None:
    geometry = index.geometry
    assert built.stat().st_size < 40_000_000
    assert geometry.architecture == "qwen4exp"
    assert geometry.num_layers == 48
    assert geometry.recurrent_layers.count(False) == 12
    assert geometry.context_tokens == 32_768
    assert geometry.ngram is not None
    assert geometry.ngram.layers == (1,)
    assert geometry.sparse_attention is not None
    assert geometry.sparse_attention.budget_tokens == 512
    assert geometry.num_real_tokens < geometry.vocabulary_size


def test_experts_differ_in_type_and_size_as_in_real_files(index: ModelIndex) -> None:
    types = {tuple(tensor.ggml_type for tensor in index.expert_tensors(layer)) for layer in range(48)}
    assert types == {(12, 12, 20), (12, 12, 8)}
    assert len({index.expert_blob_bytes(layer) for layer in range(48)}) == 2


def test_built_twice_it_has_the_same_bytes(built: Path, cache: Path) -> None:
    again = builtin_model_path("split24")
    assert again.parent == cache
    assert again.name == built.name
    assert _digest(again) == _digest(built)


def test_a_second_call_builds_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.parent.parent))
    before = built.stat().st_mtime_ns
    assert builtin_model_path("split24", progress=lambda *_: pytest.fail("built again")) == built
    assert built.stat().st_mtime_ns == before


@pytest.mark.parametrize("size", [0, 100, -1_000])
def test_a_truncated_file_is_built_again(built: Path, cache: Path, size: int) -> None:
    cache.mkdir()
    damaged = cache / built.name
    content = built.read_bytes()
    damaged.write_bytes(content[:size])
    (cache / f".{built.name}.1.partial").write_bytes(content[:1_000])
    assert builtin_model_path("split24") == damaged
    assert damaged.read_bytes() == content
    assert sorted(file.name for file in cache.iterdir()) == sorted([built.name, "split24.lock"])


def test_several_at_once_build_it_once(cache: Path) -> None:
    starts: list[int] = []
    found: list[Path] = []
    threads = []
    for number in range(3):

        def ask(number: int = number) -> None:
            seen: list[int] = []
            found.append(builtin_model_path("split24", progress=lambda done, _total: seen.append(done)))
            starts.extend([number] if seen else [])

        threads.append(threading.Thread(target=ask))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert len(starts) == 1
    assert found[0].parent == cache


def test_an_unknown_name_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match='"split25"; known are split24'):
        builtin_model_path("split25")
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(ConfigError, match=r"file/strata-coord: cannot be written: .*XDG_CACHE_HOME"):
        builtin_model_path("split24")


@pytest.mark.parametrize("value", [None, "", "relative/path"])
def test_without_an_absolute_xdg_path_the_cache_is_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == tmp_path / ".cache" / "strata-coord"


def test_its_vocabulary_and_template_serve_a_chat(index: ModelIndex) -> None:
    tokenizer = Tokenizer.from_metadata(index.metadata)
    text = packaged_text()
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) > 4_096
    assert max(ids) < index.geometry.num_real_tokens
    template = index.metadata.text("tokenizer.chat_template")
    prompt = chat_prompt(template, [{"role": "user", "content": "hello"}])
    assert prompt.notice is None
    assert prompt.text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert index.geometry.ngram is not None
    end_of_text = index.geometry.ngram.eos_token
    assert tokenizer.encode(prompt.text, allow_special=True)[0] == end_of_text + 1
    assert {end_of_text, end_of_text + 2} <= tokenizer.stop_tokens


def test_values_stay_sane_through_48_layers(built: Path, index: ModelIndex) -> None:
    assert index.geometry.ngram is not None
    config = {
        "vocab_size": index.geometry.vocabulary_size,
        "eos_token_id": index.geometry.ngram.eos_token,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 1_000,
        "make_ngram_vocab_size_divisible_by": 128,
    }
    options = TinyOptions(num_layers=48, is_drawn=False, indexer_budget=512, config=config)
    model = tiny_model("qwen4exp", options)
    load_gguf(model, built)
    logits = reference_logits(model, list(range(64)))
    assert 1.0 < float(logits.std(-1).mean()) < 2.0
    assert len(set(logits.argmax(-1).tolist())) > 20
