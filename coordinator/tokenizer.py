"""The vocabulary in a GGUF file as a tokenizer: text to ids and back, whole or token by token.

Byte-level BPE with the two pre-tokenizers of the supported architectures; a vocabulary of another kind is
refused by name and never guessed, since a wrong split gives plausible ids and a worse answer. Text is
normalised to NFC, as the model's own training tokenizer does.
"""

import codecs
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

from strata_coord.coordinator.byte_level import BYTE_OF_CHAR, CHAR_OF_BYTE
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.printable import printable
from strata_coord.ipc.errors import ModelError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BpeTokenizer

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 21
MAX_TOKEN_CHARS = 1_024

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_KNOWN_TYPES = frozenset({_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED})
_PREFIX = "tokenizer.ggml."
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# qwen35 keeps combining marks with their letters, so that Indic and Arabic words are not cut inside.
PRE_TOKENIZERS: Mapping[str, str] = {
    "qwen2": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ),
}
_STOP_NAMES = ("<|endoftext|>", "<|im_end|>")
_ID_KEYS = ("bos_token_id", "eos_token_id", "eot_token_id")


class Tokenizer:
    """Made once per launch by from_metadata; may be used from several threads."""

    def __init__(
        self,
        bpe: "BpeTokenizer",
        tokens: list[str],
        types: tuple[int, ...],
        ids: Mapping[str, int],
        leading: int | None,
    ) -> None:
        self._bpe = bpe
        self._lock = threading.Lock()  # whether control tokens are recognised is a switch of the whole object
        self._tokens = tokens
        self._types = types
        self._ids = ids
        self._leading = leading  # the token that starts every text; None: no such token
        named = {tokens[at]: at for at, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
        ends = {ids[key] for key in ("eos_token_id", "eot_token_id") if key in ids}
        self.stop_tokens = frozenset(ends | {named[name] for name in _STOP_NAMES if name in named})

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> Self:
        """Build the tokenizer of a model; takes most of a second for a full vocabulary.

        Raises:
            ModelError: the file has no vocabulary, one of a kind that is not supported, or a damaged one.
        """
        if not has_vocabulary(metadata):
            metadata.refuse(f"{_PREFIX}model", "the file has no vocabulary; only --prompt-ids works with it")
        kind = metadata.text(f"{_PREFIX}model")
        if kind != "gpt2":
            metadata.refuse(
                f"{_PREFIX}model", f'"{kind}" is not supported; supported is "gpt2" (byte-level BPE)'
            )
        pre = metadata.text(f"{_PREFIX}pre")
        if pre not in PRE_TOKENIZERS:
            metadata.refuse(
                f"{_PREFIX}pre", f'"{pre}" is not supported; supported are {", ".join(PRE_TOKENIZERS)}'
            )
        tokens = metadata.strings(f"{_PREFIX}tokens")
        types = _token_types(metadata, len(tokens))
        _check_tokens(metadata, tokens, types)
        ids = {
            key: metadata.integer(_PREFIX + key, low=0, high=len(tokens) - 1)
            for key in _ID_KEYS
            if _PREFIX + key in metadata
        }
        bpe = _build(metadata, tokens, types, PRE_TOKENIZERS[pre])
        add_bos = metadata.flag(f"{_PREFIX}add_bos_token", default=False)
        return cls(bpe, tokens, types, ids, ids.get("bos_token_id") if add_bos else None)

    @property
    def num_tokens(self) -> int:
        """Tokens of the vocabulary, padding included."""
        return len(self._tokens)

    @property
    def template_names(self) -> dict[str, str]:
        """The strings that chat templates know as bos_token and eos_token; only those that the file names."""
        pairs = (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"))
        return {name: self._tokens[self._ids[key]] for name, key in pairs if key in self._ids}

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the token ids of text, after the file's begin-of-text token if it asks for one.

        Args:
            text: anything.
            allow_special: spellings of control tokens become these tokens, as a rendered chat template needs;
                otherwise they are ordinary characters, as in text that a user typed.

        Raises:
            RequestError: text holds half of a surrogate pair, which is not a character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the text is not valid Unicode at character {error.start}"
            raise RequestError(message) from None
        with self._lock:
            self._bpe.encode_special_tokens = not allow_special
            ids = list(self._bpe.encode(text, add_special_tokens=False).ids)
        if self._leading is not None and ids[:1] != [self._leading]:
            ids.insert(0, self._leading)
        return ids

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, control tokens nothing."""
        data = b"".join(self.token_bytes(token, show_control=show_control) for token in ids)
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
        if kind == _NORMAL:
            return bytes([BYTE_OF_CHAR[char] for char in text])
        if kind == _USER_DEFINED or (show_control and kind == _CONTROL):
            return text.encode()
        return b""


class StreamDecoder:
    """Turns ids into text as they come; a character is given out when its last byte is there."""

    def __init__(self, tokenizer: Tokenizer, *, show_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that this token completes, often its own, sometimes nothing."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, show_control=self._show_control))

    def finish(self) -> str:
        """Return what is left, a U+FFFD for a character that was never completed; then start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def has_vocabulary(metadata: Metadata) -> bool:
    """Return whether the file brings a vocabulary at all; synthetic models often do not."""
    return f"{_PREFIX}tokens" in metadata and metadata.get(f"{_PREFIX}model") not in (
        None,
        "none",
        "no_vocab",
    )


def _token_types(metadata: Metadata, count: int) -> tuple[int, ...]:
    key = f"{_PREFIX}token_type"
    if not 1 <= count <= MAX_TOKENS:
        metadata.refuse(f"{_PREFIX}tokens", f"{count} tokens, the limit is 1 to {MAX_TOKENS}")
    if key not in metadata:
        return (_NORMAL,) * count
    types = metadata.integers(key, low=1, high=6)
    if len(types) != count:
        metadata.refuse(key, f"{len(types)} types for {count} tokens")
    return types


def _check_tokens(metadata: Metadata, tokens: list[str], types: tuple[int, ...]) -> None:
    """Refuse what the tokenizer would swallow and answer with wrong or missing text."""
    # Whole-list tests first: a loop over 250,000 tokens is a second that every start would pay.
    known = set(tokens)
    spelt = "".join(token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL)
    sound = (
        len(known) == len(tokens)
        and max(map(len, tokens)) <= MAX_TOKEN_CHARS
        and "" not in known
        and set(types) <= _KNOWN_TYPES
        and BYTE_OF_CHAR.keys() >= set(spelt)
    )
    if not sound:
        _refuse_token(metadata, tokens, types)
    absent = [byte for byte, char in enumerate(CHAR_OF_BYTE) if char not in known]
    if absent:
        metadata.refuse(
            f"{_PREFIX}tokens", f"{len(absent)} of the 256 byte tokens are missing, byte {absent[0]} first"
        )


def _refuse_token(metadata: Metadata, tokens: list[str], types: tuple[int, ...]) -> None:
    """Find the first token that _check_tokens is against, and say why."""
    seen: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        field = f"{_PREFIX}tokens[{index}]"
        if not 1 <= len(token) <= MAX_TOKEN_CHARS:
            metadata.refuse(field, f"{len(token)} characters, the limit is 1 to {MAX_TOKEN_CHARS}")
        first = seen.setdefault(token, index)
        if first != index:
            metadata.refuse(field, f'"{printable(token, limit=60)}" is also token {first}')
        if kind not in _KNOWN_TYPES:
            metadata.refuse(f"{_PREFIX}token_type[{index}]", f"{kind}; byte-level BPE has 1, 3, 4 and 5")
        if kind == _NORMAL and not BYTE_OF_CHAR.keys() >= set(token):
            metadata.refuse(field, f'"{printable(token, limit=60)}" is not in byte-level spelling')


def _build(metadata: Metadata, tokens: list[str], types: tuple[int, ...], pattern: str) -> "BpeTokenizer":
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as BpeTokenizer

    lines = metadata.strings(f"{_PREFIX}merges")
    if len(lines) > MAX_MERGES:
        metadata.refuse(f"{_PREFIX}merges", f"{len(lines)} merges, the limit is {MAX_MERGES}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        bpe = BpeTokenizer(models.BPE(vocab=vocabulary, merges=[line.partition(" ")[::2] for line in lines]))
    except Exception as error:  # the package raises bare Exception
        _refuse_merge(metadata, lines, vocabulary)
        message = f"{printable(metadata.path)}: {_PREFIX}merges: {printable(str(error))}"
        raise ModelError(message) from None
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    named = list(zip(tokens, types, strict=True))
    bpe.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in named if kind == _CONTROL]
    )
    bpe.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t, kind in named if kind == _USER_DEFINED]
    )
    return bpe


def _refuse_merge(metadata: Metadata, lines: list[str], vocabulary: Mapping[str, int]) -> None:
    """Find the first merge that the package is against, and say why."""
    for index, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            metadata.refuse(
                f"{_PREFIX}merges[{index}]",
                f'"{printable(line, limit=60)}" does not join two tokens into a third',
            )
