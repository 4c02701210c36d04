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

WINDOW_TILE_ROWS = 256
"""Fewest query rows of a tile of windowed attention: tiles as small as a short window would crawl."""


def query_tiles(num_rows: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) runs of query rows whose masks over length positions stay within MASK_ELEMENTS."""
    step = max(1, MASK_ELEMENTS // max(length, 1))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def window_tiles(num_rows: int, window: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) runs of query rows for keys of a window; a tile sees window + its rows - 1 keys."""
    step = max(1, min(MASK_ELEMENTS // (2 * window), max(window, WINDOW_TILE_ROWS)))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def attend(
    q_TQD: Tensor, k_GLD: Tensor, v_GLD: Tensor, visible_TL: Tensor | None, *, sinks_Q: Tensor | None = None
) -> Tensor:
    """Return attention [T, Q, D] with a boolean mask; None: every row sees all L positions.

    sinks_Q: a logit of each head that takes part in the softmax and whose value is zero.
    """
    rows, query_heads, dim = q_TQD.shape
    scale = dim**-0.5
    if sinks_Q is not None:
        q_TQD, k_GLD, v_GLD, visible_TL = _with_sinks(q_TQD, k_GLD, v_GLD, visible_TL, sinks_Q / scale)
    groups = k_GLD.shape[0]
    per_group = query_heads // groups
    if rows == 1:
        # The query heads of a group stand in for query rows: keys are read once per group.
        q = q_TQD.reshape(1, groups, per_group, -1)
        mask = None if visible_TL is None else visible_TL.view(1, 1, 1, -1)
        out = functional.scaled_dot_product_attention(
            q, k_GLD.unsqueeze(0), v_GLD.unsqueeze(0), attn_mask=mask, scale=scale
        )
        return out.reshape(1, query_heads, -1)[..., :dim]
    q = q_TQD.reshape(rows, groups, per_group, -1).permute(1, 2, 0, 3)
    k, v = (x.unsqueeze(1).expand(-1, per_group, -1, -1) for x in (k_GLD, v_GLD))
    mask = None if visible_TL is None else visible_TL[None, None]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(rows, query_heads, -1)[..., :dim]


def _with_sinks(
    q_TQD: Tensor, k_GLD: Tensor, v_GLD: Tensor, visible_TL: Tensor | None, sinks_Q: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return operands with one more dim and one more key, whose product with a query is the head's sink.

    That keeps the fused attention, which takes no logits of our own: the dim is 0 in all other keys and 1 in
    the new one, which is 0 elsewhere and has a value of 0.
    """
    rows = q_TQD.shape[0]
    q = torch.cat((q_TQD, sinks_Q.view(1, -1, 1).expand(rows, -1, 1)), dim=-1)
    k = functional.pad(k_GLD, (0, 1, 0, 1))
    k[:, -1, -1] = 1.0
    visible = None if visible_TL is None else functional.pad(visible_TL, (0, 1), value=True)
    return q, k, functional.pad(v_GLD, (0, 1, 0, 1)), visible


def causal_mask(
    first_position: int,
    num_rows: int,
    length: int,
    device: torch.device,
    *,
    first_key: int = 0,
    window: int = 0,
) -> Tensor:
    """Return bool [T, L - first_key]: the row at P sees positions 0 .. P, or the last window of them."""
    rows = torch.arange(first_position, first_position + num_rows, device=device).unsqueeze(1)
    keys = torch.arange(first_key, length, device=device)
    return (keys <= rows) & (keys > rows - window) if window else keys <= rows


def causal_attention(
    q_TQD: Tensor,
    k_GLD: Tensor,
    v_GLD: Tensor,
    first_position: int,
    *,
    window: int = 0,
    sinks_Q: Tensor | None = None,
) -> Tensor:
    """Return causal attention [T, Q, D]; row t is at first_position + t, keys lie from position 0 on.

    window: the row at position P sees positions P - window + 1 .. P; 0: all up to P. sinks_Q: see attend.

    Raises:
        ValueError: there are fewer keys than the last row must see.
    """
    rows = q_TQD.shape[0]
    if k_GLD.shape[1] < first_position + rows:
        message = f"rows end at position {first_position + rows}, keys at {k_GLD.shape[1]}"
        raise ValueError(message)
    if not window or first_position + rows <= window:
        window = 0  # every row sees all positions before it
    if rows == 1:
        seen = slice(first_position + 1 - window if window else 0, first_position + 1)
        return attend(q_TQD, k_GLD[:, seen], v_GLD[:, seen], None, sinks_Q=sinks_Q)
    out = torch.empty_like(q_TQD)
    tiles = window_tiles(rows, window) if window else query_tiles(rows, first_position + rows)
    for start, stop in tiles:
        length = first_position + stop
        first_key = max(0, first_position + start + 1 - window) if window else 0
        mask = causal_mask(
            first_position + start, stop - start, length, q_TQD.device, first_key=first_key, window=window
        )
        out[start:stop] = attend(
            q_TQD[start:stop],
            k_GLD[:, first_key:length],
            v_GLD[:, first_key:length],
            mask,
            sinks_Q=sinks_Q,
        )
    return out
