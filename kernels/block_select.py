"""Block selection of sparse attention: indexer scores, best blocks per query, and the mask that follows.

A block is r consecutive positions. A query at position P has m = (P + 1) // r complete blocks and sees the
tokens of the best B of them plus the tail r*m .. P. Letters: T rows, M blocks, H indexer heads, I indexer
dim, L positions.
"""

import torch
from torch import Tensor


def block_scores(q_THI: Tensor, keys_MI: Tensor) -> Tensor:
    """Return float32 [T, M]: the sum over heads of relu(q . key). The usual 1 / sqrt(I) changes no order."""
    per_head = torch.matmul(q_THI.transpose(0, 1).float(), keys_MI.float().t())
    return per_head.relu_().sum(0)


def select_blocks(scores_TM: Tensor, complete_T: Tensor, num_selected: int) -> Tensor:
    """Return bool [T, M]: the best num_selected of a row's first complete_T blocks, or all if fewer.

    Exactly equal scores are common (relu gives zeros); the lowest block wins. The cut value is found first
    and the blocks equal to it are counted off from the left, so the choice does not hang on the order topk
    returns.
    """
    num_blocks = scores_TM.shape[1]
    exists = torch.arange(num_blocks, device=scores_TM.device) < complete_T.unsqueeze(1)
    if num_blocks <= num_selected:
        return exists
    # A row that is not finite is found out later; until then it too needs a selection of the right size.
    scores = scores_TM.nan_to_num(nan=0.0).masked_fill_(~exists, float("-inf"))
    cut = torch.topk(scores, num_selected, dim=-1).values[:, -1:]
    above = scores > cut
    equal = scores == cut
    wanted = num_selected - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= wanted))) & exists


def visible_tokens(selected_TM: Tensor, first_position: int, length: int, block: int) -> Tensor:
    """Return bool [T, L]: tokens of the selected blocks and the own tail of rows from first_position on."""
    rows = selected_TM.shape[0]
    device = selected_TM.device
    positions = torch.arange(first_position, first_position + rows, device=device).unsqueeze(1)
    tokens = torch.arange(length, device=device)
    tail_start = (positions + 1) // block * block
    visible = (tokens >= tail_start) & (tokens <= positions)
    in_blocks = min(selected_TM.shape[1] * block, length)
    visible[:, :in_blocks] |= selected_TM.repeat_interleave(block, dim=1)[:, :in_blocks]
    return visible
