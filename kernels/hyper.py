"""Hyper-connections: N residual streams side by side in one row of width W = N * D.

A half of a layer reads a mix of the normed streams and adds its result to each raw stream with a weight of
its own.
"""

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.kernels.linear import linear
from strata_coord.kernels.norm import group_rms_norm


def read_streams(
    rows_TW: Tensor,
    gamma_W: Tensor,
    down_RW: Tensor,
    up_WR: Tensor,
    inject_NW: Tensor | None,
    *,
    num_streams: int,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return the mixed input x [T, D] and the write weights [T, N] (None without inject, as in the head).

    Both divisions by the number of streams come before the non-linearity.
    """
    normed_TW = group_rms_norm(rows_TW, gamma_W, num_streams, eps)
    low_TR = functional.silu(linear(normed_TW, down_RW).div_(num_streams), inplace=True)
    gate_TW = torch.sigmoid_(linear(low_TR, up_WR))
    write_TN = None
    if inject_NW is not None:
        write_TN = torch.sigmoid_(linear(normed_TW, inject_NW).div_(num_streams)).mul_(2.0)
    return gate_TW.mul_(normed_TW).view(len(rows_TW), num_streams, -1).mean(1), write_TN


def write_streams(rows_TW: Tensor, y_TD: Tensor, write_TN: Tensor) -> None:
    """Add y, weighted per stream, to the raw streams in place."""
    streams = rows_TW.view(*write_TN.shape, -1)
    streams.addcmul_(write_TN.unsqueeze(-1), y_TD.unsqueeze(-2))
