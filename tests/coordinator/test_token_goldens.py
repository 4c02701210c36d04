"""Ids of every pre-tokenizer against stored ones, and against plain implementations on any text."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from handmade_gguf import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from token_goldens import (
    CONTROL,
    CUTS,
    TEXTS,
    UNKNOWN_TO_TRANSFORMERS,
    golden,
    golden_keys,
    plain_bpe,
    transformers_ids,
)

from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.pre_tokenizers import PRE_TOKENIZERS
from strata_coord.coordinator.tokenizer import Tokenizer

# Letters of several scripts and cases, marks, digits, blanks, line ends, signs: what the patterns tell apart.
CHARACTERS = st.sampled_from("aZßǅ'sStT\u0301\u094dक漢かア0٣²½ \t\r\n\u3000\u00a0.,!/_#<|>🙂\u200d€\x00")


def make_tokenizer(keys: dict[str, object]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_metadata(read_header(write_model(Path(folder) / "v.gguf", keys, {})).metadata)


@functools.cache
def data() -> dict[str, Any]:
    return golden()


@functools.cache
def tokenizer(pre: str) -> Tokenizer:
    return make_tokenizer(golden_keys(data(), pre))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("pre", CUTS)
def test_tricky_text_has_its_golden_ids(pre: str, name: str) -> None:
    assert tokenizer(pre).encode(TEXTS[name], allow_special=False) == data()["ids"][pre][name]


def test_every_way_to_cut_shows_in_the_golden_ids() -> None:
    ids = data()["ids"]
    assert all(ids[one] != ids[other] for one, other in itertools.combinations(CUTS, 2))
    cuts = {pre.patterns for pre in PRE_TOKENIZERS.values()}
    assert cuts == {PRE_TOKENIZERS[pre].patterns for pre in CUTS}


@pytest.mark.parametrize("pre", CUTS)
def test_golden_ids_hold_no_control_token(pre: str) -> None:
    first = len(data()["tokens"]) - len(CONTROL)
    assert max(token for ids in data()["ids"][pre].values() for token in ids) < first


@pytest.mark.parametrize("pre", CUTS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(CHARACTERS, max_size=40))
def test_any_text_has_the_ids_of_the_plain_implementation(pre: str, text: str) -> None:
    wanted = plain_bpe(text, pre, data()["tokens"], data()["merges"])
    assert tokenizer(pre).encode(text, allow_special=False) == wanted


@pytest.mark.parametrize("pre", [pre for pre in CUTS if pre not in UNKNOWN_TO_TRANSFORMERS])
def test_transformers_still_gives_the_golden_ids(pre: str) -> None:
    names = [name for name in TEXTS if not (CUTS[pre][1] and name == "decomposed")]  # it does not compose
    found = transformers_ids(pre, data(), [TEXTS[name] for name in names])
    assert found == [data()["ids"][pre][name] for name in names]


def test_only_llama_3_and_tekken_begin_every_text_unasked() -> None:
    keys = golden_keys(data(), "llama-bpe") | {"tokenizer.ggml.bos_token_id": 5}
    del keys["tokenizer.ggml.add_bos_token"]
    begins = {
        pre
        for pre in PRE_TOKENIZERS
        if make_tokenizer(keys | {"tokenizer.ggml.pre": pre}).encode("a", allow_special=False)[0] == 5
    }
    assert begins == {"llama-bpe", "llama3", "llama-v3", "tekken"}
