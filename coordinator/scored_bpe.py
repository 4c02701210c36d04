"""tokenizer.ggml.model "llama": SentencePiece's BPE, by scores, for the tokenizers library.

The file has a score for each token and no merges: of all neighbours that make a token together, those join
first whose token has the highest score, the leftmost of equals. Blanks are spelt U+2581, one stands before
each run of text, and a character that is no token falls into its bytes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BpeTokenizer

BLANK = "\u2581"
# Merges are every cut of every token into two tokens; SentencePiece's own limit for a piece is 16 by default.
MAX_SCORED_CHARS = 256
MAX_ALL_CHARS = 1 << 23
_TYPES = frozenset({NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE})


def read_scored(metadata: Metadata) -> Vocabulary:
    """Read the vocabulary.

    Raises:
        ModelError: it is damaged, or lacks one of the 256 byte tokens.
    """
    vocabulary = read_vocabulary(
        metadata, allowed_types=_TYPES, is_spelt=lambda _: True, spelling="a vocabulary with scores"
    )
    lengths = list(map(len, vocabulary.tokens))
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > MAX_SCORED_CHARS:
        metadata.refuse(
            f"{PREFIX}tokens[{longest}]", f"{lengths[longest]} characters, the limit is {MAX_SCORED_CHARS}"
        )
    if sum(lengths) > MAX_ALL_CHARS:
        metadata.refuse(PREFIX + "tokens", f"{sum(lengths)} characters, the limit is {MAX_ALL_CHARS}")
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    found = vocabulary.of_types(BYTE).keys()
    if found != wanted:
        odd = sorted(found ^ wanted)[0]
        metadata.refuse(PREFIX + "tokens", f"the byte tokens must be <0x00> to <0xFF>; look at {odd!r}")
    return vocabulary


def build_scored(metadata: Metadata, vocabulary: Vocabulary) -> "BpeTokenizer":
    """Build the tokenizer of ordinary text: control tokens and padding are not in it.

    Raises:
        ModelError: the scores do not fit the vocabulary.
    """
    from tokenizers import Tokenizer as BpeTokenizer
    from tokenizers import models, normalizers

    scores = metadata.numbers(PREFIX + "scores")
    if len(scores) != len(vocabulary.tokens):
        metadata.refuse(PREFIX + "scores", f"{len(scores)} scores for {len(vocabulary.tokens)} tokens")
    ids = vocabulary.of_types(NORMAL, USER_DEFINED, BYTE)
    # A byte or a control token is never the result of a merge, whatever text spells it.
    merges = _merges(vocabulary.of_types(NORMAL), scores)
    bpe = BpeTokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True))
    first = [normalizers.Prepend(BLANK)] if adds_blank(metadata) else []
    bpe.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", BLANK)])
    return bpe


def adds_blank(metadata: Metadata) -> bool:
    """Return whether a blank stands before each run of text."""
    return metadata.flag(PREFIX + "add_space_prefix", default=True)


def spelt_bytes(token: str, kind: int) -> bytes:
    """Return the bytes that a normal token or a byte token stands for."""
    return bytes([int(token[3:5], 16)]) if kind == BYTE else token.replace(BLANK, " ").encode()


def _merges(ids: Mapping[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return all pairs that make a token, the highest score first.

    Cuts of one token into different pairs compete only in runs of one character, where joining from the left
    has made the left part the longer one.
    """
    found = [
        (-scores[index], -at, token)
        for token, index in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [(token[:-minus_at], token[-minus_at:]) for _, minus_at, token in sorted(found)]
