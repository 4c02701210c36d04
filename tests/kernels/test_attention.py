import pytest
import torch
from torch import Tensor

from strata_coord.kernels import attention
from strata_coord.kernels.attention import attend, causal_attention


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    per_group = q.shape[1] // k.shape[0]
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[head // per_group].T) / q.shape[2] ** 0.5
        out[:, head] = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v[head // per_group]
    return out


def tensors(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    shapes = ((rows, 6, 16), (2, length, 16), (2, length, 16))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 40), (2, 0), (7, 0), (33, 5), (64, 64)])
def test_causal_with_prefix(rows: int, first: int) -> None:
    q, k, v = tensors(rows, first + rows + 3)
    length = first + rows
    mask = torch.ones(rows, length, dtype=torch.bool).tril(first)
    want = plain(q, k[:, :length], v[:, :length], mask)
    torch.testing.assert_close(causal_attention(q, k, v, first), want)


def test_tiles_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(50, 80)
    whole = causal_attention(q, k, v, 30)
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 80 * 7)
    assert [stop - start for start, stop in attention.query_tiles(50, 80)] == [7] * 7 + [1]
    torch.testing.assert_close(causal_attention(q, k, v, 30), whole)


@pytest.mark.parametrize("rows", [1, 9])
def test_selection_mask(rows: int) -> None:
    q, k, v = tensors(rows, 20)
    mask = torch.rand(rows, 20, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:, 0] = True
    torch.testing.assert_close(attend(q, k, v, mask), plain(q, k, v, mask))


def test_too_few_keys_are_refused() -> None:
    q, k, v = tensors(4, 6)
    with pytest.raises(ValueError, match="rows end at position 7, keys at 6"):
        causal_attention(q, k, v, 3)
