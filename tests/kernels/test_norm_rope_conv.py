import math

import pytest
import torch

from strata_coord.kernels.causal_conv import causal_conv_silu
from strata_coord.kernels.expert_mlp import swiglu
from strata_coord.kernels.hyper import read_streams, write_streams
from strata_coord.kernels.norm import group_rms_norm, l2_normalize, rms_norm
from strata_coord.kernels.rope import (
    rotary_frequencies,
    rotary_table,
    rotate,
    rotate_neighbours,
    yarn_frequencies,
)


def test_rms_norm_against_torch() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(16)
    want = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), want)


def test_group_norm_treats_each_stream_alone() -> None:
    x, weight = torch.randn(4, 24), torch.randn(24)
    want = torch.cat([rms_norm(x[:, i : i + 8], weight[i : i + 8], 1e-6) for i in (0, 8, 16)], dim=1)
    assert torch.equal(group_rms_norm(x, weight, 3, 1e-6), want)


def test_l2_eps_is_added_to_the_sum() -> None:
    x = torch.tensor([[3e-3, 4e-3]])
    torch.testing.assert_close(l2_normalize(x), x / math.sqrt(25e-6 + 1e-6))


def test_rope_rotates_pairs_and_passes_the_rest() -> None:
    positions = torch.tensor([0, 1, 9])
    cos, sin = rotary_table(positions, 4, 100.0)
    x = torch.randn(3, 2, 6)
    got = rotate(x, cos, sin)
    for row, position in enumerate(positions.tolist()):
        for j in range(2):
            angle = position * 100.0 ** (-2 * j / 4)
            a, b = x[row, :, j], x[row, :, j + 2]
            torch.testing.assert_close(got[row, :, j], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(got[row, :, j + 2], b * math.cos(angle) + a * math.sin(angle))
    assert torch.equal(got[..., 4:], x[..., 4:])
    assert torch.equal(got[0], x[0])


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain = rotary_frequencies(64, 1e6).double()
    got = yarn_frequencies(64, 1e6, factor=4.0, original_tokens=32768, beta_fast=32, beta_slow=1).double()
    turns = plain * 32768 / (2 * math.pi)
    ratio = got / plain
    torch.testing.assert_close(ratio[turns > 60], torch.ones_like(ratio[turns > 60]), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        ratio[turns < 0.5], torch.full_like(ratio[turns < 0.5], 0.25), rtol=1e-6, atol=0
    )
    assert (ratio[1:] <= ratio[:-1] + 1e-6).all()
    assert ((ratio > 0.26) & (ratio < 0.99)).any()


def test_yarn_without_a_ramp_is_a_step() -> None:
    got = yarn_frequencies(4, 100.0, factor=2.0, original_tokens=1, beta_fast=32, beta_slow=1)
    plain = rotary_frequencies(4, 100.0)
    assert got.isfinite().all()
    assert torch.equal(got, torch.stack((plain[0], plain[1] / 2)))


def test_the_magnitude_multiplies_both_tables() -> None:
    positions = torch.tensor([0, 5])
    cos, sin = rotary_table(positions, 4, 100.0)
    scaled = rotary_table(positions, 4, 100.0, magnitude=1.25)
    assert torch.equal(scaled[0], cos * 1.25)
    assert torch.equal(scaled[1], sin * 1.25)


@pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (4, 3), (2, 5)])
def test_convolution_against_conv1d_and_in_any_cut(taps: int, dilation: int) -> None:
    x, weight = torch.randn(40, 32), torch.randn(32, taps)
    length = (taps - 1) * dilation
    padded = torch.cat((torch.zeros(length, 32), x)).T[None]
    want = torch.nn.functional.silu(
        torch.nn.functional.conv1d(padded, weight[:, None], groups=32, dilation=dilation)
    )[0].T
    history = torch.zeros(length, 32)
    whole = causal_conv_silu(x, history, weight, dilation=dilation)
    torch.testing.assert_close(whole, want)
    assert torch.equal(history, x[-length:])
    again = torch.zeros(length, 32)
    parts = [
        causal_conv_silu(part, again, weight, dilation=dilation) for part in x.split([1, 2, 3, 1, 20, 13])
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_wrong_history_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="need 9 rows of history, got 3"):
        causal_conv_silu(torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(2, 4), dilation=3)


def test_swiglu() -> None:
    x, gate, up, down = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 8), torch.randn(8, 5)
    g = x @ gate.T
    want = (g * torch.sigmoid(g) * (x @ up.T)) @ down.T
    torch.testing.assert_close(swiglu(x, gate, up, down), want)


def test_streams_read_and_write() -> None:
    streams, dim, rank = 4, 6, 3
    rows = torch.randn(5, streams * dim)
    gamma, down, up = torch.randn(24), torch.randn(rank, 24), torch.randn(24, rank)
    inject = torch.randn(streams, 24)
    x, write = read_streams(rows, gamma, down, up, inject, num_streams=streams, eps=1e-6)
    normed = torch.cat(
        [
            rms_norm(rows[:, s * dim : (s + 1) * dim], gamma[s * dim : (s + 1) * dim], 1e-6)
            for s in range(streams)
        ],
        1,
    )
    low = torch.nn.functional.silu(normed @ down.T / 4)
    gate = torch.sigmoid(low @ up.T)
    want = sum((gate * normed)[:, s * dim : (s + 1) * dim] for s in range(streams)) / 4
    torch.testing.assert_close(x, want)
    assert write is not None
    torch.testing.assert_close(write, 2 * torch.sigmoid(normed @ inject.T / 4))

    before, y = rows.clone(), torch.randn(5, dim)
    write_streams(rows, y, write)
    for s in range(streams):
        part = slice(s * dim, (s + 1) * dim)
        torch.testing.assert_close(rows[:, part], before[:, part] + write[:, s : s + 1] * y)
    assert read_streams(rows, gamma, down, up, None, num_streams=streams, eps=1e-6)[1] is None


def test_neighbours_are_rotated_as_halves_in_another_order() -> None:
    heads = torch.randn(5, 3, 12)
    cos, sin = rotary_table(torch.arange(7, 12), 8, 10000.0)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11])  # of 8 rotated dims and the 4 others
    want = rotate(heads, cos, sin)[..., order]
    torch.testing.assert_close(rotate_neighbours(heads[..., order], cos, sin), want)


def test_a_ramp_may_end_between_pairs() -> None:
    sizes = {"factor": 32.0, "original_tokens": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    whole = yarn_frequencies(64, 150000.0, **sizes)
    exact = yarn_frequencies(64, 150000.0, **sizes, whole_pairs=False)
    plain = rotary_frequencies(64, 150000.0)
    assert torch.equal(exact[:8], plain[:8])
    torch.testing.assert_close(exact[20:], plain[20:] / 32)
    # Turns over 4,096 positions fall from 32 at pair 8.09 to 1 at pair 17.4: the ramp of pair 13 is at
    # (13 - 8.09) / (17.4 - 8.09), or at (13 - 8) / (18 - 8).
    assert not torch.allclose(exact[13], whole[13], rtol=1e-3)
    torch.testing.assert_close(whole[13], plain[13] * (0.5 + 0.5 / 32))
