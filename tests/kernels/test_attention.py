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


def windowed(rows: int, first: int, window: int) -> Tensor:
    own = torch.arange(first, first + rows).unsqueeze(1)
    keys = torch.arange(first + rows)
    return (keys <= own) & (keys > own - window)


@pytest.mark.parametrize("window", [1, 2, 16, 64])
@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 15), (1, 16), (1, 90), (7, 12), (33, 5), (64, 64)])
def test_a_window_hides_what_lies_further_back(rows: int, first: int, window: int) -> None:
    q, k, v = tensors(rows, first + rows)
    want = plain(q, k, v, windowed(rows, first, window))
    torch.testing.assert_close(causal_attention(q, k, v, first, window=window), want)


def test_tiles_of_a_window_see_no_more_keys_than_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(50, 80)
    want = plain(q, k, v, windowed(50, 30, 9))
    monkeypatch.setattr(attention, "WINDOW_TILE_ROWS", 8)
    seen: list[int] = []
    whole_attend = attend

    def counted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **sinks: Tensor | None) -> Tensor:
        seen.append(k.shape[1])
        return whole_attend(q, k, v, mask, **sinks)

    monkeypatch.setattr(attention, "attend", counted)
    torch.testing.assert_close(causal_attention(q, k, v, 30, window=9), want)
    assert seen == [17] * 5 + [13]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 9), (9, 3)])
def test_sinks_take_their_share_of_the_softmax(rows: int, first: int, window: int) -> None:
    q, k, v = tensors(rows, first + rows)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0, 8.0, -30.0])
    mask = windowed(rows, first, window or 100)
    want = torch.zeros_like(q)
    for head in range(6):
        scores = (q[:, head] @ k[head // 3].T / 4).masked_fill(~mask, float("-inf"))
        with_sink = torch.cat((scores, sinks[head].expand(rows, 1)), dim=1)
        want[:, head] = torch.softmax(with_sink, -1)[:, :-1] @ v[head // 3]
    torch.testing.assert_close(causal_attention(q, k, v, first, window=window, sinks_Q=sinks), want)
