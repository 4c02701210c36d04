"""Hyper-connections on CUDA: all but the two small products in as few passes over the streams as can be.

The references are hyper.read_streams and hyper.write_streams. The streams are fp32; what the products take
is the weights' dtype. Bytes a row, W = N * D, 2-byte weights of low rank R, W = 10,240 and R = 320:

    norm        4 W read, 2 W written                          61,440
    products    2 W read, 4 R moved, 2 W written               42,240
    mix         4 W read, 2 D written                          46,080
    write       8 W moved, 2 D read                            87,040
    write, then norm of the next read in one pass              107,520 instead of 148,480

At 4.1 TB/s and 32,768 rows a read is at least 1.2 ms and a write 0.7 ms, or 0.9 ms with the next norm.

No stage calls this yet: models/hyper_connections.py runs the references on every device.

Letters: T rows, W row width, N streams, D hidden size, R low rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from strata_coord.kernels.triton_launch import power_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWeights:
    """The tensors of one read. inject_NW is None in the head, which writes nothing back."""

    gamma_W: Tensor
    down_RW: Tensor
    up_WR: Tensor
    inject_NW: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamScratch:
    """Scratch of reads of up to T rows: 2 (2 W + R) bytes a row at 2-byte weights, and 4 N."""

    normed_TW: Tensor  # the weights' dtype
    gate_TW: Tensor  # the weights' dtype
    low_TR: Tensor  # the weights' dtype
    write_TN: Tensor  # fp32: the write weights of the last norm


def make_stream_scratch(num_rows: int, weights: StreamWeights, num_streams: int) -> StreamScratch:
    """Take scratch for reads of up to num_rows rows."""
    rank, width = weights.down_RW.shape
    new = weights.down_RW.new_empty
    return StreamScratch(
        normed_TW=new((num_rows, width)),
        gate_TW=new((num_rows, width)),
        low_TR=new((num_rows, rank)),
        write_TN=new((num_rows, num_streams), dtype=torch.float32),
    )


def norm_streams_cuda(
    rows_TW: Tensor, weights: StreamWeights, *, num_streams: int, eps: float, scratch: StreamScratch
) -> None:
    """First pass of a read: the normed streams and the write weights go to the scratch."""
    _one_pass(rows_TW, None, None, weights, num_streams, eps, scratch)


def write_streams_cuda(rows_TW: Tensor, y_TD: Tensor, write_TN: Tensor) -> None:
    """Add y, weighted per stream, to the raw streams in place."""
    _one_pass(rows_TW, y_TD, write_TN, None, write_TN.shape[1], 0.0, None)


def write_then_norm_cuda(
    rows_TW: Tensor,
    y_TD: Tensor,
    write_TN: Tensor,
    weights: StreamWeights,
    *,
    num_streams: int,
    eps: float,
    scratch: StreamScratch,
) -> None:
    """write_streams_cuda, then norm_streams_cuda of the result with the next read's weights, in one pass.

    write_TN may be the scratch's own: a row's weights are read before they are replaced.
    """
    _one_pass(rows_TW, y_TD, write_TN, weights, num_streams, eps, scratch)


def mix_streams_cuda(
    weights: StreamWeights, *, num_streams: int, scratch: StreamScratch, out: Tensor
) -> Tensor:
    """Second part of a read, after norm_streams_cuda or write_then_norm_cuda: write x [T, D] to out."""
    from strata_coord.kernels.triton_src import streams

    rows, dim = out.shape
    normed, gate, low = (x[:rows] for x in (scratch.normed_TW, scratch.gate_TW, scratch.low_TR))
    if not rows:
        return out
    torch.mm(normed, weights.down_RW.t(), out=low)
    streams.scaled_silu_kernel[(-(-low.numel() // 1024),)](low, low.numel(), 1.0 / num_streams, BLOCK=1024)
    torch.mm(low, weights.up_WR.t(), out=gate)
    block = min(power_of_two(dim), 1024)
    streams.mix_streams_kernel[(rows, -(-dim // block))](gate, normed, out, dim, N=num_streams, BLOCK=block)
    return out


def read_streams_cuda(
    rows_TW: Tensor,
    weights: StreamWeights,
    *,
    num_streams: int,
    eps: float,
    scratch: StreamScratch,
    out: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return x [T, D], which is out, and the write weights [T, N] in the scratch (None without inject).

    Raises:
        ValueError: shapes do not fit each other or the scratch.
    """
    norm_streams_cuda(rows_TW, weights, num_streams=num_streams, eps=eps, scratch=scratch)
    mix_streams_cuda(weights, num_streams=num_streams, scratch=scratch, out=out)
    return out, None if weights.inject_NW is None else scratch.write_TN[: len(rows_TW)]


def _one_pass(
    rows_TW: Tensor,
    y_TD: Tensor | None,
    write_TN: Tensor | None,
    weights: StreamWeights | None,
    num_streams: int,
    eps: float,
    scratch: StreamScratch | None,
) -> None:
    rows, width = rows_TW.shape
    dim = width // num_streams
    if rows_TW.dtype != torch.float32 or not rows_TW.is_contiguous() or width % num_streams:
        message = f"streams must be contiguous fp32 of {num_streams} parts, got {list(rows_TW.shape)}"
        raise ValueError(message)
    if num_streams != power_of_two(num_streams):
        message = f"{num_streams} streams are no power of two"
        raise ValueError(message)
    if scratch is not None and (scratch.normed_TW.shape[0] < rows or scratch.normed_TW.shape[1] != width):
        message = f"scratch {list(scratch.normed_TW.shape)} is too small for streams {list(rows_TW.shape)}"
        raise ValueError(message)
    if y_TD is not None and (y_TD.shape != (rows, dim) or not y_TD.is_contiguous()):
        message = f"y must be contiguous [{rows}, {dim}], got {list(y_TD.shape)}"
        raise ValueError(message)
    if not rows:
        return
    from strata_coord.kernels.triton_src import streams

    inject = None if weights is None else weights.inject_NW
    streams.stream_kernel[(rows,)](
        rows_TW,
        rows_TW if y_TD is None else y_TD,
        rows_TW if write_TN is None else write_TN,
        rows_TW if weights is None else weights.gamma_W,
        rows_TW if inject is None else inject,
        rows_TW if scratch is None else scratch.normed_TW,
        rows_TW if scratch is None else scratch.write_TN,
        eps,
        D=dim,
        N=num_streams,
        WRITE=y_TD is not None,
        NORM=weights is not None,
        INJECT=inject is not None,
        BLOCK=power_of_two(dim),
        num_warps=8 if dim > 1024 else 4,
    )
