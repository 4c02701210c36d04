import pytest
import torch

from strata_coord.kernels.block_select import block_scores, select_blocks, visible_tokens


def test_scores_sum_rectified_products_over_heads() -> None:
    q, keys = torch.randn(5, 3, 8), torch.randn(7, 8)
    want = torch.stack([sum((q[t, h] @ keys.T).clamp_min(0) for h in range(3)) for t in range(5)])
    torch.testing.assert_close(block_scores(q, keys), want)


def test_ties_at_the_cut_go_to_the_lowest_block() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0, 0.0]])
    chosen = select_blocks(scores, torch.tensor([6]), 4)
    assert chosen[0].tolist() == [True, True, True, False, True, False]


def test_blocks_that_are_not_complete_are_never_chosen() -> None:
    scores = torch.tensor([[1.0, 1.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0]])
    chosen = select_blocks(scores, torch.tensor([0, 2, 4]), 3)
    assert chosen.tolist() == [[False] * 4, [True, True, False, False], [False, True, True, True]]


def test_choice_equals_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (40, 30), generator=generator).float()
    complete = torch.randint(0, 31, (40,), generator=generator)
    chosen = select_blocks(scores, complete, 8)
    for row in range(40):
        m = int(complete[row])
        best = sorted(range(m), key=lambda b: (-float(scores[row, b]), b))[:8]
        assert sorted(best) == chosen[row].nonzero().flatten().tolist()


@pytest.mark.parametrize("first", [0, 3, 6])
def test_visible_tokens_are_blocks_and_own_tail(first: int) -> None:
    rows, block = 5, 4
    length = first + rows
    blocks = length // block
    selected = torch.rand(rows, blocks, generator=torch.Generator().manual_seed(1)) < 0.5
    for t in range(rows):
        selected[t, (first + t + 1) // block :] = False
    visible = visible_tokens(selected, first, length, block)
    for t in range(rows):
        position = first + t
        tail = (position + 1) // block * block
        for token in range(length):
            in_block = token // block < blocks and bool(selected[t, token // block])
            assert bool(visible[t, token]) == (in_block or tail <= token <= position)
