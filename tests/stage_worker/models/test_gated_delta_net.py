"""The mixer alone, for the settings that the two architectures of this version do not use."""

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
import torch
from layer_oracle import relative, tiny_geometry_qwen4exp
from torch import Tensor
from torch.nn import functional

from strata_coord.stage_worker.models.family import SegmentRows
from strata_coord.stage_worker.models.gated_delta_net import GatedDeltaNet
from strata_coord.stage_worker.sequence_state import StatePool

Order = Literal["grouped", "tiled"]
Gate = Literal["silu", "sigmoid"]


def plain_mixer(x: Tensor, weights: dict[str, Tensor], order: str, gate: str) -> Tensor:
    """The six steps of the formula, row by row, in float64."""
    x = x.double()
    w = {name: tensor.double() for name, tensor in weights.items()}
    hk, hv, dim = 2, 6, 16
    u = x @ w["attn_qkv.weight"].T
    kernel = w["ssm_conv1d.weight"]
    padded = torch.cat((u.new_zeros(3, u.shape[1]), u))
    mixed = functional.silu(sum(padded[j : j + len(x)] * kernel[:, j] for j in range(4)))
    q, k, v = mixed.split([hk * dim, hk * dim, hv * dim], dim=1)
    beta = torch.sigmoid(x @ w["ssm_beta.weight"].T)
    g = w["ssm_a"] * functional.softplus(x @ w["ssm_alpha.weight"].T + w["ssm_dt.bias"])
    z = (x @ w["attn_gate.weight"].T).view(-1, hv, dim)
    act = torch.sigmoid if gate == "sigmoid" else functional.silu
    state = x.new_zeros(hv, dim, dim)
    out = x.new_zeros(len(x), hv, dim)
    for t in range(len(x)):
        for h in range(hv):
            source = h // (hv // hk) if order == "grouped" else h % hk
            here = slice(source * dim, source * dim + dim)
            qt = q[t, here] / (q[t, here].square().sum() + 1e-6).sqrt() / dim**0.5
            kt = k[t, here] / (k[t, here].square().sum() + 1e-6).sqrt()
            state[h] *= g[t, h].exp()
            delta = beta[t, h] * (v[t, h * dim : h * dim + dim] - state[h].T @ kt)
            state[h] += torch.outer(kt, delta)
            o = state[h].T @ qt
            normed = o / (o.square().mean() + 1e-6).sqrt() * w["ssm_norm.weight"]
            out[t, h] = normed * act(z[t, h])
    return out.view(len(x), -1) @ w["ssm_out.weight"].T


@pytest.mark.parametrize("order", ["grouped", "tiled"])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_every_order_and_gate_equals_the_formula(order: Order, gate: Gate) -> None:
    geometry = tiny_geometry_qwen4exp()
    assert geometry.delta_net is not None
    delta = replace(geometry.delta_net, head_order=order, output_gate=gate)
    mixer = GatedDeltaNet(geometry, delta, 0)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.7)
        for name, shape in mixer.tensors().items()
    }
    weights["ssm_a"] = -weights["ssm_a"].abs()
    x = torch.randn(75, 64, generator=generator)
    want = plain_mixer(x, weights, order, gate)
    for cuts in ((), (2, 3, 64, 65), (40,)):
        pool = StatePool(geometry, 0, 1, kv_dtype="fp32", kv_pool_tokens=0, max_sequences=1, device="cpu")
        state = pool.create(0)
        edges = [0, *cuts, len(x)]
        got = torch.cat(
            [
                mixer.mix(
                    x[a:b], [SegmentRows(0, b - a, a, state, torch.zeros(b, dtype=torch.int64))], weights
                )
                for a, b in pairwise(edges)
            ]
        )
        assert relative(got, want) < 2e-6
