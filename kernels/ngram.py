"""Rows of the n-gram table that a token's recent history hashes to: exact unsigned 64-bit arithmetic.

torch has no full unsigned arithmetic. Products and XOR of int64 wrap to the same bits; only the remainder
differs for numbers of 2^63 and above, so it is taken of the upper 63 bits first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 1 << 64
_SIGN = 1 << 63


def history_ids(token_ids: Tensor, first: int, ngram_size: int, eos_token: int) -> list[Tensor]:
    """Return ids of distance 0 .. ngram_size - 1 before each position from first to the end of token_ids.

    token_ids (int64) are those of positions 0 and up of one sequence. An id before the sequence's start, and
    one at or before the nearest earlier EOS, reads as EOS; the position's own EOS does not cut its own
    context.
    """
    stop = token_ids.shape[0]
    back = ngram_size - 1
    start = max(first - back, 0)
    missing = back - (first - start)
    window = torch.cat((token_ids.new_full((missing,), eos_token), token_ids[start:stop]))
    count = stop - first
    ids = [window[back:]]
    cut = torch.zeros(count, dtype=torch.bool, device=token_ids.device)
    for distance in range(1, ngram_size):
        earlier = window[back - distance : back - distance + count]
        cut = cut | (earlier == eos_token)
        ids.append(torch.where(cut, eos_token, earlier))
    return ids


def ngram_rows(
    token_ids: Tensor,
    first: int,
    *,
    eos_token: int,
    multipliers: Sequence[int],
    head_vocab_sizes: Sequence[int],
    head_offsets: Sequence[int],
) -> Tensor:
    """Return table rows, int64 [positions from first on, heads]: 2-gram heads, then 3-gram heads, ...

    multipliers are unsigned 64-bit; their number is the n-gram size. Heads are divided evenly over n = 2 ..
    size.

    Raises:
        ValueError: the heads are not divisible by the n-gram orders, or their tables disagree in length.
    """
    size = len(multipliers)
    heads = len(head_vocab_sizes)
    if size < 2 or heads % (size - 1) or len(head_offsets) != heads:
        message = f"{heads} heads with {len(head_offsets)} offsets do not divide over n-grams 2..{size}"
        raise ValueError(message)
    per_order = heads // (size - 1)
    ids = history_ids(token_ids, first, size, eos_token)
    mixed = ids[0] * _signed(multipliers[0])
    blocks = []
    for order in range(2, size + 1):
        mixed = mixed ^ (ids[order - 1] * _signed(multipliers[order - 1]))
        begin = (order - 2) * per_order
        sizes = torch.tensor(head_vocab_sizes[begin : begin + per_order], device=token_ids.device)
        offsets = torch.tensor(head_offsets[begin : begin + per_order], device=token_ids.device)
        blocks.append(_unsigned_remainder(mixed.unsqueeze(1), sizes) + offsets)
    return torch.cat(blocks, dim=1)


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _SIGN else value


def _unsigned_remainder(bits: Tensor, modulus: Tensor) -> Tensor:
    """Return the remainder of bits read as unsigned; modulus is below 2^62."""
    upper = (bits >> 1) & (_SIGN - 1)
    return (upper % modulus * 2 + (bits & 1)) % modulus
