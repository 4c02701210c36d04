"""SentencePiece's BPE rebuilt from scores: a plain implementation, transformers, and hostile files."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import TYPE_CHECKING

import pytest
from handmade_gguf import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from token_goldens import TEXTS, plain_scored

from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.tokenizer import StreamDecoder, Tokenizer
from strata_coord.ipc.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_CORPUS = [*TEXTS.values(), "the theatre is there, and then other things \u2581", "aaaaaaaa", "        "]


@functools.cache
def pieces() -> tuple[list[str], list[float], list[int]]:
    """Return tokens, scores and types as a converted tokenizer.model has them: best merges first."""
    words = [list("\u2581" + text.replace(" ", "\u2581")) for text in _CORPUS]
    learned: list[str] = []
    while len(learned) < 250:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        if "".join(best) not in learned:
            learned.append("".join(best))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    characters = sorted({char for text in _CORPUS for char in text if char not in " \n\r\t🙂漢"} | {"\u2581"})
    special, raw = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    normal = [*learned, *characters]
    types = [2, 3, 3] + [6] * 256 + [1] * len(normal)
    scores = [0.0] * 259 + [-float(index) for index in range(len(normal))]
    return [*special, *raw, *normal], scores, types


def plain(text: str, *, blank: bool = True) -> list[int]:
    tokens, scores, _ = pieces()
    return plain_scored(text, tokens, scores, first_normal=259, blank=blank)


def keys(**changes: object) -> dict[str, object]:
    tokens, scores, types = pieces()
    found: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return found | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def make(folder: Path, **changes: object) -> Tokenizer:
    return Tokenizer.from_metadata(read_header(write_model(folder / "v.gguf", keys(**changes), {})).metadata)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("scored"))


@pytest.mark.parametrize("name", TEXTS)
def test_ids_are_those_of_the_plain_implementation_and_come_back(tokenizer: Tokenizer, name: str) -> None:
    ids = tokenizer.encode(TEXTS[name], allow_special=False)
    assert ids == [1, *plain(TEXTS[name])]
    assert tokenizer.decode(ids) == TEXTS[name]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("the a\u2581\n漢é🙂<s>x0"), max_size=40))
def test_any_text_has_the_ids_of_the_plain_implementation(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert ids == [1, *plain(text)]
    stream = StreamDecoder(tokenizer)
    streamed = "".join(map(stream.feed, ids)) + stream.finish()
    assert streamed == tokenizer.decode(ids) == text.replace("\u2581", " ")


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        # Its reader knows F32 arrays only as a whole; the scores are given to it directly.
        architecture, fields, _ = get_gguf_tokenizer(str(write_model(tmp_path / "v.gguf", keys(), {})))
        oracle, _ = convert_gguf_tokenizer(architecture, fields | {"scores": pieces()[1]})
    # It writes no second blank before a text that begins with one, unlike SentencePiece.
    # It makes a control token of <s>.
    texts = [text for text in TEXTS.values() if text and not text.startswith(" ") and "<s>" not in text]
    ours = [tokenizer.encode(text, allow_special=False)[1:] for text in texts]
    assert ours == [oracle.encode(text, add_special_tokens=False).ids for text in texts]


def test_control_tokens_part_the_text_and_each_part_begins_with_a_blank(tokenizer: Tokenizer) -> None:
    one, two = plain("the"), plain("there")
    assert tokenizer.encode("<s>the</s>there", allow_special=True) == [1, *one, 2, *two]
    assert not {1, 2} & set(tokenizer.encode("<s>the</s>", allow_special=False)[1:])
    assert tokenizer.stop_tokens == {2}


def test_a_file_may_ask_for_no_blank_and_no_beginning(tmp_path: Path) -> None:
    bare = make(tmp_path, add_space_prefix=False, add_bos_token=False)
    assert bare.encode("the", allow_special=False) == plain("the", blank=False)
    assert bare.decode(bare.encode(" the", allow_special=False)) == " the"


def test_a_byte_that_is_spelt_stays_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<0x41>", allow_special=False)
    assert pieces()[0].index("<0x41>") not in ids
    assert tokenizer.decode(ids) == "<0x41>"


def _changed(index: int, token: str, kind: int = 1) -> dict[str, object]:
    tokens, _, types = (list(column) for column in pieces())
    tokens[index], types[index] = token, kind
    return {"tokens": tokens, "token_type": types}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scores": [0.0]}, "tokenizer.ggml.scores: 1 scores for"),
        ({"scores": [float("nan")] * len(pieces()[0])}, "scores[0]: nan is not finite"),
        ({"scores": "x"}, "expected an array of numbers"),
        (_changed(300, "y" * 257), "257 characters, the limit is 256"),
        (_changed(10, "zzz"), "the byte tokens must be <0x00> to <0xFF>; look at '<0x07>'"),
        (_changed(300, "<0xZZ>", 6), "look at '<0xZZ>'"),
        (_changed(300, "\u2581"), "is also token"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ModelError) as info:
        make(tmp_path, **changes)
    assert expected in str(info.value)
