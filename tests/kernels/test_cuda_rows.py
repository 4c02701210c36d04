"""Norms, rotations, gates, streams and the router: Triton against the torch references."""

import pytest
import torch
from torch import Tensor
from triton_devices import triton_devices

from strata_coord.kernels.cuda_hyper import (
    StreamWeights,
    make_stream_scratch,
    mix_streams_cuda,
    read_streams_cuda,
    write_streams_cuda,
    write_then_norm_cuda,
)
from strata_coord.kernels.cuda_norm import (
    Pairs,
    norm_rotate_cuda,
    norm_rotate_reference,
    rms_norm_cuda,
    sigmoid_gate_cuda,
)
from strata_coord.kernels.cuda_router import route_logits_cuda
from strata_coord.kernels.hyper import read_streams, write_streams
from strata_coord.kernels.norm import group_rms_norm, rms_norm
from strata_coord.kernels.rope import rotary_table
from strata_coord.kernels.router import Scores, route


@pytest.fixture(params=triton_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def normal(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("rows", "dim"), [(1, 40), (7, 64), (5, 100), (0, 8)])
def test_norm_of_rows(device: torch.device, rows: int, dim: int) -> None:
    x, weight = normal(device, rows, dim), normal(device, dim, seed=1)
    got = rms_norm_cuda(x, weight, 1e-6, out=torch.empty_like(x))
    torch.testing.assert_close(got, rms_norm(x, weight, 1e-6))


def test_norm_is_rounded_to_the_dtype_of_out(device: torch.device) -> None:
    x, weight = normal(device, 6, 64), normal(device, 64, seed=1)
    got = rms_norm_cuda(x.bfloat16(), weight, 1e-6, out=torch.empty_like(x, dtype=torch.bfloat16))
    want = rms_norm(x.bfloat16().float(), weight, 1e-6)
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)


def test_norm_of_groups_has_a_weight_for_each(device: torch.device) -> None:
    x, weight = normal(device, 5, 4 * 24), normal(device, 4 * 24, seed=1)
    got = rms_norm_cuda(x.view(5, 4, 24), weight.view(4, 24), 1e-5, out=torch.empty(5, 4, 24, device=device))
    torch.testing.assert_close(got.view(5, -1), group_rms_norm(x, weight, 4, 1e-5))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm_of_heads(device: torch.device, activation: str) -> None:
    x, weight = normal(device, 5, 3, 32), normal(device, 32, seed=1)
    gate = normal(device, 5, 3, 80, seed=2)[..., 16:48]  # not contiguous
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    want = rms_norm(x, weight, 1e-6) * act(gate)
    got = rms_norm_cuda(x, weight, 1e-6, out=x, gate=gate, activation=activation)  # type: ignore[arg-type]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize(("heads", "dim", "rotated"), [(3, 32, 16), (1, 24, 24), (2, 40, 12)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_rotated_in_place(
    device: torch.device, pairs: Pairs, heads: int, dim: int, rotated: int, normed: bool
) -> None:
    rows = 9
    wide = normal(device, rows, heads, 2 * dim)
    x = wide[..., :dim]  # a query beside its gate
    weight = normal(device, dim, seed=1) if normed else None
    cos, sin = rotary_table(torch.arange(100, 100 + rows, device=device), rotated, 1e4)
    want = norm_rotate_reference(x, weight, cos, sin, eps=1e-6, pairs=pairs)
    beside = wide[..., dim:].clone()
    got = norm_rotate_cuda(x, weight, cos, sin, eps=1e-6, pairs=pairs, out=x)
    torch.testing.assert_close(got, want)
    assert torch.equal(wide[..., dim:], beside)


def test_gate_of_heads(device: torch.device) -> None:
    x, gate = normal(device, 5, 3, 20), normal(device, 5, 3, 40, seed=1)[..., 20:]
    want = x * torch.sigmoid(gate)
    torch.testing.assert_close(sigmoid_gate_cuda(x, gate), want)


def stream_weights(device: torch.device, width: int, rank: int, streams: int) -> StreamWeights:
    return StreamWeights(
        gamma_W=normal(device, width, seed=1),
        down_RW=normal(device, rank, width, seed=2) * width**-0.5,
        up_WR=normal(device, width, rank, seed=3),
        inject_NW=normal(device, streams, width, seed=4) * width**-0.5,
    )


@pytest.mark.parametrize(("rows", "dim"), [(1, 40), (6, 64)])
def test_streams_are_read_and_written(device: torch.device, rows: int, dim: int) -> None:
    streams, rank = 4, 8
    weights = stream_weights(device, streams * dim, rank, streams)
    first, second = normal(device, rows, streams * dim), normal(device, rows, dim, seed=9)
    want_rows = first.clone()
    operands = (weights.gamma_W, weights.down_RW, weights.up_WR, weights.inject_NW)
    want, want_write = read_streams(want_rows, *operands, num_streams=streams, eps=1e-6)
    assert want_write is not None

    scratch = make_stream_scratch(rows + 2, weights, streams)
    out = torch.empty(rows, dim, device=device)
    got_rows = first.clone()
    got, write = read_streams_cuda(got_rows, weights, num_streams=streams, eps=1e-6, scratch=scratch, out=out)
    assert write is not None
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(write, want_write)

    write_streams(want_rows, second, want_write)
    fused = got_rows.clone()
    write_streams_cuda(got_rows, second, write)
    torch.testing.assert_close(got_rows, want_rows)

    want, want_write = read_streams(want_rows, *operands, num_streams=streams, eps=1e-6)
    write_then_norm_cuda(fused, second, write, weights, num_streams=streams, eps=1e-6, scratch=scratch)
    mix_streams_cuda(weights, num_streams=streams, scratch=scratch, out=out)
    torch.testing.assert_close(fused, want_rows)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(scratch.write_TN[:rows], want_write)


def test_the_head_reads_without_write_weights(device: torch.device) -> None:
    weights = stream_weights(device, 64, 8, 4)
    head = StreamWeights(
        gamma_W=weights.gamma_W, down_RW=weights.down_RW, up_WR=weights.up_WR, inject_NW=None
    )
    rows = normal(device, 3, 64)
    scratch = make_stream_scratch(3, head, 4)
    got, write = read_streams_cuda(
        rows, head, num_streams=4, eps=1e-6, scratch=scratch, out=torch.empty(3, 16, device=device)
    )
    want, _ = read_streams(rows, head.gamma_W, head.down_RW, head.up_WR, None, num_streams=4, eps=1e-6)
    assert write is None
    torch.testing.assert_close(got, want)


def test_no_rows_are_read_and_written(device: torch.device) -> None:
    weights = stream_weights(device, 64, 8, 4)
    rows, out = torch.empty(0, 64, device=device), torch.empty(0, 16, device=device)
    scratch = make_stream_scratch(1, weights, 4)
    _, write = read_streams_cuda(rows, weights, num_streams=4, eps=1e-6, scratch=scratch, out=out)
    assert write is not None
    write_streams_cuda(rows, out, write)
    assert write.shape == (0, 4)


def routed(device: torch.device, logits: Tensor, selected: int, **options: object) -> tuple[Tensor, Tensor]:
    ids = torch.full((logits.shape[0], selected), -1, dtype=torch.int32, device=device)
    weights = torch.full((logits.shape[0], selected), -1.0, device=device)
    route_logits_cuda(logits, selected, ids_TK=ids, weights_TK=weights, **options)  # type: ignore[arg-type]
    return ids, weights


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "selected"), [(512, 10), (128, 8), (60, 16), (8, 8), (5, 1)])
@pytest.mark.parametrize("biased", [True, False])
def test_routes_are_those_of_the_reference(
    device: torch.device, scores: Scores, experts: int, selected: int, biased: bool
) -> None:
    logits = normal(device, 6, experts)
    identity = torch.eye(experts, device=device)
    bias = normal(device, experts, seed=1) if biased else None
    selection = normal(device, experts, seed=2) * 0.1 if biased else None
    options = {
        "bias_E": bias,
        "scores": scores,
        "selection_bias_E": selection,
        "renormalised": not biased,
        "scale": 2.5,
    }
    want_ids, want_weights = route(logits, identity, selected, **options)  # type: ignore[arg-type]
    ids, weights = routed(device, logits, selected, **options)
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want_weights)


def test_equal_experts_are_taken_by_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(2, 12, device=device)
    logits[1, [3, 7, 9]] = 1.0
    ids, _ = routed(device, logits, 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [3, 7, 9, 0, 1]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_a_row_that_is_not_finite_still_names_experts(device: torch.device) -> None:
    logits = torch.full((1, 6), float("nan"), device=device)
    ids, weights = routed(device, logits, 3)
    assert ids.tolist() == [[0, 1, 2]]
    assert bool(weights.isnan().all())
