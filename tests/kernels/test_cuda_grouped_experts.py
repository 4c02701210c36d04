"""Grouped experts and the ordered sum: Triton against the loop over experts."""

import pytest
import torch
from torch import Tensor
from triton_devices import triton_devices

from strata_coord.kernels.combine import GroupBounds, add_in_order, add_in_order_triton, inverse_order
from strata_coord.kernels.grouped_experts import (
    Method,
    grouped_method,
    grouped_swiglu,
    make_grouped_scratch,
)


@pytest.fixture(params=triton_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def dtype_on(device: torch.device) -> torch.dtype:
    """The interpreter multiplies no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def tolerance(device: torch.device) -> float:
    return 2e-2 if device.type == "cuda" else 1e-5


class Case:
    """Random rows and experts; counts[e] rows at expert e."""

    def __init__(self, counts: list[int], hidden: int, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(sum(counts) + hidden)
        dtype = dtype_on(device)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        self.counts = counts
        self.x = normal(40, hidden)
        self.tokens = torch.randint(0, 40, (sum(counts),), generator=generator).to(device, torch.int32)
        offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        self.offsets = offsets.to(device, torch.int32)
        self.gate_up = normal(len(counts), 2 * width, hidden, scale=hidden**-0.5)
        self.down = normal(len(counts), hidden, width, scale=width**-0.5)

    def run(
        self, method: Method, *, capacity: int, first: int = 0, last: int | None = None, skip: int = 0
    ) -> Tensor:
        last = len(self.counts) if last is None else last
        gate_up, down = self.gate_up[first:last], self.down[first:last]
        scratch = make_grouped_scratch(capacity, gate_up, method=method)
        scratch.y_nD.fill_(float("nan"))
        offsets = self.offsets[first : last + 1]
        return grouped_swiglu(
            self.x, self.tokens, offsets, gate_up, down, scratch=scratch, method=method, skip_rows=skip
        )


def methods(device: torch.device, case: Case) -> list[Method]:
    if device.type == "cuda":
        chosen, _ = grouped_method(device, torch.bfloat16, case.x.shape[1], case.down.shape[2])
        if chosen == "grouped_mm":
            return ["triton", "grouped_mm"]
    return ["triton"]


@pytest.mark.parametrize(
    ("counts", "hidden", "width"),
    [
        ([3, 0, 17, 1, 0, 33], 48, 24),
        ([0, 0, 0, 5], 40, 16),
        ([16, 15], 64, 40),
        ([1], 32, 8),
    ],
)
def test_products_equal_the_loop_over_experts(
    device: torch.device, counts: list[int], hidden: int, width: int
) -> None:
    case = Case(counts, hidden, width, device)
    rows = sum(counts)
    want = case.run("torch", capacity=rows)
    for method in methods(device, case):
        for capacity in (rows, rows + 5):
            got = case.run(method, capacity=capacity)[:rows]
            torch.testing.assert_close(got, want, rtol=tolerance(device), atol=tolerance(device))


def test_sizes_that_no_tile_divides(device: torch.device) -> None:
    case = Case([5, 19], 37, 13, device)
    want = case.run("torch", capacity=24)
    got = case.run("triton", capacity=24)
    torch.testing.assert_close(got, want, rtol=tolerance(device), atol=tolerance(device))


def test_a_group_is_multiplied_in_parts_and_leaves_other_groups_rows_out(device: torch.device) -> None:
    case = Case([7, 20, 0, 11, 4], 32, 16, device)
    want = case.run("torch", capacity=42)[7:38]
    for method in methods(device, case):
        parts = [case.run(method, capacity=12, first=1, last=4, skip=skip) for skip in (0, 12, 24)]
        got = torch.cat(parts)
        torch.testing.assert_close(got[:31], want, rtol=tolerance(device), atol=tolerance(device))
        if method == "triton":
            assert bool(got[31:].isnan().all()), "rows of the next group were written"


def test_no_rows_at_all(device: torch.device) -> None:
    case = Case([0, 0], 32, 8, device)
    assert case.run("triton", capacity=4).shape == (4, 32)


def test_the_choice_says_why() -> None:
    method, reason = grouped_method(torch.device("cpu"), torch.float32, 64, 32)
    assert method == "torch"
    assert "cpu" in reason


@pytest.mark.parametrize(
    ("rows", "choices", "experts", "hidden"), [(9, 3, 5, 40), (4, 1, 2, 16), (3, 10, 12, 33)]
)
def test_sum_is_that_of_the_reference_in_any_grouping(
    device: torch.device, rows: int, choices: int, experts: int, hidden: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(rows)])
    weights = torch.rand(rows, choices, generator=generator)
    order = torch.argsort(ids.flatten(), stable=True)
    y = torch.randn(rows * choices, hidden, generator=generator)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    offsets = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0))).to(torch.int32)
    start = torch.randn(rows, hidden, generator=generator)

    want = start.clone()
    for row in range(rows):
        for expert in range(experts):
            for choice in (ids[row] == expert).nonzero().flatten().tolist():
                place = int((order == row * choices + choice).nonzero())
                want[row] += weights[row, choice] * y[place]

    inverse = inverse_order(order, choices)
    plain = start.clone()
    add_in_order(plain, y, inverse, weights)
    torch.testing.assert_close(plain, want)

    y, inverse, weights, offsets = (t.to(device) for t in (y, inverse, weights, offsets))
    cut = experts // 2
    whole, grouped, parts = (start.clone().to(device) for _ in range(3))
    add_in_order_triton(whole, y, inverse, weights, None)
    for bounds in (offsets[: cut + 1], offsets[cut:]):
        first, last = int(bounds[0]), int(bounds[-1])
        group = torch.full((rows * choices, hidden), float("nan"), device=device)
        group[: last - first] = y[first:last]
        add_in_order_triton(grouped, group, inverse, weights, GroupBounds(offsets_G1=bounds))
        for skip in range(0, last - first, 4):
            part = group[skip : skip + 4].contiguous()
            add_in_order_triton(parts, part, inverse, weights, GroupBounds(offsets_G1=bounds, skip_rows=skip))
    torch.testing.assert_close(whole.cpu(), want)
    assert torch.equal(grouped, whole)
    assert torch.equal(parts, whole)


def test_bounds_mean_the_same_in_the_reference() -> None:
    order = torch.tensor([2, 0, 3, 1])  # pairs of two rows with two choices
    inverse = inverse_order(order, 2)
    y = torch.arange(12.0).view(4, 3)
    weights = torch.ones(2, 2)
    whole, grouped = torch.zeros(2, 3), torch.zeros(2, 3)
    add_in_order(whole, y, inverse, weights)
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    for first, last in ((0, 1), (1, 2)):
        bounds = offsets[first : last + 1]
        rows = y[int(bounds[0]) : int(bounds[-1])].contiguous()
        add_in_order(grouped, rows, inverse, weights, bounds=GroupBounds(offsets_G1=bounds))
    assert torch.equal(whole, grouped)


def test_wrong_shapes_are_refused(device: torch.device) -> None:
    case = Case([2, 2], 32, 8, device)
    case.offsets = case.offsets[:-1]
    with pytest.raises(ValueError, match="do not fit"):
        case.run("triton", capacity=4)
    with pytest.raises(ValueError, match="for 2 rows"):
        add_in_order(torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2))
