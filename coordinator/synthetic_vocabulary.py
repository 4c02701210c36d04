"""Vocabularies of synthetic models: a byte-level BPE learned from the packaged text, filled up to any size.

The result encodes and decodes real text. A published size such as 248,320 rows is reached with merges of
learned tokens, so that a header has as many tokens and merges as a real one and every merge is valid.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

from strata_coord.ipc.errors import ConfigError, InvariantError

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# More merges than this only learn whole sentences of the packaged text.
MAX_LEARNED = 2_000
MIN_ROWS = 320  # 256 bytes, the control tokens, some padding and a few merges
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShape:
    """Which ids are what: text, then control tokens from end_of_text on, then padding from num_real on."""

    num_rows: int
    end_of_text: int
    num_real: int
    pre_tokenizer: str  # value of tokenizer.ggml.pre

    @property
    def im_start(self) -> int:
        """Id of <|im_start|>."""
        return self.end_of_text + 1

    @property
    def im_end(self) -> int:
        """Id of <|im_end|>, where an answer ends."""
        return self.end_of_text + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticVocabulary:
    """What the tokenizer keys of a GGUF file hold; one entry per row of the embedding."""

    shape: VocabularyShape
    tokens: list[str]  # in byte-level spelling
    token_types: list[int]  # 1 normal, 3 control, 5 unused
    merges: list[str]  # "left right"


def small_vocabulary_shape(num_rows: int, pre_tokenizer: str) -> VocabularyShape:
    """Return the shape of a vocabulary of num_rows rows, a few of which are padding as in real models.

    Raises:
        ConfigError: too few rows for every byte and the control tokens.
    """
    if num_rows < MIN_ROWS:
        message = f"a vocabulary of {num_rows} rows is too small; the smallest is {MIN_ROWS}"
        raise ConfigError(message)
    num_real = num_rows - num_rows // 32
    return VocabularyShape(
        num_rows=num_rows,
        end_of_text=num_real - len(CONTROL_TOKENS),
        num_real=num_real,
        pre_tokenizer=pre_tokenizer,
    )


def packaged_text() -> str:
    """Return the English text that vocabularies are learned from."""
    return resources.files(__package__).joinpath("builtin_text.txt").read_text("utf-8")


def make_vocabulary(shape: VocabularyShape) -> SyntheticVocabulary:
    """Return a vocabulary of the given shape; the same one on each call."""
    tokens, merges = _learn(packaged_text(), min(shape.end_of_text, MAX_LEARNED))
    for token, merge in _pairs(tokens):
        if len(tokens) >= shape.end_of_text:
            break
        tokens.append(token)
        merges.append(merge)
    if len(tokens) != shape.end_of_text:
        message = f"{len(tokens)} text tokens were made, {shape.end_of_text} are wanted"
        raise InvariantError(message)
    num_control = shape.num_real - shape.end_of_text
    num_padding = shape.num_rows - shape.num_real
    control = [*CONTROL_TOKENS, *(f"<|extra_{index}|>" for index in range(num_control - len(CONTROL_TOKENS)))]
    return SyntheticVocabulary(
        shape=shape,
        tokens=[*tokens, *control, *(f"[PAD{index}]" for index in range(num_padding))],
        token_types=[1] * len(tokens) + [3] * num_control + [5] * num_padding,
        merges=merges,
    )


def _learn(text: str, num_tokens: int) -> tuple[list[str], list[str]]:
    """Return at most num_tokens tokens by id, and their merges by rank."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def _pairs(learned: list[str]) -> Iterator[tuple[str, str]]:
    """Yield new tokens that join two learned ones, with their merge."""
    parts = tuple(learned)
    taken = set(parts)
    for left in parts:
        for right in parts:
            token = left + right
            if token not in taken:
                taken.add(token)
                yield token, f"{left} {right}"
