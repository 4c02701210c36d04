"""Grouped-query attention of a segment's rows over the sequence so far.

Letters: T query rows, L positions visible at most, Q query heads, G key-value heads, D head dim. Query head i
reads key-value head i // (Q / G). Scale 1 / sqrt(D).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

MASK_ELEMENTS = 1 << 22
"""Most mask entries of one attention call: scratch stays at 16 MiB of float32 for prompts of any length."""


def query_tiles(num_rows: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) runs of query rows whose masks over length positions stay within MASK_ELEMENTS."""
    step = max(1, MASK_ELEMENTS // max(length, 1))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def attend(q_TQD: Tensor, k_GLD: Tensor, v_GLD: Tensor, visible_TL: Tensor | None) -> Tensor:
    """Return attention [T, Q, D] with a boolean mask; None: every row sees all L positions."""
    rows, query_heads, dim = q_TQD.shape
    groups = k_GLD.shape[0]
    per_group = query_heads // groups
    if rows == 1:
        # The query heads of a group stand in for query rows: keys are read once per group.
        q = q_TQD.view(1, groups, per_group, dim)
        mask = None if visible_TL is None else visible_TL.view(1, 1, 1, -1)
        out = functional.scaled_dot_product_attention(
            q, k_GLD.unsqueeze(0), v_GLD.unsqueeze(0), attn_mask=mask
        )
        return out.view(1, query_heads, dim)
    q = q_TQD.view(rows, groups, per_group, dim).permute(1, 2, 0, 3)
    k, v = (x.unsqueeze(1).expand(-1, per_group, -1, -1) for x in (k_GLD, v_GLD))
    mask = None if visible_TL is None else visible_TL[None, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(rows, query_heads, dim)


def causal_mask(first_position: int, num_rows: int, length: int, device: torch.device) -> Tensor:
    """Return bool [T, L]: the row at position P sees positions 0 .. P."""
    rows = torch.arange(first_position, first_position + num_rows, device=device)
    return torch.arange(length, device=device) <= rows.unsqueeze(1)


def causal_attention(q_TQD: Tensor, k_GLD: Tensor, v_GLD: Tensor, first_position: int) -> Tensor:
    """Return causal attention [T, Q, D]; row t is at first_position + t, keys lie from position 0 on.

    Raises:
        ValueError: there are fewer keys than the last row must see.
    """
    rows = q_TQD.shape[0]
    if k_GLD.shape[1] < first_position + rows:
        message = f"rows end at position {first_position + rows}, keys at {k_GLD.shape[1]}"
        raise ValueError(message)
    if rows == 1:
        return attend(q_TQD, k_GLD[:, : first_position + 1], v_GLD[:, : first_position + 1], None)
    out = torch.empty_like(q_TQD)
    for start, stop in query_tiles(rows, first_position + rows):
        length = first_position + stop
        mask = causal_mask(first_position + start, stop - start, length, q_TQD.device)
        out[start:stop] = attend(q_TQD[start:stop], k_GLD[:, :length], v_GLD[:, :length], mask)
    return out
