"""Reference logits from transformers on the CPU in fp32, and how near each token came to another choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the oracle says about one prompt of T tokens."""

    logits: torch.Tensor  # fp32 [T, V]
    router_gap: torch.Tensor  # [T]: smallest difference of the k-th and next probability over all layers
    block_gap: torch.Tensor  # [T]: the same of block scores, infinite where every block is visible

    @property
    def gap(self) -> torch.Tensor:
        """[T]: the smaller of the two."""
        return torch.minimum(self.router_gap, self.block_gap)


def reference_logits(model: nn.Module, ids: list[int] | torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [T, V] of the whole prompt in one pass, without a cache."""
    with torch.no_grad():
        batch = torch.as_tensor(ids, dtype=torch.int64)[None]
        return model(input_ids=batch, use_cache=False).logits[0].float()


def reference(model: nn.Module, ids: list[int] | torch.Tensor) -> Reference:
    """Return the logits with the margins of every discrete choice behind them.

    A case with a gap below 1e-4 is dropped before comparing where sub-chunk sizes differ, as rounding may
    flip it.
    """
    num_tokens = len(ids)
    gaps = {"router": torch.full((num_tokens,), math.inf), "block": torch.full((num_tokens,), math.inf)}
    handles = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            handles.append(module.register_forward_hook(_router_hook(gaps)))
        elif type(module).__name__.endswith("QSAIndexer"):
            handles.append(module.register_forward_pre_hook(_indexer_hook(gaps)))
    try:
        logits = reference_logits(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return Reference(logits=logits, router_gap=gaps["router"], block_gap=gaps["block"])


def _router_hook(gaps: dict[str, torch.Tensor]) -> Any:
    def hook(router: Any, _inputs: Any, outputs: Any) -> None:
        logits = outputs[0].float()
        if hasattr(router, "e_score_correction_bias"):
            choice, group_gap = _grouped_choice(router, logits.sigmoid() + router.e_score_correction_bias)
            gaps["router"] = torch.minimum(gaps["router"], group_gap)
        else:
            choice = logits.softmax(-1)
        top = choice.topk(router.top_k + 1, dim=-1).values
        gaps["router"] = torch.minimum(gaps["router"], top[:, -2] - top[:, -1])

    return hook


def _grouped_choice(router: Any, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores that experts are chosen by, and how near each token came to another group."""
    if router.topk_group == router.num_group:
        return choice, torch.full((len(choice),), math.inf)
    groups = choice.view(len(choice), router.num_group, -1)
    rank = groups.topk(2, dim=-1).values.sum(-1)
    top = rank.topk(router.topk_group + 1, dim=-1).values
    is_used = rank >= top[:, -2:-1]
    return groups.masked_fill(~is_used[..., None], -math.inf).flatten(1), top[:, -2] - top[:, -1]


def _indexer_hook(gaps: dict[str, torch.Tensor]) -> Any:
    def hook(indexer: Any, inputs: Any) -> None:
        gaps["block"] = torch.minimum(gaps["block"], _block_gap(indexer, inputs[0][0], inputs[1]))

    return hook


def _block_gap(indexer: Any, hidden_TD: torch.Tensor, positions: Any) -> torch.Tensor:
    ratio, head_dim = indexer.compress_ratio, indexer.index_head_dim
    num_tokens = hidden_TD.shape[0]
    gap = torch.full((num_tokens,), math.inf)
    num_blocks = num_tokens // ratio
    if num_blocks <= indexer.block_topk:
        return gap
    projected = indexer.index_qk_proj(hidden_TD).view(num_tokens, -1, head_dim)
    cos_TR, sin_TR = (value[0] for value in positions)
    query_THD = _rotate(indexer.q_layernorm(projected[:, :-1]), cos_TR[:, None], sin_TR[:, None])
    raw_BRD = projected[: num_blocks * ratio, -1].view(num_blocks, ratio, head_dim)
    starts = torch.arange(num_blocks) * ratio
    key_BD = _rotate(indexer.k_layernorm(raw_BRD.mean(1)), cos_TR[starts], sin_TR[starts])
    score_TB = torch.einsum("thd,bd->thb", query_THD, key_BD).relu().sum(1) / math.sqrt(head_dim)
    complete_T1 = (torch.arange(num_tokens) + 1)[:, None] // ratio
    is_complete = torch.arange(num_blocks)[None] < complete_T1
    top = score_TB.masked_fill(~is_complete, -math.inf).topk(indexer.block_topk + 1, dim=-1).values
    is_bound = complete_T1[:, 0] > indexer.block_topk
    gap[is_bound] = (top[:, -2] - top[:, -1])[is_bound]
    return gap


def _rotate(value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    first, second = value[..., :width].chunk(2, dim=-1)
    rotated = value[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, value[..., width:]], dim=-1)
