import pytest
import torch

from strata_coord.kernels.kv_rows import dequantize_rows, quantize_rows


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_a_row_is_off_by_half_a_unit_of_its_largest_value_at_most(scale: float) -> None:
    x = rows(2, 50, 64) * scale
    again = dequantize_rows(*quantize_rows(x))
    unit = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((again - x).abs() <= unit * 0.5001).all())


def test_each_row_has_its_own_scale() -> None:
    x = rows(3, 8, 16)
    x[1] *= 1000
    alone = quantize_rows(x[0])
    together = quantize_rows(x)
    assert torch.equal(alone[0], together[0][0])
    assert torch.equal(alone[1], together[1][0])


def test_zeros_and_signs_are_kept() -> None:
    x = torch.tensor([[0.0, 0.0], [-2.0, 2.0], [0.0, -1.0]])
    assert torch.equal(dequantize_rows(*quantize_rows(x)), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_so_in_their_row_alone(bad: float) -> None:
    x = rows(3, 8)
    x[1, 3] = bad
    again = dequantize_rows(*quantize_rows(x))
    assert not bool(torch.isfinite(again[1]).all())
    assert bool(torch.isfinite(again[[0, 2]]).all())
