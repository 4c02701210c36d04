import pytest
import torch

from strata_coord.kernels.attention import attend
from strata_coord.kernels.block_select import block_scores, select_blocks, visible_tokens
from strata_coord.kernels.selected_attention import attend_selected, gather_tile_rows, selected_positions

ROWS, HEADS, GROUPS, DIM = 5, 6, 2, 16


def selection(first: int, block: int, num_selected: int, *, bad_row: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(first)
    length = first + ROWS
    index_q = torch.randn(ROWS, 2, 8, generator=generator)
    if bad_row is not None:
        index_q[bad_row] = float("nan")
    scores = block_scores(index_q, torch.randn(length // block, 8, generator=generator))
    complete = torch.arange(first + 1, length + 1) // block
    return select_blocks(scores, complete, num_selected)


@pytest.mark.parametrize("first", range(40, 49))
@pytest.mark.parametrize("block", [2, 4, 8])
def test_gathered_attention_is_masked_attention(first: int, block: int) -> None:
    """Tails of every length, blocks that the row itself completes, several rows in a call."""
    selected = selection(first, block, 3)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(ROWS, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, GROUPS, first + ROWS, DIM, generator=generator)
    expected = attend(q, k, v, visible_tokens(selected, first, first + ROWS, block))
    positions, counts = selected_positions(selected, first, block)
    assert positions.shape == (ROWS, 3 * block + block - 1)
    shape = (GROUPS, ROWS, -1, DIM)
    gathered = (x[:, positions.flatten()].view(shape) for x in (k, v))
    torch.testing.assert_close(attend_selected(q, *gathered, counts), expected)


def test_places_that_do_not_count_lie_inside_the_sequence() -> None:
    positions, counts = selected_positions(selection(40, 8, 2), 40, 8)
    own = torch.arange(40, 40 + ROWS).unsqueeze(1)
    assert bool((positions <= own).all())
    assert counts.sum(1).tolist() == [16 + (position + 1) % 8 for position in range(40, 40 + ROWS)]


def test_a_row_that_is_not_finite_has_a_selection_of_the_same_size() -> None:
    good, bad = selection(44, 4, 3), selection(44, 4, 3, bad_row=2)
    assert bad.sum(1).tolist() == [3] * ROWS
    rest = [0, 1, 3, 4]
    assert torch.equal(good[rest], bad[rest])


def test_a_call_gathers_little_whatever_the_model() -> None:
    assert gather_tile_rows(2051, 2, 256) == 1
    assert gather_tile_rows(515, 2, 64) == 3
    assert gather_tile_rows(19, 2, 64) == 107
