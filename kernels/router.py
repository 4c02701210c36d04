"""Router: which experts a row goes to, and with what weight."""

import torch
from torch import Tensor
from torch.nn import functional


def route(x_TD: Tensor, router_ED: Tensor, num_selected: int) -> tuple[Tensor, Tensor]:
    """Return expert ids (int64) and weights (float32), both [T, K], best expert first.

    Softmax over all experts in float32, top K, renormalised to sum 1. Of equally probable experts the lowest
    id wins, which torch.topk does not promise: probabilities are not negative, so their bits order like
    integers and the id can break ties below them.
    """
    probabilities = torch.softmax(functional.linear(x_TD.float(), router_ED.float()), dim=-1)
    num_experts = probabilities.shape[1]
    reversed_ids = torch.arange(num_experts - 1, -1, -1, device=x_TD.device)
    keys = (probabilities.view(torch.int32).long() << 32) | reversed_ids
    best = torch.topk(keys, num_selected, dim=-1).values
    ids_TK = num_experts - 1 - (best & 0xFFFFFFFF)
    weights_TK = probabilities.gather(1, ids_TK)
    return ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True)
