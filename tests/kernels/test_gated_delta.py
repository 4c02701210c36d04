from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor

from strata_coord.kernels.gated_delta import gated_delta

HEAD_ORDERS: tuple[Literal["grouped", "tiled"], ...] = ("grouped", "tiled")
HK, HV, DK = 2, 6, 16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(rows: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return (
        randn(rows, HK, DK),
        randn(rows, HK, DK),
        randn(rows, HV, DK),
        -randn(rows, HV).abs(),
        torch.sigmoid(randn(rows, HV)),
    )


def plain(data: Inputs, state: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """The recurrence as written, per head and row, in float64."""
    q, k, v, g, beta = (x.double() for x in data)
    state = state.double().clone()
    out = torch.zeros_like(v)
    for t in range(len(v)):
        for h in range(HV):
            source = h // (HV // HK) if order == "grouped" else h % HK
            qt = q[t, source] / (q[t, source].square().sum() + 1e-6).sqrt() / DK**0.5
            kt = k[t, source] / (k[t, source].square().sum() + 1e-6).sqrt()
            state[h] *= g[t, h].exp()
            d = beta[t, h] * (v[t, h] - state[h].T @ kt)
            state[h] += torch.outer(kt, d)
            out[t, h] = state[h].T @ qt
    return out, state


def run(
    data: Inputs, state: Tensor, cuts: list[int], order: Literal["grouped", "tiled"], first: int = 0
) -> Tensor:
    edges = [0, *cuts, len(data[0])]
    q, k, v, g, beta = data
    parts = []
    for a, b in pairwise(edges):
        parts.append(
            gated_delta(
                q[a:b], k[a:b], v[a:b], g[a:b], beta[a:b], state, first_position=first + a, order=order
            )
        )
    return torch.cat(parts)


def close(got: Tensor, want: Tensor) -> bool:
    return float((got.double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("order", HEAD_ORDERS)
@pytest.mark.parametrize("cuts", [[], [1], [1, 2, 5, 63, 64, 65], [64, 128], [65], [10, 75, 76]])
def test_any_cut_equals_the_recurrence(order: Literal["grouped", "tiled"], cuts: list[int]) -> None:
    data = inputs(140)
    start = torch.randn(HV, DK, DK, generator=torch.Generator().manual_seed(5))
    state = start.clone()
    out = run(data, state, cuts, order)
    want, want_state = plain(data, start, order)
    assert close(out, want)
    assert close(state, want_state)


@pytest.mark.parametrize("first", [1, 37, 63, 64, 127])
def test_first_position_changes_chunks_and_nothing_else(first: int) -> None:
    data = inputs(90, seed=2)
    state = torch.zeros(HV, DK, DK)
    out = run(data, state, [], "tiled", first)
    want, want_state = plain(data, torch.zeros(HV, DK, DK), "tiled")
    assert close(out, want)
    assert close(state, want_state)


@pytest.mark.parametrize("cuts", [[64], [128], [64, 128], [192], [64, 128, 192]])
def test_cuts_at_multiples_of_64_are_bit_equal(cuts: list[int]) -> None:
    data = inputs(193, seed=3)
    whole_state, state = torch.zeros(HV, DK, DK), torch.zeros(HV, DK, DK)
    whole = run(data, whole_state, [], "grouped")
    assert torch.equal(run(data, state, cuts, "grouped"), whole)
    assert torch.equal(state, whole_state)


def test_orders_differ() -> None:
    data = inputs(3)
    grouped = run(data, torch.zeros(HV, DK, DK), [], "grouped")
    tiled = run(data, torch.zeros(HV, DK, DK), [], "tiled")
    assert not torch.allclose(grouped, tiled)


def test_strong_decay_neither_overflows_nor_loses_the_rows() -> None:
    q, k, v, g, beta = inputs(130, seed=4)
    g = g * 0.05
    g[::7] = -60.0  # sums far larger than the decays that their differences must give
    data = (q, k, v, g, beta)
    state = torch.zeros(HV, DK, DK)
    out = run(data, state, [], "tiled")
    want, _ = plain(data, torch.zeros(HV, DK, DK), "tiled")
    assert bool(torch.isfinite(out).all())
    assert close(out, want)
