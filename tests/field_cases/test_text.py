"""Faults of the field between text and token ids, as tests: see docs/field-cases.md for what happened."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from handmade_gguf import write_model
from oracle.vocabulary import tiny_vocabulary

from strata_coord.coordinator.gguf_header import read_header
from strata_coord.coordinator.session import Session
from strata_coord.coordinator.tokenizer import Tokenizer
from strata_coord.ipc.errors import ConfigError, ModelError

VOCABULARY = tiny_vocabulary()
BEGIN = "<|endoftext|>"  # the tiny models' begin-of-text token


def tokenizer(folder: Path, **changes: object) -> Tokenizer:
    """The tiny models' tokenizer with keys changed, or left out where the value is None."""
    keys: dict[str, object] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": list(VOCABULARY.tokens),
        "token_type": list(VOCABULARY.token_types),
        "merges": list(VOCABULARY.merges),
        "bos_token_id": VOCABULARY.end_of_text,
        "eos_token_id": VOCABULARY.im_end,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in (keys | changes).items() if value is not None}
    path = write_model(folder / "v.gguf", {"general.architecture": "qwen3moe"} | named, {})
    return Tokenizer.from_metadata(read_header(path).metadata)


def plain_types() -> list[int]:
    """Token types in which no token is marked as control, as in a file of a careless converter."""
    return [1 if kind == 3 else kind for kind in VOCABULARY.token_types]


@pytest.mark.parametrize("prompt", ["hello", BEGIN + "hello", "", " "])
@pytest.mark.parametrize("template", ["{}", BEGIN + "{}"])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_fc_138_one_begin_token_where_it_is_wanted_and_none_elsewhere(
    tmp_path: Path, prompt: str, template: str, add_bos: object
) -> None:
    made = tokenizer(tmp_path, add_bos_token=add_bos)
    text = made.encode(prompt, allow_special=False)
    leading = 1 if add_bos else 0
    assert text[:leading] == [VOCABULARY.end_of_text] * leading
    # What a user typed is text, also where it spells the token.
    assert VOCABULARY.end_of_text not in text[leading:]
    rendered = made.encode(template.format("hi"), allow_special=True)
    assert rendered.count(VOCABULARY.end_of_text) == (1 if add_bos or template.startswith(BEGIN) else 0)


def test_fc_137_no_begin_token_is_made_up(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, bos_token_id=None, add_bos_token=True)
    assert "bos_token" not in made.template_names
    assert made.encode("hi", allow_special=False) == tokenizer(tmp_path).encode("hi", allow_special=False)


def test_fc_137_no_end_token_is_made_up(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, bos_token_id=None, eos_token_id=None, token_type=plain_types())
    assert made.stop_tokens == frozenset()
    assert made.template_names == {}


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_fc_137_another_kind_of_end_alone_stops(tmp_path: Path, key: str) -> None:
    made = tokenizer(tmp_path, bos_token_id=None, eos_token_id=None, token_type=plain_types(), **{key: 17})
    assert made.stop_tokens == {17}


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id"])
def test_fc_137_an_end_outside_the_vocabulary_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelError, match=rf"{key}: 512 is outside 0 to 511"):
        tokenizer(tmp_path, **{key: 512})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token_type": ["one"] * 512}, "tokenizer.ggml.token_type: "),
        ({"token_type": [1.0] * 512}, "tokenizer.ggml.token_type: "),
        ({"token_type": [1] * 511}, "511 types for 512 tokens"),
        ({"tokens": list(range(512))}, "tokenizer.ggml.tokens: "),
        ({"tokens": "one"}, "tokenizer.ggml.tokens: "),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges: "),
        ({"merges": ["zz9 qq8"]}, "does not join two tokens into a third"),
    ],
)
def test_fc_128_arrays_of_another_type_or_length_are_refused_with_the_key(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(ModelError) as info:
        tokenizer(tmp_path, **changes)
    assert expected in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("content", [b"", b"  \n\t ", b"\xef\xbb\xbf", b"\xef\xbb\xbf \n"])
def test_fc_027_a_prompt_without_text_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    for file, name in ((path, str(path)), (Path("-"), "standard input")):
        options = SimpleNamespace(prompt=None, prompt_file=None if file == Path("-") else file)
        with pytest.raises(ConfigError, match=f"{name}: the prompt is empty"):
            Session._prompt_text(SimpleNamespace(_options=options))  # type: ignore[arg-type]
