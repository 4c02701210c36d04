"""Block selection and sparse attention: Triton against the torch references."""

import pytest
import torch
from torch import Tensor
from triton_devices import triton_devices

from strata_coord.kernels.attention import attend
from strata_coord.kernels.block_select import block_scores, select_blocks, visible_tokens
from strata_coord.kernels.cuda_sparse_attention import (
    SparseScratch,
    make_sparse_scratch,
    select_blocks_triton,
    sparse_attention_cuda,
    tile_queries,
)


@pytest.fixture(params=triton_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Small integers: scores are exact on any device, and many are equal."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def selections(scratch: SparseScratch, rows: int, num_blocks: int, tile: int) -> Tensor:
    """Return bool [T, M] from the lists of the tiles."""
    selected = torch.zeros(rows, num_blocks, dtype=torch.bool)
    for row in range(rows):
        count = int(scratch.counts[row // tile])
        ids, words = scratch.ids[row // tile, :count].cpu().long(), scratch.words[row // tile, :count].cpu()
        assert bool((ids.diff() > 0).all())
        selected[row, ids[(words >> row % tile) & 1 == 1]] = True
    return selected


@pytest.mark.parametrize(
    ("rows", "first", "block", "num_selected"), [(9, 70, 4, 5), (21, 0, 4, 3), (6, 3, 2, 40), (1, 130, 4, 7)]
)
def test_blocks_are_those_of_the_reference(
    device: torch.device, rows: int, first: int, block: int, num_selected: int
) -> None:
    num_blocks = (first + rows) // block
    q, keys = whole_numbers(rows, 2, 20, seed=rows), whole_numbers(num_blocks, 20, seed=first)
    complete = (torch.arange(first, first + rows) + 1) // block
    want = select_blocks(block_scores(q, keys), complete, num_selected)
    tile = 4
    scratch = make_sparse_scratch(rows, num_blocks + 3, num_selected, tile=tile, device=device)
    scratch.scores_TM.fill_(1e9)  # what no tile wrote must not be read
    select_blocks_triton(
        q.to(device),
        keys.to(device),
        first,
        block=block,
        num_selected=num_selected,
        tile=tile,
        scratch=scratch,
    )
    assert torch.equal(selections(scratch, rows, num_blocks, tile), want)


@pytest.mark.parametrize(
    ("rows", "first", "heads", "groups", "dim"),
    [(10, 61, 6, 2, 24), (7, 0, 4, 1, 16), (18, 40, 3, 3, 16), (1, 77, 24, 2, 16)],
)
@pytest.mark.parametrize("scratch_rows", [64, 16])
def test_attention_is_that_of_the_mask(
    device: torch.device, rows: int, first: int, heads: int, groups: int, dim: int, scratch_rows: int
) -> None:
    block, num_selected = 4, 5
    length = first + rows
    num_blocks = length // block
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads, dim, generator=generator)
    k, v = torch.randn(2, groups, length + 3, dim, generator=generator)
    index_q, keys = whole_numbers(rows, 2, 16, seed=1), whole_numbers(num_blocks, 16, seed=2)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (x.to(device, dtype) for x in (q, k, v))

    complete = (torch.arange(first, length) + 1) // block
    selected = select_blocks(block_scores(index_q, keys), complete, num_selected)
    visible = visible_tokens(selected, first, length, block).to(device)
    want = attend(q.float(), k[:, :length].float(), v[:, :length].float(), visible)

    tile = tile_queries(heads, groups)
    scratch = make_sparse_scratch(scratch_rows, num_blocks, num_selected, tile=tile, device=device)
    got = sparse_attention_cuda(
        q,
        k.transpose(0, 1).contiguous().transpose(0, 1),  # keys may lie position-major
        v,
        index_q.to(device),
        keys.to(device),
        first,
        block=block,
        num_selected=num_selected,
        scratch=scratch,
        out=torch.empty_like(q),
    )
    tolerance = 2e-2 if device.type == "cuda" else 1e-5
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


def test_missing_keys_and_scratch_are_refused(device: torch.device) -> None:
    q, k = torch.zeros(4, 2, 16, device=device), torch.zeros(1, 12, 16, device=device)
    index_q, keys = torch.zeros(4, 1, 16, device=device), torch.zeros(3, 16, device=device)

    def run(first: int, num_blocks: int) -> None:
        scratch = make_sparse_scratch(16, num_blocks, 2, tile=8, device=device)
        sparse_attention_cuda(
            q, k, k, index_q, keys, first, block=4, num_selected=2, scratch=scratch, out=torch.empty_like(q)
        )

    with pytest.raises(ValueError, match="rows end at position 13"):
        run(9, 3)
    with pytest.raises(ValueError, match="scratch for 2 blocks, rows have 3"):
        run(8, 2)
