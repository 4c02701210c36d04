"""Router: which experts a row goes to, and with what weight.

Letters: T rows, D hidden size, E experts, K experts of a row, G groups of experts.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Scores = Literal["softmax", "sigmoid"]

_BEST_OF_GROUP = 2  # a group's rank under sigmoid scores is the sum of its best two, as DeepSeek-V3 has it


def route(
    x_TD: Tensor,
    router_ED: Tensor,
    num_selected: int,
    *,
    bias_E: Tensor | None = None,
    scores: Scores = "softmax",
    selection_bias_E: Tensor | None = None,
    groups: int = 1,
    groups_used: int = 1,
    renormalised: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return expert ids (int64) and weights (float32), both [T, K], best expert first.

    Logits become scores over all experts in float32; the best K are taken and weighted by their scores,
    divided by their sum if asked, then times scale. A softmax over the chosen logits alone is the same as
    one over all, renormalised. Of equally good experts the lowest id wins.

    Args:
        x_TD: Rows.
        router_ED: Router matrix.
        num_selected: K.
        bias_E: Added to logits.
        scores: What turns logits into scores.
        selection_bias_E: Added to scores for the choice, not for the weights.
        groups: Equal runs of experts, of which only the best take part.
        groups_used: How many groups take part. A group's rank is its best score under softmax (DeepSeek-V2),
            the sum of its best two under sigmoid (DeepSeek-V3).
        renormalised: Whether the weights of a row are divided by their sum.
        scale: Of the weights.
    """
    bias = None if bias_E is None else bias_E.float()
    logits_TE = functional.linear(x_TD.float(), router_ED.float(), bias)
    scores_TE = torch.softmax(logits_TE, dim=-1) if scores == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if groups_used < groups:
        best = _BEST_OF_GROUP if scores == "sigmoid" else 1
        choice_TE = _within_best_groups(choice_TE, groups, groups_used, best)
    ids_TK = _best_ids(choice_TE, num_selected)
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalised:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK if scale == 1.0 else weights_TK * scale


def _within_best_groups(choice_TE: Tensor, groups: int, groups_used: int, best: int) -> Tensor:
    """Return choice_TE with minus infinity outside each row's best groups."""
    rows, num_experts = choice_TE.shape
    choice_TGe = choice_TE.view(rows, groups, num_experts // groups)
    rank_TG = choice_TGe.topk(min(best, num_experts // groups), dim=-1).values.sum(-1)
    is_used_TG = torch.zeros_like(rank_TG, dtype=torch.bool)
    is_used_TG.scatter_(1, _best_ids(rank_TG, groups_used), value=True)
    return choice_TGe.masked_fill(~is_used_TG.unsqueeze(-1), float("-inf")).view(rows, num_experts)


def _best_ids(values_TN: Tensor, count: int) -> Tensor:
    """Return the ids of the largest values of each row, best first, ties by the lowest id.

    torch.topk does not say which of equal values it takes. The bits of floats order like integers once those
    of negative numbers are turned round, so the id can break ties below them.
    """
    bits = (values_TN + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    last = values_TN.shape[1] - 1
    reversed_ids = torch.arange(last, -1, -1, device=values_TN.device)
    best = torch.topk((ordered << 32) | reversed_ids, count, dim=-1).values
    return last - (best & 0xFFFFFFFF)
