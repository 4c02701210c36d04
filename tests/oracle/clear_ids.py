"""Prompts on which no choice of the oracle is a near tie, so that a comparison need not drop anything.

With 200 tokens and 16 experts some token nearly always comes within 1e-4 of another expert, and a flipped
expert changes every later token. The prompts found are kept in clear_ids.json; after a change of the tiny
models run `python -m oracle.clear_ids` in tests/ to search again (about a minute).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from oracle.reference import reference
from oracle.vocabulary import tiny_vocabulary
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALLEST_GAP = 1e-4
NUM_TOKENS = 200
# The first token, two in a row, one alone, and one on a multiple of 64 (a usual sub-chunk edge).
END_OF_TEXT_POSITIONS = (0, 57, 58, 128)
_FILE = Path(__file__).with_suffix(".json")
_MAX_PASSES = 400


def stored_ids(name: str) -> torch.Tensor:
    """Return the kept prompt [200] of a fixture, int64."""
    return torch.tensor(json.loads(_FILE.read_text("utf-8"))[name], dtype=torch.int64)


def find_clear_ids(
    model: nn.Module,
    *,
    num_tokens: int = NUM_TOKENS,
    seed: int = 1,
    ends_of_text: Sequence[int] = END_OF_TEXT_POSITIONS,
) -> torch.Tensor:
    """Return a random prompt whose every gap is at least SMALLEST_GAP.

    A token decides only its own and later choices, so the first token with a narrow gap is redrawn until none
    is left.

    Raises:
        ValueError: not found; the message says how many tokens were clear.
    """
    vocabulary = tiny_vocabulary()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary.end_of_text, (num_tokens,), generator=generator)
    fixed = [position for position in ends_of_text if position < num_tokens]
    ids[fixed] = vocabulary.end_of_text
    narrow = 0
    for _ in range(_MAX_PASSES):
        is_narrow = reference(model, ids).gap < SMALLEST_GAP
        if not is_narrow.any():
            return ids
        narrow = int(is_narrow.int().argmax())
        # A run of ties is left by going back further now and then than the token that shows the tie.
        back = int(torch.randint(0, 4, (1,), generator=generator))
        for position in range(max(0, narrow - back), narrow + 1):
            if position not in fixed:
                ids[position] = torch.randint(0, vocabulary.end_of_text, (1,), generator=generator)
    message = f"only {narrow} of {num_tokens} tokens are clear after {_MAX_PASSES} passes"
    raise ValueError(message)


def _main() -> None:
    from oracle.fixtures import TINY_FIXTURES, build_tiny

    found: dict[str, list[int]] = {}
    for name in TINY_FIXTURES:
        model = build_tiny(name, None)
        found[name] = find_clear_ids(model).tolist()
    _FILE.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    _main()
