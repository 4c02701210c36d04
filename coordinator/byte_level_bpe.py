"""tokenizer.ggml.model "gpt2": byte-level BPE with merges in the file, for the tokenizers library."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strata_coord.coordinator.byte_level import BYTE_OF_CHAR, CHAR_OF_BYTE
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.vocabulary import (
    CONTROL,
    NORMAL,
    PREFIX,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)
from strata_coord.ipc.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BpeTokenizer

MAX_MERGES = 1 << 21
_ALPHABET = BYTE_OF_CHAR.keys()
_TYPES = frozenset({NORMAL, CONTROL, USER_DEFINED, UNUSED})


def read_byte_level(metadata: Metadata) -> tuple[Vocabulary, PreTokenizer]:
    """Read the vocabulary and find its pre-tokenizer.

    Raises:
        ModelError: the pre-tokenizer is not known, or the vocabulary is damaged.
    """
    name = metadata.text(PREFIX + "pre")
    pre_tokenizer = PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        known = ", ".join(PRE_TOKENIZERS)
        metadata.refuse(PREFIX + "pre", f'"{name}" is not supported; supported are {known}')
    vocabulary = read_vocabulary(
        metadata,
        allowed_types=_TYPES,
        is_spelt=lambda text: set(text) <= _ALPHABET,
        spelling="byte-level BPE",
    )
    known_tokens = set(vocabulary.tokens)
    absent = [byte for byte, char in enumerate(CHAR_OF_BYTE) if char not in known_tokens]
    if absent:
        metadata.refuse(
            PREFIX + "tokens", f"{len(absent)} of the 256 byte tokens are missing, byte {absent[0]} first"
        )
    return vocabulary, pre_tokenizer


def build_byte_level(metadata: Metadata, vocabulary: Vocabulary, pre: PreTokenizer) -> "BpeTokenizer":
    """Build the tokenizer of ordinary text: control tokens and padding are not in it.

    Raises:
        ModelError: the merges do not fit the vocabulary.
    """
    from tokenizers import Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as BpeTokenizer

    lines = metadata.strings(PREFIX + "merges")
    if len(lines) > MAX_MERGES:
        metadata.refuse(PREFIX + "merges", f"{len(lines)} merges, the limit is {MAX_MERGES}")
    ids = vocabulary.of_types(NORMAL, USER_DEFINED)
    merges = [line.partition(" ")[::2] for line in lines]
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=pre.prefers_whole_words)
        bpe = BpeTokenizer(model)
    except Exception as error:  # the package raises bare Exception
        _refuse_merge(metadata, lines, ids)
        message = f"{printable(metadata.path)}: {PREFIX}merges: {printable(str(error))}"
        raise ModelError(message) from None
    if pre.composes:
        bpe.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spelling])
    return bpe


def spelt_bytes(token: str, kind: int) -> bytes:
    """Return the bytes that a token spells; kind is always NORMAL, the only one that has any."""
    return bytes([BYTE_OF_CHAR[char] for char in token])


def _refuse_merge(metadata: Metadata, lines: list[str], ids: Mapping[str, int]) -> None:
    """Find the first merge that the package is against, and say why."""
    for index, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            metadata.refuse(
                f"{PREFIX}merges[{index}]",
                f'"{printable(line, limit=60)}" does not join two tokens into a third',
            )
