from typing import Literal

import pytest
import torch

from strata_coord.kernels.router import route


def test_against_softmax_topk() -> None:
    x, router = torch.randn(20, 16), torch.randn(10, 16)
    ids, weights = route(x, router, 4)
    probabilities = torch.softmax(x @ router.T, -1)
    values, want = probabilities.topk(4)
    assert torch.equal(ids, want)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True))
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32


def test_equal_experts_go_to_the_lowest_ids() -> None:
    ids, weights = route(torch.randn(3, 8), torch.zeros(64, 8), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    torch.testing.assert_close(weights, torch.full((3, 5), 0.2))


def test_a_tie_at_the_cut_keeps_the_lowest_id() -> None:
    router = torch.tensor([[1.0], [3.0], [2.0], [2.0], [2.0]])
    ids, _ = route(torch.ones(1, 1), router, 3)
    assert ids.tolist() == [[1, 2, 3]]


def test_experts_of_no_weight_at_all_still_get_distinct_ids() -> None:
    router = torch.full((6, 1), -1000.0)
    router[4] = 1000.0
    ids, weights = route(torch.ones(1, 1), router, 3)
    assert ids.tolist() == [[4, 0, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


def test_sigmoid_scores_are_chosen_with_the_bias_and_weighted_without_it() -> None:
    x, router, bias = torch.randn(20, 16), torch.randn(10, 16), torch.randn(10)
    ids, weights = route(x, router, 3, scores="sigmoid", selection_bias_E=bias, scale=2.5)
    scores = torch.sigmoid(x @ router.T)
    want = (scores + bias).topk(3).indices
    assert torch.equal(ids, want)
    chosen = scores.gather(1, want)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_negative_choices_keep_their_order_and_ties_go_to_the_lowest_id() -> None:
    bias = torch.tensor([-3.0, -2.0, -0.5, -2.0, -0.5, -9.0])
    ids, _ = route(torch.zeros(1, 4), torch.zeros(6, 4), 4, scores="sigmoid", selection_bias_E=bias)
    assert ids.tolist() == [[2, 4, 1, 3]]


def test_minus_zero_ties_with_zero() -> None:
    router = torch.tensor([[-1.0], [1.0]])
    bias = torch.tensor([-0.5, -0.5])  # sigmoid(0) - 0.5 is zero for both
    ids, _ = route(torch.zeros(1, 1), router, 2, scores="sigmoid", selection_bias_E=bias)
    assert ids.tolist() == [[0, 1]]


def test_a_router_bias_is_part_of_the_logits() -> None:
    x, router, bias = torch.randn(9, 16), torch.randn(10, 16), torch.randn(10)
    ids, weights = route(x, router, 4, bias_E=bias)
    values, want = (x @ router.T + bias).topk(4)
    assert torch.equal(ids, want)
    torch.testing.assert_close(weights, torch.softmax(values, -1))  # of the chosen alone: gpt-oss


def test_weights_stay_probabilities_without_renormalisation() -> None:
    x, router = torch.randn(9, 16), torch.randn(10, 16)
    _, weights = route(x, router, 4, renormalised=False)
    torch.testing.assert_close(weights, torch.softmax(x @ router.T, -1).topk(4).values)


@pytest.mark.parametrize(("scores", "expected"), [("softmax", [[0, 1]]), ("sigmoid", [[2, 3]])])
def test_groups_rank_by_their_best_expert_or_by_their_best_two(
    scores: Literal["softmax", "sigmoid"], expected: list[list[int]]
) -> None:
    router = torch.tensor([[3.0], [-3.0], [2.0], [2.0], [-3.0], [-3.0]])
    ids, _ = route(torch.ones(1, 1), router, 2, scores=scores, groups=3, groups_used=1)
    assert ids.tolist() == expected


def test_weights_that_are_not_renormalised_are_the_probabilities() -> None:
    x, router = torch.randn(20, 16), torch.randn(10, 16)
    ids, weights = route(x, router, 4, renormalised=False)
    same_ids, scaled = route(x, router, 4)
    assert torch.equal(ids, same_ids)
    torch.testing.assert_close(weights, torch.softmax(x @ router.T, -1).gather(1, ids))
    assert torch.equal(weights / weights.sum(-1, keepdim=True), scaled)
    assert float(weights.sum(-1).max()) < 1.0
