"""Convolution and gated delta rule: Triton, and fla-core where it runs, against the torch references."""

import pytest
import torch
from torch import Tensor
from triton_devices import triton_devices

from strata_coord.kernels import cuda_gated_delta
from strata_coord.kernels.causal_conv import causal_conv_silu
from strata_coord.kernels.cuda_conv import causal_conv_silu_cuda
from strata_coord.kernels.cuda_gated_delta import gated_delta_cuda, recurrent_gated_delta_triton
from strata_coord.kernels.gated_delta import HeadOrder, gated_delta


@pytest.fixture(params=triton_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.parametrize(
    ("rows", "columns", "taps", "dilation"), [(1, 20, 4, 1), (37, 150, 4, 1), (5, 9, 3, 3)]
)
def test_convolution_moves_its_history(
    device: torch.device, rows: int, columns: int, taps: int, dilation: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, columns + 7, generator=generator).to(device)
    x = wide[:, :columns]
    history = torch.randn((taps - 1) * dilation, columns, generator=generator).to(device)
    weight = torch.randn(columns, taps, generator=generator).to(device)
    want_history = history.clone()
    want = causal_conv_silu(x, want_history, weight, dilation=dilation)
    got = causal_conv_silu_cuda(x, history, weight, out=torch.empty_like(x).contiguous(), dilation=dilation)
    torch.testing.assert_close(got, want)
    assert torch.equal(history, want_history)


def test_convolution_refuses_a_history_of_another_length(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(8, 4, device=device)
    with pytest.raises(ValueError, match=r"\[3, 8\]"):
        causal_conv_silu_cuda(x, torch.zeros(2, 8, device=device), weight, out=torch.empty_like(x))


def inputs(rows: int, groups: int, heads: int, key: int, value: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    mixed = normal(
        rows, 2 * groups * key + heads * value
    )  # q, k and v lie in one row, as after the convolution
    q, k, v = mixed.split([groups * key, groups * key, heads * value], dim=1)
    g, beta = -torch.nn.functional.softplus(normal(rows, heads)), torch.sigmoid(normal(rows, heads))
    heads_of = (q.unflatten(1, (groups, key)), k.unflatten(1, (groups, key)), v.unflatten(1, (heads, value)))
    return [*heads_of, g, beta, normal(heads, key, value)]


@pytest.mark.parametrize("order", ["grouped", "tiled"])
@pytest.mark.parametrize(
    ("rows", "groups", "heads", "key", "value"), [(1, 2, 6, 16, 16), (9, 1, 3, 24, 40), (4, 2, 2, 16, 32)]
)
def test_rows_one_by_one(
    device: torch.device, order: HeadOrder, rows: int, groups: int, heads: int, key: int, value: int
) -> None:
    *operands, state = inputs(rows, groups, heads, key, value, device)
    want_state = state.clone()
    want = gated_delta(*operands, want_state, first_position=3, order=order)
    out = torch.empty(rows, heads, value, device=device)
    recurrent_gated_delta_triton(*operands, state, order=order, out=out)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, want_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["grouped", "tiled"])
@pytest.mark.parametrize(("rows", "first"), [(70, 0), (130, 60), (20, 30), (65, 64), (150, 100)])
def test_segments_that_begin_and_end_anywhere(
    device: torch.device, order: HeadOrder, rows: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_gated_delta, "chunk_rule_refusal", lambda: "this test has no device")
    *operands, state = inputs(rows, 2, 4, 32, 32, device)
    if device.type == "cuda":
        operands[:3] = [x.bfloat16() for x in operands[:3]]
    floats = [x.float() for x in operands]
    want_state = state.clone()
    want = gated_delta(*floats, want_state, first_position=first, order=order)
    out = torch.empty(rows, 4, 32, device=device, dtype=operands[2].dtype)
    gated_delta_cuda(*operands, state, first_position=first, order=order, out=out)
    scale = 1e-4 if device.type == "cpu" else 3e-2
    torch.testing.assert_close(out.float(), want, rtol=scale, atol=scale)
    torch.testing.assert_close(state, want_state, rtol=scale, atol=scale)


def test_why_long_runs_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_gated_delta.importlib.util, "find_spec", lambda _: None)
    cuda_gated_delta.chunk_rule_refusal.cache_clear()
    try:
        assert cuda_gated_delta.chunk_rule_refusal() == "fla-core is not installed"
    finally:
        cuda_gated_delta.chunk_rule_refusal.cache_clear()


def test_a_state_that_is_not_fp32_is_refused(device: torch.device) -> None:
    *operands, state = inputs(2, 1, 1, 16, 16, device)
    out = torch.empty(2, 1, 16, device=device)
    with pytest.raises(ValueError, match="bfloat16"):
        gated_delta_cuda(*operands, state.bfloat16(), first_position=0, order="tiled", out=out)
