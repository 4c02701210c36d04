"""Causal attention against a prefix: the device's ways and their merge against the torch reference."""

import pytest
import torch
from torch import Tensor
from triton_devices import triton_devices

from strata_coord.kernels.attention import causal_attention
from strata_coord.kernels.cuda_attention import Way, attention_way, causal_attention_cuda, merge_parts


@pytest.fixture(params=triton_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def tensors(rows: int, length: int, dim: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    shapes = ((rows, 6, dim), (2, length, dim), (2, length, dim))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def part(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [T, Q, D] over some keys and its log-sum-exp [Q, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[0], dim=0) for x in (k, v))
    scores = torch.einsum("tqd,qld->qtl", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("qtl,qld->tqd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(("rows", "prefix", "dim"), [(5, 9, 32), (40, 3, 24)])
def test_parts_merge_to_the_whole(device: torch.device, rows: int, prefix: int, dim: int) -> None:
    q, k, v = tensors(rows, prefix + rows, dim)
    want = causal_attention(q, k, v, prefix)
    one, lse_one = part(q, k[:, :prefix], v[:, :prefix], torch.ones(rows, prefix, dtype=torch.bool))
    two, lse_two = part(q, k[:, prefix:], v[:, prefix:], torch.ones(rows, rows, dtype=torch.bool).tril())
    got = merge_parts(*(x.to(device) for x in (one, lse_one, two, lse_two)))
    torch.testing.assert_close(got.cpu(), want)


def test_a_part_of_no_weight_changes_nothing(device: torch.device) -> None:
    one, two = torch.ones(2, 3, 8, device=device), torch.full((2, 3, 8), 7.0, device=device)
    heavy, light = torch.full((3, 2), 200.0, device=device), torch.full((3, 2), -200.0, device=device)
    assert torch.equal(merge_parts(one, heavy, two, light), one)
    assert torch.equal(merge_parts(one, light, two, heavy), two)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["flash", "merged", "masks"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 70), (64, 0), (33, 5), (64, 64), (100, 411)])
def test_ways_agree_with_the_reference(way: Way, dim: int, rows: int, first: int) -> None:
    q, k, v = tensors(rows, first + rows + 3, dim)
    want = causal_attention(q, k, v, first)
    q, k, v = (x.cuda().bfloat16() for x in (q, k, v))
    got = causal_attention_cuda(q, k, v, first, way=way)
    torch.testing.assert_close(got.float().cpu(), want, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(("rows", "first"), [(1, 8), (12, 0), (7, 20)])
@pytest.mark.parametrize("way", ["flash", "masks"])
def test_one_call_on_the_cpu(way: Way, rows: int, first: int) -> None:
    q, k, v = tensors(rows, first + rows)
    torch.testing.assert_close(
        causal_attention_cuda(q, k, v, first, way=way), causal_attention(q, k, v, first)
    )


def test_fewer_keys_than_positions_are_refused() -> None:
    q, k, v = tensors(3, 5)
    with pytest.raises(ValueError, match="rows end at position 6, keys at 5"):
        causal_attention_cuda(q, k, v, 3, way="flash")


def test_the_way_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_way(torch.device("cpu"), torch.bfloat16, 128) == ("masks", "device cpu")
    card = torch.device("cuda", 0)
    for capability, way in (((7, 5), "masks"), ((8, 6), "flash"), ((9, 0), "merged"), ((12, 0), "flash")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        got, reason = attention_way(card, torch.bfloat16, 128)
        assert got == way
        assert f"{capability[0]}.{capability[1]}" in reason
    assert attention_way(card, torch.float32, 128)[0] == "masks"
    assert attention_way(card, torch.bfloat16, 128, has_sinks=True) == ("masks", "sinks")
