"""Golden token ids of tricky texts, and the oracles that they come from.

tests/data/golden_tokens_v1.json holds a small vocabulary, whose merges cross words, numbers and blanks as far
as they can so that another cut shows in the ids, and the ids of TEXTS under each name of tokenizer.ggml.pre.
They were made by an implementation of its own: the `regex` package cuts, and pieces merge in plain Python.
Where transformers knows the name (its converter of GGUF vocabularies) it had to agree. Make them again with

    PYTHONPATH=.types .venv/bin/python tests/token_goldens.py
"""

import itertools
import json
import tempfile
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import regex
from handmade_gguf import write_model

DATA = Path(__file__).parent / "data" / "golden_tokens_v1.json"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>")

TEXTS = {
    "empty": "",
    "blanks": "   a  b   ",
    "tabs and line ends": "one\r\ntwo\n\n\n\tthree\t\tfour \r\n \n",
    "code": "def f(self, x1):\n    return self.x**2 != 10  # it's\n\tif (a>=b): //path/to\n",
    "html": "<div class='a'>&nbsp;</div><s>struck</s>",
    "digits": "7 42 123 1234 12345678 3.14159 1,000,000 2026-11-29 0x1F",
    "contractions": "I'm you're HE'LL don't it'S we'Ve 'tis x'd",
    "capitals": "HTTPServer camelCase XMLHttpRequest iPhone ÜBERgröße ǅungla",
    "Chinese": "今天天气很好，我们去公园散步吧！2024年",
    "Japanese": "東京タワーへ行きました。ひらがなとカタカナ",
    "Korean": "안녕하세요 세계 여러분",
    "Devanagari": "नमस्ते दुनिया, क्या हाल है? १२३",
    "Arabic": "مرحبا بالعالم مُحَمَّد ١٢٣",
    "Thai": "สวัสดีชาวโลก",
    "emoji": "🙂👩‍👩‍👧🏳️‍🌈 🇩🇪 👍🏽!",
    "composed": "caf\u00e9 \u00fcber \u1ee9ng",
    "decomposed": "cafe\u0301 u\u0308ber u\u031b\u0301ng",
    "special tokens": "<|im_start|>user\nhi<|im_end|> <|endoftext|> <|im_end|",
    "signs": "½ ² Ⅷ ﬁ © € → ∑ \u00a0nbsp \u3000wide ...!!??--__",
    "control characters": "\x00\x01\x1b[31m\x7f\u200b\u202e\ufeff",
    "beyond the first plane": "𝒳𝒴 𐍈 \U000e0001",
}

_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{0}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{0}"
    r"|{1}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
)
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# name -> patterns, whether text is composed, whether whole words win
CUTS: dict[str, tuple[list[str], bool, bool]] = {
    "qwen2": ([rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_PUNCTUATION}|{_REST}"], True, False),
    "qwen35": (
        [
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
        ],
        True,
        False,
    ),
    "llama-bpe": ([rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_REST}"], False, True),
    "chatglm-bpe": ([rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_REST}"], False, False),
    "gpt-4o": ([_CASED.format(f"(?:{_CONTRACTIONS})?", r"\p{N}{1,3}") + _REST], False, False),
    "tekken": ([_CASED.format("", r"\p{N}") + _REST], False, True),
    "deepseek-v3": (
        [
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _REST,
        ],
        False,
        False,
    ),
}
# The converter in transformers has no cut for these names.
UNKNOWN_TO_TRANSFORMERS = ("chatglm-bpe", "deepseek-v3")


def golden() -> dict[str, Any]:
    """Return the stored data: tokens, merges, ids[pre][text name]."""
    data: dict[str, Any] = json.loads(DATA.read_text("utf-8"))
    return data


def golden_keys(data: dict[str, Any], pre: str) -> dict[str, object]:
    """Return the keys of a GGUF file with the golden vocabulary."""
    normal = len(data["tokens"]) - len(CONTROL)
    return {
        "general.architecture": "qwen3moe",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.token_type": [1] * normal + [3] * len(CONTROL),
        "tokenizer.ggml.merges": data["merges"],
        "tokenizer.ggml.eos_token_id": normal,
        "tokenizer.ggml.add_bos_token": False,
    }


def plain_bpe(text: str, pre: str, tokens: Sequence[str], merges: Sequence[str]) -> list[int]:
    """Encode text without special tokens in the plainest way: cut, spell, merge the lowest rank first."""
    patterns, composes, prefers_whole = CUTS[pre]
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    pieces = [unicodedata.normalize("NFC", text) if composes else text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in _isolate(pattern, piece)]
    result: list[int] = []
    for piece in pieces:
        word = "".join(_SPELLING[byte] for byte in piece.encode())
        symbols = [word] if prefers_whole and word in ids else list(word)
        while len(symbols) > 1:
            rank, at = min((ranks.get((a, b), 1 << 30), i) for i, (a, b) in enumerate(_pairs(symbols)))
            if rank == 1 << 30:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        result += [ids[symbol] for symbol in symbols]
    return result


def plain_scored(
    text: str, tokens: Sequence[str], scores: Sequence[float], *, first_normal: int, blank: bool = True
) -> list[int]:
    """Encode text as SentencePiece's BPE does, in the plainest way: join the best pair, the leftmost first.

    first_normal: tokens before it are control and byte tokens, which no text is joined to.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    spelt = text.replace(" ", "\u2581")
    symbols = list("\u2581" + spelt if blank and text else spelt)
    while True:
        joins = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(_pairs(symbols))
            if a in ids and b in ids and ids.get(a + b, 0) >= first_normal
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    result: list[int] = []
    for symbol in symbols:
        bytes_of = [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        result += [ids[symbol]] if symbol in ids else bytes_of
    return result


def transformers_ids(pre: str, data: dict[str, Any], texts: Sequence[str]) -> list[list[int]]:
    """Encode texts with the tokenizer that transformers makes of such a file; it does not compose."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

        path = write_model(Path(folder) / "v.gguf", golden_keys(data, pre), {})
        architecture, fields, _ = get_gguf_tokenizer(str(path))
        oracle, _ = convert_gguf_tokenizer(architecture, fields)
    if pre in ("llama-bpe", "tekken"):
        oracle.model.ignore_merges = True  # as in the models' own tokenizer.json; the converter leaves it out
    oracle.encode_special_tokens = True
    return [oracle.encode(text, add_special_tokens=False).ids for text in texts]


def _isolate(pattern: str, text: str) -> list[str]:
    """Cut text into the matches of a pattern and what lies between them."""
    parts, done = [], 0
    for match in regex.finditer(pattern, text):
        parts += [text[done : match.start()], match.group()]
        done = match.end()
    return [part for part in [*parts, text[done:]] if part]


def _pairs(symbols: Sequence[str]) -> list[tuple[str, str]]:
    return list(itertools.pairwise(symbols))


def _spelling() -> list[str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


_SPELLING = _spelling()


def _learn() -> tuple[list[str], list[str]]:
    """Learn merges from the texts themselves with no cut at all."""
    words = [[_SPELLING[byte] for byte in text.encode()] for text in TEXTS.values() for _ in range(2)]
    words += [
        [_SPELLING[byte] for byte in unicodedata.normalize("NFC", text).encode()] for text in TEXTS.values()
    ]
    tokens, merges = list(_SPELLING), []
    while len(tokens) < 640:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in _pairs(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(" ".join(best))
        if "".join(best) not in tokens:
            tokens.append("".join(best))
        for word in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    # A word that merges do not reach shows whether whole words win.
    return [*tokens, "\u0120return", *CONTROL], merges


def main() -> None:
    """Write the data file."""
    tokens, merges = _learn()
    data: dict[str, Any] = {"tokens": tokens, "merges": merges}
    ids = {pre: {name: plain_bpe(text, pre, tokens, merges) for name, text in TEXTS.items()} for pre in CUTS}
    for pre in CUTS:
        if pre not in UNKNOWN_TO_TRANSFORMERS:
            texts = [unicodedata.normalize("NFC", text) if CUTS[pre][1] else text for text in TEXTS.values()]
            for name, found in zip(TEXTS, transformers_ids(pre, data, texts), strict=True):
                if found != ids[pre][name]:
                    print(f"{pre}: {name}: transformers {found}, plain {ids[pre][name]}")
    DATA.write_text(json.dumps(data | {"ids": ids}, ensure_ascii=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
