"""The tokenizer keys of a GGUF file, checked: tokens, their types, and which id is what.

A damaged or hostile vocabulary is refused here, before the tokenizer library sees it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.printable import printable

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 20
MAX_TOKEN_CHARS = 1_024

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_ID_KEYS = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What every kind of vocabulary has."""

    tokens: list[str]  # as the file spells them
    types: tuple[int, ...]
    ids: Mapping[str, int]  # those of _ID_KEYS that the file has

    def of_types(self, *types: int) -> dict[str, int]:
        """Return the tokens of some types, with their ids."""
        return {self.tokens[at]: at for at, kind in enumerate(self.types) if kind in types}


def has_vocabulary(metadata: Metadata) -> bool:
    """Return whether the file brings a vocabulary at all; synthetic models often do not."""
    return PREFIX + "tokens" in metadata and metadata.get(PREFIX + "model") not in (None, "none", "no_vocab")


def read_vocabulary(
    metadata: Metadata,
    *,
    allowed_types: frozenset[int],
    is_spelt: Callable[[str], bool],
    spelling: str,
) -> Vocabulary:
    """Read tokens, types and special ids.

    Args:
        metadata: of the file.
        allowed_types: the token types that this kind of vocabulary has.
        is_spelt: whether the joined text of normal tokens can be turned into bytes.
        spelling: its name, for messages.

    Raises:
        ModelError: the tokenizer would swallow something and answer with wrong or missing text.
    """
    tokens = metadata.strings(PREFIX + "tokens")
    if not 1 <= len(tokens) <= MAX_TOKENS:
        metadata.refuse(PREFIX + "tokens", f"{len(tokens)} tokens, the limit is 1 to {MAX_TOKENS}")
    types = _read_types(metadata, len(tokens))
    # Whole-list tests first: a loop over 250,000 tokens is a second that every start would pay.
    known = set(tokens)
    sound = (
        len(known) == len(tokens)
        and max(map(len, tokens)) <= MAX_TOKEN_CHARS
        and "" not in known
        and set(types) <= allowed_types
        and is_spelt("".join(token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL))
    )
    if not sound:
        _refuse_token(metadata, tokens, types, allowed_types, is_spelt, spelling)
    ids = {
        key: metadata.integer(PREFIX + key, low=0, high=len(tokens) - 1)
        for key in _ID_KEYS
        if PREFIX + key in metadata
    }
    return Vocabulary(tokens=tokens, types=types, ids=ids)


def _read_types(metadata: Metadata, count: int) -> tuple[int, ...]:
    key = PREFIX + "token_type"
    if key not in metadata:
        return (NORMAL,) * count
    types = metadata.integers(key, low=NORMAL, high=BYTE)
    if len(types) != count:
        metadata.refuse(key, f"{len(types)} types for {count} tokens")
    return types


def _refuse_token(
    metadata: Metadata,
    tokens: list[str],
    types: tuple[int, ...],
    allowed_types: frozenset[int],
    is_spelt: Callable[[str], bool],
    spelling: str,
) -> None:
    """Find the first token that is not sound, and say why."""
    seen: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        field = f"{PREFIX}tokens[{index}]"
        if not 1 <= len(token) <= MAX_TOKEN_CHARS:
            metadata.refuse(field, f"{len(token)} characters, the limit is 1 to {MAX_TOKEN_CHARS}")
        first = seen.setdefault(token, index)
        if first != index:
            metadata.refuse(field, f'"{printable(token, limit=60)}" is also token {first}')
        if kind not in allowed_types:
            names = ", ".join(map(str, sorted(allowed_types)))
            metadata.refuse(f"{PREFIX}token_type[{index}]", f"{kind}; {spelling} has {names}")
        if kind == NORMAL and not is_spelt(token):
            metadata.refuse(field, f'"{printable(token, limit=60)}" is not in the spelling of {spelling}')
