"""Outputs of a group of experts added to the rows they belong to, in ascending expert order.

No atomics: a row's sum is made by one program, so it is the same for any grouping and any super-chunk. A row
meets an expert at most once, and pairs are sorted by expert, so ascending position is ascending expert.

Letters: S rows, K choices of a row, D hidden size, n rows of y.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_coord.kernels.triton_launch import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBounds:
    """Where y's rows lie among all sorted pairs: row i is position offsets[0] + skip_rows + i."""

    offsets_G1: Tensor  # int32, as in grouped_swiglu
    skip_rows: int = 0


def inverse_order(order_P: Tensor, num_choices: int) -> Tensor:
    """Return int32 [S, K]: the place of each (row, choice) in order, a permutation of all pairs."""
    inverse = torch.empty_like(order_P, dtype=torch.int32)
    places = torch.arange(order_P.numel(), dtype=torch.int32, device=order_P.device)
    inverse.scatter_(0, order_P, places)
    return inverse.view(-1, num_choices)


def add_in_order(
    sum_SD: Tensor,
    y_nD: Tensor,
    inverse_SK: Tensor,
    weights_SK: Tensor,
    *,
    bounds: GroupBounds | None = None,
) -> None:
    """Add weight * y[inverse] of each row's choices to sum, fp32, in place; others' choices are left out.

    inverse_SK: int32 row of y of each (row, choice), negative where y has none. With bounds it is the place
    among all sorted pairs instead, the same for every group, and y's rows past the group's are never read.
    Bytes: 8 D of sum for each row with a choice here, and y once. On CUDA one program makes one row; compared
    with the CPU's within 1e-6.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    rows, hidden = sum_SD.shape
    if sum_SD.dtype != torch.float32 or not sum_SD.is_contiguous() or y_nD.shape[1] != hidden:
        message = (
            f"sum must be contiguous float32 [S, {y_nD.shape[1]}], got {list(sum_SD.shape)} {sum_SD.dtype}"
        )
        raise ValueError(message)
    if inverse_SK.shape != weights_SK.shape or inverse_SK.shape[0] != rows:
        message = f"places {list(inverse_SK.shape)} and weights {list(weights_SK.shape)} for {rows} rows"
        raise ValueError(message)
    if not (inverse_SK.is_contiguous() and weights_SK.is_contiguous() and y_nD.is_contiguous()):
        message = "places, weights and outputs must be contiguous"
        raise ValueError(message)
    if not (rows and y_nD.shape[0] and inverse_SK.shape[1]):
        return
    if sum_SD.device.type == "cuda":
        add_in_order_triton(sum_SD, y_nD, inverse_SK, weights_SK, bounds)
    else:
        _add_in_order_torch(sum_SD, y_nD, inverse_SK, weights_SK, bounds)


def _add_in_order_torch(
    sum_SD: Tensor, y_nD: Tensor, inverse_SK: Tensor, weights_SK: Tensor, bounds: GroupBounds | None
) -> None:
    """The reference: choice by choice, the lowest place of each row first."""
    base, stop = 0, y_nD.shape[0]
    if bounds is not None:
        base = int(bounds.offsets_G1[0]) + bounds.skip_rows
        stop = min(stop, int(bounds.offsets_G1[-1]) - base)
    places, choices = torch.sort(inverse_SK.long() - base, dim=1)
    weights = weights_SK.gather(1, choices)
    for choice in range(places.shape[1]):
        place = places[:, choice]
        here = ((place >= 0) & (place < stop)).nonzero().squeeze(1)
        sum_SD[here] += y_nD[place[here]].float() * weights[here, choice : choice + 1]


def add_in_order_triton(
    sum_SD: Tensor, y_nD: Tensor, inverse_SK: Tensor, weights_SK: Tensor, bounds: GroupBounds | None
) -> None:
    """add_in_order without the checks, always by the kernel."""
    from strata_coord.kernels.triton_src import rows

    num_rows, hidden = sum_SD.shape
    block = min(power_of_two(hidden), 2048)
    offsets = inverse_SK if bounds is None else bounds.offsets_G1  # a pointer that is not read
    rows.add_in_order_kernel[(num_rows, -(-hidden // block))](
        sum_SD,
        y_nD,
        inverse_SK,
        weights_SK,
        offsets,
        0 if bounds is None else bounds.skip_rows,
        y_nD.shape[0],
        offsets.numel() - 1,
        hidden,
        inverse_SK.shape[1],
        BOUNDED=bounds is not None,
        KP=power_of_two(inverse_SK.shape[1]),
        BLOCK=block,
    )
