"""How text is cut into words before BPE: one row per name of tokenizer.ggml.pre.

A vocabulary's merges were learned on words cut in one way; another way gives plausible ids and a worse
answer. So a name that is not here is refused. The expressions cut as those of the models' own tokenizer.json
files do.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way to cut; each pattern cuts the pieces that the one before has left."""

    patterns: tuple[str, ...]
    composes: bool = False  # text is brought to NFC first, as the model's own tokenizer does
    prefers_whole_words: bool = False  # a word that is a token needs no merges
    begins_text: bool = False  # a file without add_bos_token means true


def _by_words(digits: str) -> str:
    """Words with the one character before them, numbers, punctuation with the line ends after it."""
    punctuation = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|{_BEFORE_WORD}\p{{L}}+|{digits}|{punctuation}|{_SPACES}"


def _by_case(digits: str, ending: str) -> str:
    """Words that also end where small letters are followed by a capital; ending: what may follow a word."""
    words = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{ending}|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_QWEN2 = PreTokenizer(patterns=(_by_words(r"\p{N}"),), composes=True)
# qwen35 keeps combining marks with their letters, so that Indic and Arabic words are not cut inside.
_QWEN35 = PreTokenizer(
    patterns=(
        rf"{_CONTRACTIONS}|{_BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    composes=True,
)
_LLAMA3 = PreTokenizer(patterns=(_by_words(r"\p{N}{1,3}"),), prefers_whole_words=True, begins_text=True)
_GLM4 = PreTokenizer(patterns=(_by_words(r"\p{N}{1,3}"),))
_O200K = PreTokenizer(patterns=(_by_case(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_TEKKEN = PreTokenizer(patterns=(_by_case(r"\p{N}", ""),), prefers_whole_words=True, begins_text=True)
_DEEPSEEK3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Han, Hiragana, Katakana
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": _TEKKEN,
    "deepseek-v3": _DEEPSEEK3,
}
