"""Router choice on CUDA in one pass over the logits; the reference is router.route, after its product.

No stage calls this yet: models/experts.py runs the reference on every device.

Letters: T rows, E experts, K experts of a row.
"""

import torch
from torch import Tensor

from strata_coord.kernels.router import Scores
from strata_coord.kernels.triton_launch import power_of_two


def route_logits_cuda(
    logits_TE: Tensor,
    num_selected: int,
    *,
    ids_TK: Tensor,
    weights_TK: Tensor,
    bias_E: Tensor | None = None,
    scores: Scores = "softmax",
    selection_bias_E: Tensor | None = None,
    renormalised: bool = True,
    scale: float = 1.0,
) -> None:
    """Write the ids (int32 or int64) and fp32 weights of the best experts of each row, best first.

    The arguments are route's; a choice within groups of experts has no kernel. Of experts whose scores are
    equal in fp32 the lowest id wins. Scores are those of the reference within 1e-6, so the choice may differ
    where two differ by less.

    Raises:
        ValueError: shapes do not fit each other.
    """
    rows, experts = logits_TE.shape
    if num_selected > experts or ids_TK.shape != (rows, num_selected) or weights_TK.shape != ids_TK.shape:
        message = (
            f"{num_selected} of {experts} experts for {rows} rows go to ids {list(ids_TK.shape)} "
            f"and weights {list(weights_TK.shape)}"
        )
        raise ValueError(message)
    if not (logits_TE.is_contiguous() and ids_TK.is_contiguous() and weights_TK.is_contiguous()):
        message = "logits, ids and weights must be contiguous"
        raise ValueError(message)
    if weights_TK.dtype != torch.float32:
        message = f"weights are float32, got {weights_TK.dtype}"
        raise ValueError(message)
    if not rows or not num_selected:
        return
    from strata_coord.kernels.triton_src import routing

    routing.route_kernel[(rows,)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        logits_TE if selection_bias_E is None else selection_bias_E,
        ids_TK,
        weights_TK,
        scale,
        E=experts,
        K=num_selected,
        EP=power_of_two(experts),
        KP=power_of_two(num_selected),
        BIAS=bias_E is not None,
        SELECTION_BIAS=selection_bias_E is not None,
        SIGMOID=scores == "sigmoid",
        RENORMALISED=renormalised,
        num_warps=1 if experts <= 128 else 2,
    )
