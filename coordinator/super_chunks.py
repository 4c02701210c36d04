"""Cuts a prompt into super-chunks. Pure."""

from __future__ import annotations

from strata_coord.coordinator.config_checks import GRID_TOKENS
from strata_coord.ipc.errors import PlanError

__all__ = ["even_super_chunks", "round_up_to_grid"]


def round_up_to_grid(tokens: int) -> int:
    """Return the smallest multiple of GRID_TOKENS that is at least tokens."""
    return -(-tokens // GRID_TOKENS) * GRID_TOKENS


def even_super_chunks(num_tokens: int, *, max_tokens: int) -> tuple[int, ...]:
    """Return the rows of the fewest super-chunks of at most max_tokens rows, as even as can be.

    Equal parts keep the stages overlapped: 28,672 + 4,096 leaves the next stage idle for most of the first
    part and the first stage idle for most of the second. Every cut lies on a multiple of GRID_TOKENS of the
    prompt and the parts differ by at most GRID_TOKENS rows. A prompt whose last block has few rows gets that
    block appended to a full part, since the larger parts come last: 129 rows under 128 are 64 + 65, not
    128 + 1. Only where a part holds a single block (max_tokens below 2 * GRID_TOKENS) may the last be short.

    A max_tokens off the grid is rounded down, unless the whole prompt fits in it. Below one block there is no
    grid to keep: the parts then differ by at most one row.

    Raises:
        PlanError: num_tokens or max_tokens is below one.
    """
    if num_tokens < 1 or max_tokens < 1:
        message = f"cannot cut {num_tokens} tokens into super-chunks of at most {max_tokens}: 1 is the least"
        raise PlanError(message)
    if num_tokens <= max_tokens:
        return (num_tokens,)
    unit = GRID_TOKENS if max_tokens >= GRID_TOKENS else 1
    num_blocks = -(-num_tokens // unit)
    num_parts = -(-num_blocks // (max_tokens // unit))
    blocks, num_larger = divmod(num_blocks, num_parts)
    sizes = [(blocks + (part >= num_parts - num_larger)) * unit for part in range(num_parts)]
    sizes[-1] -= num_blocks * unit - num_tokens
    return tuple(sizes)
