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
