"""Logits to a token. A draw is a pure function of seed and position: no generator state, no history.

Order of the filters: temperature, then top-k, top-p and min-p on the scaled distribution. Ties go to the
lowest id.
"""

import hashlib

import torch
from torch import Tensor


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that seed and position stand for."""
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def sample(
    logits_V: Tensor,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    seed: int,
    position: int,
    num_real_tokens: int,
) -> tuple[int, float]:
    """Return the token and its natural log probability in the unscaled distribution over real tokens.

    Ids of num_real_tokens and above are padding and never drawn. temperature 0 is greedy; top_k 0, top_p 1
    and min_p 0 switch a filter off. position is the new token's own place in its sequence.

    Raises:
        ValueError: a logit of a real token is NaN or infinite.
    """
    logits = logits_V[:num_real_tokens].detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(logits).all()):
        count = int((~torch.isfinite(logits)).sum())
        message = f"{count} of {logits.numel()} logits for position {position} are not finite"
        raise ValueError(message)
    log_total = torch.logsumexp(logits, 0)
    if temperature <= 0.0:
        # argmax of equal values is unspecified; the first position that holds the maximum is not.
        token = int((logits == logits.max()).nonzero()[0, 0])
    else:
        token = _draw(logits / temperature, top_p=top_p, top_k=top_k, min_p=min_p, u=uniform(seed, position))
    return token, float(logits[token] - log_total)


def _draw(scaled: Tensor, *, top_p: float, top_k: int, min_p: float, u: float) -> int:
    order = torch.sort(scaled, descending=True, stable=True)
    values, ids = order.values, order.indices
    if top_k > 0:
        values, ids = values[:top_k], ids[:top_k]
    probabilities = torch.softmax(values, 0)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if top_p < 1.0:
        # A token stays while the mass before it is below top_p, so the best one always stays.
        keep &= probabilities.cumsum(0) - probabilities < top_p
    if min_p > 0.0:
        keep &= probabilities >= min_p * probabilities[0]
    keep[0] = True
    cumulative = torch.where(keep, probabilities, 0.0).cumsum(0)
    place = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    last = int(keep.nonzero()[-1, 0])
    return int(ids[min(place, last)])
