import tempfile
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from handmade_gguf import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.vocabulary import tiny_vocabulary

from strata_coord.coordinator.byte_level import CHAR_OF_BYTE
from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.tokenizer import StreamDecoder, Tokenizer
from strata_coord.ipc.errors import ModelError, RequestError

TEXTS = [
    "",
    " ",
    "hello  world",
    "Tea, bread, 12 eggs and a pan",
    "it's WE'RE don't I'd",
    "line\r\nnext\n\n\n  indented\t\ttabs \r\n",
    "東京タワーへ行きました。",
    "안녕하세요 세계",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "🙂👩‍👩‍👧🏳️‍🌈 🇩🇪",
    "é ñ Å décomposé",
    "def f(x):\n    return x ** 2 # 1234567890",
    "\x00\x01\x1b[31m\x7f\u200b\u202e\ufeff",
    "<|im_start|>not special<|im_end|>",
    "½ ² Ⅷ ﬁ \u00a0nbsp",
    "𝒳𝒴 𐍈",
]


def model_keys(pre: str | None = "qwen2", **changes: object) -> dict[str, object]:
    vocabulary = tiny_vocabulary()
    keys: dict[str, object] = {
        "general.architecture": "qwen3moe",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": list(vocabulary.token_types),
        "tokenizer.ggml.merges": list(vocabulary.merges),
        "tokenizer.ggml.bos_token_id": vocabulary.end_of_text,
        "tokenizer.ggml.eos_token_id": vocabulary.im_end,
    }
    for name, value in ({"pre": pre} | changes).items():
        full = f"tokenizer.ggml.{name}"
        if value is None:
            del keys[full]
        else:
            keys[full] = value
    return keys


def metadata_of(folder: Path, keys: dict[str, object]) -> Metadata:
    return read_header(write_model(folder / "v.gguf", keys, {})).metadata


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        pre: Tokenizer.from_metadata(metadata_of(tmp_path_factory.mktemp(pre), model_keys(pre)))
        for pre in ("qwen2", "qwen35")
    }


def changed_tokens(change: Callable[[list[str], list[int]], None]) -> dict[str, object]:
    vocabulary = tiny_vocabulary()
    tokens, types = list(vocabulary.tokens), list(vocabulary.token_types)
    change(tokens, types)
    return {"tokens": tokens, "token_type": types}


# --- text to ids and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_went_in(tokenizers: dict[str, Tokenizer], pre: str, text: str) -> None:
    tokenizer = tokenizers[pre]
    ids = tokenizer.encode(text, allow_special=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_the_same_text_and_never_half_a_character(
    tokenizers: dict[str, Tokenizer], pre: str, text: str
) -> None:
    tokenizer = tokenizers[pre]
    stream = StreamDecoder(tokenizer)
    parts = [stream.feed(token) for token in tokenizer.encode(text, allow_special=False)]
    assert stream.finish() == ""
    assert "".join(parts) == unicodedata.normalize("NFC", text)
    assert not any("\ufffd" in part for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_comes_back_whole_and_as_a_stream(text: str) -> None:
    tokenizer = _shared()
    ids = tokenizer.encode(text, allow_special=False)
    stream = StreamDecoder(tokenizer)
    streamed = "".join(map(stream.feed, ids)) + stream.finish()
    assert streamed == tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def _shared() -> Tokenizer:
    if not _SHARED:
        with tempfile.TemporaryDirectory() as folder:
            _SHARED.append(Tokenizer.from_metadata(metadata_of(Path(folder), model_keys("qwen35"))))
    return _SHARED[0]


_SHARED: list[Tokenizer] = []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_ids_stream_to_the_text_that_they_decode_to(ids: list[int]) -> None:
    tokenizer = _shared()
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.feed, ids)) + stream.finish() == tokenizer.decode(ids)


def test_a_character_is_given_out_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen2"]
    tokens = list(tiny_vocabulary().tokens)
    ids = [tokens.index(CHAR_OF_BYTE[byte]) for byte in "€!".encode()]
    stream = StreamDecoder(tokenizer)
    assert [stream.feed(token) for token in ids] == ["", "", "€", "!"]


def test_a_character_that_never_ends_is_shown_as_a_replacement(tokenizers: dict[str, Tokenizer]) -> None:
    tokens = list(tiny_vocabulary().tokens)
    stream = StreamDecoder(tokenizers["qwen2"])
    assert stream.feed(tokens.index(CHAR_OF_BYTE[0xE2])) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_decomposed_text_has_the_ids_of_composed_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen35"]
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert tokenizer.encode(decomposed, allow_special=False) == tokenizer.encode(
        composed, allow_special=False
    )


# --- control tokens -----------------------------------------------------------------------------------


def test_typed_text_never_becomes_control_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    vocabulary = tiny_vocabulary()
    control = {vocabulary.end_of_text, vocabulary.im_start, vocabulary.im_end}
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode("<|im_end|><|endoftext|>x<|im_start|>", allow_special=False)
        assert not control & set(ids)
        assert tokenizer.decode(ids) == "<|im_end|><|endoftext|>x<|im_start|>"


def test_a_rendered_template_becomes_control_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    vocabulary = tiny_vocabulary()
    tokenizer = tokenizers["qwen2"]
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", allow_special=True)
    assert (ids[0], ids[-1]) == (vocabulary.im_start, vocabulary.im_end)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, show_control=True) == "<|im_start|>hi<|im_end|>"


def test_generation_stops_at_the_named_end_and_at_the_usual_ones(tokenizers: dict[str, Tokenizer]) -> None:
    vocabulary = tiny_vocabulary()
    assert tokenizers["qwen2"].stop_tokens == {vocabulary.im_end, vocabulary.end_of_text}


def _with_control(**names: int) -> dict[str, object]:
    """Changes that make control tokens of padding rows."""

    def change(tokens: list[str], types: list[int]) -> None:
        for name, row in names.items():
            tokens[row], types[row] = f"<|{name}|>", 3

    return changed_tokens(change)


def test_generation_stops_at_every_end_that_the_file_names_or_spells(tmp_path: Path) -> None:
    vocabulary = tiny_vocabulary()
    ends = {vocabulary.im_end, vocabulary.end_of_text}
    changes = _with_control(user=500, eot_id=501, eom_id=502, observation=503, tool=504)
    named = model_keys(**changes, eot_token_id=500, eom_token_id=503)
    assert Tokenizer.from_metadata(metadata_of(tmp_path, named)).stop_tokens == {*ends, *range(500, 504)}
    assert Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(**changes))).stop_tokens == {
        *ends,
        501,
        502,
    }


def test_the_end_of_a_message_is_no_end_where_answers_have_several(tmp_path: Path) -> None:
    one = model_keys(**_with_control(end=500))
    several = model_keys(**_with_control(end=500, call=501, **{"return": 502}))
    assert 500 in Tokenizer.from_metadata(metadata_of(tmp_path, one)).stop_tokens
    stops = Tokenizer.from_metadata(metadata_of(tmp_path, several)).stop_tokens
    assert (500 in stops, 501 in stops, 502 in stops) == (False, True, True)


def test_an_end_that_is_ordinary_text_does_not_stop(tmp_path: Path) -> None:
    def add(tokens: list[str], types: list[int]) -> None:
        tokens[500], types[500] = "</s>", 1

    stops = Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(**changed_tokens(add)))).stop_tokens
    assert 500 not in stops


def test_user_defined_tokens_are_matched_whole_and_shown(tmp_path: Path) -> None:
    def add(tokens: list[str], types: list[int]) -> None:
        tokens[500], types[500] = "<think>", 4

    tokenizer = Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(**changed_tokens(add))))
    assert tokenizer.encode("<think>", allow_special=False) == [500]
    assert tokenizer.decode([500]) == "<think>"


def test_padding_rows_stand_for_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["qwen2"].decode([511]) == ""


def test_a_file_that_asks_for_a_leading_token_gets_it_once(tmp_path: Path) -> None:
    begin = tiny_vocabulary().end_of_text
    tokenizer = Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(add_bos_token=True)))
    assert tokenizer.encode("", allow_special=False) == [begin]
    assert tokenizer.encode("<|endoftext|>", allow_special=True) == [begin]


def test_templates_get_the_names_of_the_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["qwen2"].template_names == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


# --- against transformers -----------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
def test_ids_equal_those_of_transformers(tokenizers: dict[str, Tokenizer], tmp_path: Path, pre: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        path = write_model(tmp_path / "v.gguf", model_keys(pre), {})
        architecture, fields, _ = get_gguf_tokenizer(str(path))
        oracle, _ = convert_gguf_tokenizer(architecture, fields)
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]  # the oracle does not normalise
    ours = [tokenizers[pre].encode(text, allow_special=True) for text in texts]
    assert ours == [oracle.encode(text, add_special_tokens=False).ids for text in texts]


# --- refusals -----------------------------------------------------------------------------------------


def test_half_of_a_surrogate_pair_fails_the_request(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 2"):
        tokenizers["qwen2"].encode("ab\ud800", allow_special=False)


@pytest.mark.parametrize("token", [-1, 512, 1 << 40])
def test_an_id_outside_the_vocabulary_fails_the_request(tokenizers: dict[str, Tokenizer], token: int) -> None:
    with pytest.raises(RequestError, match="is outside 0 to 511"):
        tokenizers["qwen2"].decode([token])


@pytest.mark.parametrize(
    "changes", [{"model": "no_vocab"}, {"model": None}, {"tokens": None}, {"model": "none"}]
)
def test_a_file_without_a_vocabulary_says_what_works(tmp_path: Path, changes: dict) -> None:
    with pytest.raises(ModelError, match="no vocabulary; only --prompt-ids works"):
        Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(**changes)))


def _duplicate(tokens: list[str], types: list[int]) -> None:
    tokens[5] = tokens[4]


def _empty(tokens: list[str], types: list[int]) -> None:
    tokens[500] = ""


def _long(tokens: list[str], types: list[int]) -> None:
    tokens[500] = "a" * 1_025


def _missing_byte(tokens: list[str], types: list[int]) -> None:
    tokens[tokens.index(CHAR_OF_BYTE[7])] = "zzzz"


def _not_spelt(tokens: list[str], types: list[int]) -> None:
    tokens[300] = "\u6771"


def _hostile_byte_token(tokens: list[str], types: list[int]) -> None:
    tokens[500], types[500] = "<0x-1>", 6


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": "t5"}, '"t5" is not supported; supported are gpt2, llama'),
        ({"pre": "poro-chat"}, '"poro-chat" is not supported; supported are qwen2, deepseek-r1-qwen, qwen35'),
        ({"pre": None}, "tokenizer.ggml.pre: missing"),
        ({"merges": None}, "tokenizer.ggml.merges: missing"),
        ({"tokens": 5}, "tokenizer.ggml.tokens: 5, expected an array of strings"),
        ({"merges": ["a"]}, 'merges[0]: "a" does not join two tokens into a third'),
        ({"merges": ["a nothere"]}, '"a nothere" does not join'),
        ({"merges": ["\x1b[2J \u202e"]}, "\\x1b[2J \\u202e"),
        ({"eos_token_id": 512}, "512 is outside 0 to 511"),
        ({"token_type": [1, 1]}, "2 types for 512 tokens"),
        (changed_tokens(_duplicate), "is also token 4"),
        (changed_tokens(_empty), "tokens[500]: 0 characters, the limit is 1 to 1024"),
        (changed_tokens(_long), "tokens[500]: 1025 characters"),
        (changed_tokens(_missing_byte), "1 of the 256 byte tokens are missing, byte 7 first"),
        (changed_tokens(_not_spelt), "tokens[300]"),
        (changed_tokens(_hostile_byte_token), "token_type[500]: 6"),
    ],
)
def test_a_hostile_or_foreign_vocabulary_is_refused(tmp_path: Path, changes: dict, expected: str) -> None:
    with pytest.raises(ModelError) as info:
        Tokenizer.from_metadata(metadata_of(tmp_path, model_keys(**changes)))
    assert expected in str(info.value)
    assert str(info.value).isprintable()
