"""Depthwise causal convolution on CUDA, in one pass; the reference is causal_conv.causal_conv_silu.

No stage calls this yet: models/ runs the reference on every device.
"""

import torch
from torch import Tensor

_ROWS, _COLUMNS = 16, 128


def causal_conv_silu_cuda(
    x_TC: Tensor, history_HC: Tensor, weight_CK: Tensor, *, out: Tensor, dilation: int = 1
) -> Tensor:
    """Write silu of the convolution to out [T, C], move history on in place, and return out.

    x may be any floating dtype with any row stride; history is fp32. Reads x about once and writes out once.
    Adds taps in the reference's order.

    Raises:
        ValueError: history is not (K - 1) * dilation rows of float32, or shapes do not fit.
    """
    rows, columns = x_TC.shape
    taps = weight_CK.shape[1]
    length = (taps - 1) * dilation
    if history_HC.shape != (length, columns) or history_HC.dtype != torch.float32:
        message = (
            f"{taps} taps at dilation {dilation} need float32 history [{length}, {columns}], "
            f"got {history_HC.dtype} {list(history_HC.shape)}"
        )
        raise ValueError(message)
    if out.shape != x_TC.shape or weight_CK.shape[0] != columns or (rows and x_TC.stride(1) != 1):
        message = f"x {list(x_TC.shape)}, out {list(out.shape)} and weight {list(weight_CK.shape)} do not fit"
        raise ValueError(message)
    if not (out.is_contiguous() and history_HC.is_contiguous() and weight_CK.is_contiguous()):
        message = "out, history and weight must be contiguous"
        raise ValueError(message)
    if not rows or not columns:
        return out
    from strata_coord.kernels.triton_src import delta

    column_tiles = -(-columns // _COLUMNS)
    delta.causal_conv_kernel[(-(-rows // _ROWS), column_tiles)](
        x_TC,
        history_HC,
        weight_CK,
        out,
        rows,
        columns,
        x_TC.stride(0),
        DILATION=dilation,
        TAPS=taps,
        BT=_ROWS,
        BC=_COLUMNS,
    )
    if length:
        delta.advance_history_kernel[(column_tiles,)](
            x_TC, history_HC, rows, columns, x_TC.stride(0), LENGTH=length, BC=_COLUMNS
        )
    return out
