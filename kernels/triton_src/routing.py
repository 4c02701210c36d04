"""The best experts of each row, ties to the lowest id."""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits,
    bias,
    selection_bias,
    ids,
    weights,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    BIAS: tl.constexpr,
    SELECTION_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISED: tl.constexpr,
):
    """One program, one row of logits [T, E], fp32. EP and KP: E and K padded to powers of two."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    is_expert = e < E
    value = tl.load(logits + t * E + e, mask=is_expert, other=float("-inf")).to(tl.float32)
    if BIAS:
        value += tl.load(bias + e, mask=is_expert, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        power = tl.exp(value - tl.max(value, axis=0))
        score = power / tl.sum(power, axis=0)
    choice = score
    if SELECTION_BIAS:
        choice += tl.load(selection_bias + e, mask=is_expert, other=0.0).to(tl.float32)
    # A NaN would be the best of no comparison and leave no id: it counts as the largest value instead, so
    # that every id is one of an expert and the guard for values that are not finite sees the weight.
    choice = tl.where(choice == choice, choice, float("inf"))
    left = is_expert
    best_ids = tl.zeros((KP,), dtype=tl.int32)
    best = tl.zeros((KP,), dtype=tl.float32)
    for step in tl.static_range(K):
        top = tl.max(tl.where(left, choice, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (choice >= top), e, EP), axis=0)
        is_chosen = e == chosen
        best_ids = tl.where(k == step, chosen, best_ids)
        best = tl.where(k == step, tl.sum(tl.where(is_chosen, score, 0.0), axis=0), best)
        left = left & (e != chosen)
    if RENORMALISED:
        best = best / tl.sum(best, axis=0)
    tl.store(ids + t * K + k, best_ids.to(ids.dtype.element_ty), mask=k < K)
    tl.store(weights + t * K + k, best * scale, mask=k < K)
