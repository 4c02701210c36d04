"""The vocabulary in a GGUF file as a tokenizer: text to ids and back, whole or token by token.

Byte-level BPE and BPE by scores; a vocabulary of another kind is refused by name and never guessed, since a
wrong split gives plausible ids and a worse answer. Special tokens are found here, not by the library, to
which their spellings are unknown: text that is not meant to hold any cannot make one.
"""

import codecs
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

from strata_coord.coordinator.control_guard import ControlGuard
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.spellings import Spellings
from strata_coord.coordinator.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    has_vocabulary,
)
from strata_coord.ipc.errors import RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BpeTokenizer

__all__ = ["StreamDecoder", "Tokenizer", "has_vocabulary"]

_KINDS = ("gpt2", "llama")
# Ends of an answer in the vocabularies of the supported families, for files whose keys name only one of them.
_STOP_NAMES = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>"}
    | {"<|call|>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
)
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """Made once per launch by from_metadata; may be used from several threads."""

    def __init__(
        self,
        bpe: "BpeTokenizer",
        vocabulary: Vocabulary,
        spelt_bytes: Callable[[str, int], bytes],
        *,
        leading: int | None,
        drops_blank: bool,
    ) -> None:
        """Wrap a tokenizer of the library.

        Args:
            bpe: for ordinary text; knows no special token.
            vocabulary: as the file has it.
            spelt_bytes: the bytes of a token and its type.
            leading: the token that starts every text; None: no such token.
            drops_blank: text begins with a blank that is not part of it.
        """
        self._bpe = bpe
        self._tokens = vocabulary.tokens
        self._types = vocabulary.types
        self._ids = vocabulary.ids
        self._spelt_bytes = spelt_bytes
        self._leading = leading
        self.drops_blank = drops_blank
        self._special = vocabulary.of_types(CONTROL, UNKNOWN, USER_DEFINED)
        # A single character cannot be told from text, so it stays text.
        control = {token for token in vocabulary.of_types(CONTROL, UNKNOWN) if len(token) > 1}
        typed = set(vocabulary.of_types(USER_DEFINED))
        self._typed_spellings = Spellings(typed)
        self._all_spellings = Spellings(control | typed)
        self.guard = ControlGuard(Spellings(control))
        self.stop_tokens = _stop_tokens(vocabulary)

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Self:
        """Build the tokenizer of a model; takes most of a second for a full vocabulary.

        Raises:
            ModelError: the file has no vocabulary, one of a kind that is not supported, or a damaged one.
        """
        if not has_vocabulary(metadata):
            metadata.refuse(PREFIX + "model", "the file has no vocabulary; only --prompt-ids works with it")
        kind = metadata.text(PREFIX + "model")
        if kind not in _KINDS:
            metadata.refuse(PREFIX + "model", f'"{kind}" is not supported; supported are {", ".join(_KINDS)}')
        if kind == "gpt2":
            from strata_coord.coordinator import byte_level_bpe

            vocabulary, pre = byte_level_bpe.read_byte_level(metadata)
            bpe = byte_level_bpe.build_byte_level(metadata, vocabulary, pre)
            spelt_bytes = byte_level_bpe.spelt_bytes
            begins_text, drops_blank = pre.begins_text, False
        else:
            from strata_coord.coordinator import scored_bpe

            vocabulary = scored_bpe.read_scored(metadata)
            bpe = scored_bpe.build_scored(metadata, vocabulary)
            spelt_bytes = scored_bpe.spelt_bytes
            begins_text, drops_blank = True, scored_bpe.adds_blank(metadata)
        add_bos = metadata.flag(PREFIX + "add_bos_token", default=begins_text)
        leading = vocabulary.ids.get("bos_token_id") if add_bos else None
        return cls(bpe, vocabulary, spelt_bytes, leading=leading, drops_blank=drops_blank)

    @property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary, padding included."""
        return len(self._tokens)

    @property
    def template_names(self) -> dict[str, str]:
        """The strings that chat templates know as bos_token and eos_token; only those that the file names."""
        pairs = (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"))
        return {name: self._tokens[self._ids[key]] for name, key in pairs if key in self._ids}

    def encode(self, text: str, *, allow_special: bool, mark: str | None = None) -> list[int]:
        """Return the token ids of text, after the file's begin-of-text token if it asks for one.

        Args:
            text: anything.
            allow_special: spellings of control tokens become these tokens, as a rendered chat template needs;
                otherwise they are ordinary characters, as in text that a user typed.
            mark: a character that is no part of the text; what it breaks is not such a spelling.

        Raises:
            RequestError: text holds half of a surrogate pair, which is not a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text is not valid Unicode at character {error.start}"
            raise RequestError(message) from None
        ids: list[int] = []
        spellings = self._all_spellings if allow_special else self._typed_spellings
        for part, is_special in _runs(spellings.split(text), mark):
            if is_special:
                ids.append(self._special[part])
            else:
                ids += self._bpe.encode(part, add_special_tokens=False).ids
        if self._leading is not None and ids[:1] != [self._leading]:
            ids.insert(0, self._leading)
        return ids

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, control tokens nothing."""
        data = b"".join(self.token_bytes(token, show_control=show_control) for token in ids)
        if self.drops_blank:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def token_bytes(self, token: int, *, show_control: bool = False) -> bytes:
        """Return the bytes one token stands for, which may be a part of a character.

        Raises:
            RequestError: there is no such token.
        """
        if not 0 <= token < len(self._tokens):
            message = f"token id {token} is outside 0 to {len(self._tokens) - 1}"
            raise RequestError(message)
        text, kind = self._tokens[token], self._types[token]
        if kind in (NORMAL, BYTE):
            return self._spelt_bytes(text, kind)
        if kind == USER_DEFINED or (show_control and kind == CONTROL):
            return text.encode()
        return b""


class StreamDecoder:
    """Turns ids into text as they come; a character is given out when its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, *, show_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._drops_blank = tokenizer.drops_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that this token completes, often its own, sometimes nothing."""
        data = self._tokenizer.token_bytes(token, show_control=self._show_control)
        if data and self._drops_blank:
            data, self._drops_blank = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what is left, a U+FFFD for a character that was never completed; then start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._drops_blank = self._tokenizer.drops_blank
        return rest


def _runs(parts: Iterable[tuple[str, bool]], mark: str | None) -> Iterable[tuple[str, bool]]:
    """Yield the parts without the mark."""
    for part, is_special in parts:
        run = part if is_special or mark is None else part.replace(mark, "")
        if run:
            yield run, is_special


def _stop_tokens(vocabulary: Vocabulary) -> frozenset[int]:
    special = vocabulary.of_types(CONTROL, USER_DEFINED)
    names = _STOP_NAMES & special.keys()
    if {"<|return|>", "<|call|>"} <= names:
        names -= {"<|end|>"}  # in gpt-oss it ends one of several messages of an answer
    named = {vocabulary.ids[key] for key in _STOP_KEYS if key in vocabulary.ids}
    return frozenset(named | {special[name] for name in names})
