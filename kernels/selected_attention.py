"""Attention of each query row over its own selection of keys, gathered instead of masked.

Work and memory then grow with the selection, not with the sequence. Letters: T query rows, M blocks, B
selected blocks of a row, S positions of a row's selection, Q query heads, G key-value heads, D head dim.
"""

import torch
from torch import Tensor
from torch.nn import functional

GATHERED_ELEMENTS = 1 << 18
"""Most key values gathered for one call, at one row: 1 MiB of float32, and as much for values. In larger
calls what was gathered has left the CPU's caches when it is read (2 key-value heads of 256, 2,051 positions:
4 ms a row one by one, 9 ms in tiles of 16)."""


def selected_positions(selected_TM: Tensor, first_position: int, block: int) -> tuple[Tensor, Tensor]:
    """Return int64 [T, S] positions and bool [T, S]: which of them count.

    selected_TM has the same number of blocks in every row, of which row t is at first_position + t. S is
    their tokens and block - 1 more, the row's tail of an incomplete block; tail places that the row does not
    have repeat its own position and do not count.
    """
    rows, device = selected_TM.shape[0], selected_TM.device
    blocks_TB = selected_TM.nonzero()[:, 1].view(rows, -1)
    tokens = (blocks_TB.unsqueeze(-1) * block + torch.arange(block, device=device)).flatten(1)
    own = torch.arange(first_position, first_position + rows, device=device).unsqueeze(1)
    tail = (own + 1) // block * block + torch.arange(block - 1, device=device)
    counts = torch.cat((torch.ones_like(tokens, dtype=torch.bool), tail <= own), dim=1)
    return torch.cat((tokens, torch.minimum(tail, own)), dim=1), counts


def gather_tile_rows(selection: int, kv_heads: int, dim: int) -> int:
    """Return how many rows to gather at once for selections of so many positions."""
    return max(1, GATHERED_ELEMENTS // (selection * kv_heads * dim))


def attend_selected(q_TQD: Tensor, k_GTSD: Tensor, v_GTSD: Tensor, counts_TS: Tensor) -> Tensor:
    """Return attention [T, Q, D] of each row over its own keys. Scale 1 / sqrt(D)."""
    rows, query_heads, dim = q_TQD.shape
    groups = k_GTSD.shape[0]
    q = q_TQD.reshape(rows, groups, query_heads // groups, dim).transpose(0, 1)
    mask = counts_TS[None, :, None]
    out = functional.scaled_dot_product_attention(q, k_GTSD, v_GTSD, attn_mask=mask)
    return out.transpose(0, 1).reshape(rows, query_heads, dim)
