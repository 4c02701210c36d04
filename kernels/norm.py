"""RMS norms in float32. Weights are applied as stored: GGUF already holds 1 + w where that applies."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last axis to unit mean square, then multiply by weight of that axis' length."""
    if x.is_cuda and x.dim() in {2, 3}:
        from strata_coord.kernels.cuda_norm import rms_norm_cuda

        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return rms_norm_cuda(x, weight.contiguous(), eps, out=out)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def group_rms_norm(x_TW: Tensor, weight_W: Tensor, num_groups: int, eps: float) -> Tensor:
    """Normalise each of num_groups equal parts of a row by itself; weight spans the whole row."""
    parts = x_TW.view(*x_TW.shape[:-1], num_groups, -1)
    return rms_norm(parts, weight_W.view(num_groups, -1), eps).flatten(-2)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last axis to unit length; eps is added to the sum of squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
