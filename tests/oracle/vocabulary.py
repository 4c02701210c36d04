"""The vocabulary of the tiny models: a byte-level BPE of 480 tokens, control tokens, padding to 512 rows."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

VOCABULARY_SIZE = 512
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NUM_LEARNED = 480
_TEXT = [
    "The stage reads its own layers and hands the rows to the next stage.",
    "A prompt of many tokens is read one layer at a time, and each expert crosses the link once.",
    "Tea, bread, 12 eggs and a pan: cook the onions slowly until they turn brown.",
    "def total(values):\n    return sum(value * 2 for value in values)\n",
    "Ünïcödé wörds, naïve café, 東京 and some emoji 🙂 close the list.",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyVocabulary:
    """What the tokenizer keys of a GGUF file hold."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]  # 1 normal, 3 control, 5 unused
    merges: tuple[str, ...]
    num_real: int
    end_of_text: int
    im_start: int
    im_end: int


@functools.cache
def tiny_vocabulary() -> TinyVocabulary:
    """Train the tokenizer; the same on each call and in each process."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_LEARNED,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    padding = [f"[PAD{index}]" for index in range(VOCABULARY_SIZE - len(learned) - len(_CONTROL_TOKENS))]
    first_control = len(learned)
    return TinyVocabulary(
        tokens=(*learned, *_CONTROL_TOKENS, *padding),
        token_types=(1,) * first_control + (3,) * len(_CONTROL_TOKENS) + (5,) * len(padding),
        merges=tuple(" ".join(pair) for pair in model["merges"]),
        num_real=first_control + len(_CONTROL_TOKENS),
        end_of_text=first_control,
        im_start=first_control + 1,
        im_end=first_control + 2,
    )
