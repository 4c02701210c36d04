"""Depthwise causal convolution over time, with the rows before the first one given as history."""

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv_silu(x_TC: Tensor, history_HC: Tensor, weight_CK: Tensor, *, dilation: int = 1) -> Tensor:
    """Return silu of the convolution [T, C] and move history on, in place.

    history holds the last H = (K - 1) * dilation input rows, zeros before a sequence's start;
    weight[:, K - 1] is the current row's. A sum of K shifted products needs no transposes and adds in the
    same order in every row, wherever the rows were cut.

    Raises:
        ValueError: history is not (K - 1) * dilation rows.
    """
    rows, taps = x_TC.shape[0], weight_CK.shape[1]
    length = (taps - 1) * dilation
    if history_HC.shape[0] != length:
        message = (
            f"{taps} taps at dilation {dilation} need {length} rows of history, got {history_HC.shape[0]}"
        )
        raise ValueError(message)
    extended = torch.cat((history_HC, x_TC))
    out = extended[:rows] * weight_CK[:, 0]
    for tap in range(1, taps):
        out.addcmul_(extended[tap * dilation : tap * dilation + rows], weight_CK[:, tap])
    history_HC.copy_(extended[rows:])
    return functional.silu(out, inplace=True)
