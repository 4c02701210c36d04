import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_coord.kernels.ngram import history_ids, ngram_rows

EOS = 3


def plain_history(ids: list[int], position: int, size: int) -> list[int]:
    """t_0 is the own id; what is missing, and all at or before the nearest earlier EOS, reads as EOS."""
    out = [ids[position]]
    cut = False
    for distance in range(1, size):
        at = position - distance
        cut = cut or at < 0 or ids[at] == EOS
        out.append(EOS if cut else ids[at])
    return out


def plain_rows(
    ids: list[int], multipliers: list[int], sizes: list[int], offsets: list[int]
) -> list[list[int]]:
    size = len(multipliers)
    per_order = len(sizes) // (size - 1)
    rows = []
    for position in range(len(ids)):
        history = plain_history(ids, position, size)
        row = []
        for n in range(2, size + 1):
            mix = 0
            for d in range(n):
                mix ^= history[d] * multipliers[d] % 2**64
            for head in range((n - 2) * per_order, (n - 1) * per_order):
                row.append(mix % sizes[head] + offsets[head])
        rows.append(row)
    return rows


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 6) | st.integers(0, 248319), min_size=1, max_size=12),
    multipliers=st.lists(st.integers(1, 2**64 - 1), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 20_000_400), min_size=6, max_size=6),
    data=st.data(),
)
def test_exact_unsigned_arithmetic_from_any_position(
    ids: list[int], multipliers: list[int], sizes: list[int], data: st.DataObject
) -> None:
    offsets = [sum(sizes[:i]) for i in range(6)]
    first = data.draw(st.integers(0, len(ids) - 1))
    got = ngram_rows(
        torch.tensor(ids),
        first,
        eos_token=EOS,
        multipliers=multipliers,
        head_vocab_sizes=sizes,
        head_offsets=offsets,
    )
    assert got.tolist() == plain_rows(ids, multipliers, sizes, offsets)[first:]


@pytest.mark.parametrize(
    "ids",
    [[EOS], [EOS, 5], [5, EOS, 6, 7], [5, EOS, EOS, 6], [EOS, EOS, EOS], [1, 2, EOS], [1, EOS, 2, EOS, 4]],
)
def test_eos_cuts_what_lies_before_it(ids: list[int]) -> None:
    for first in range(len(ids)):
        columns = history_ids(torch.tensor(ids), first, 3, EOS)
        got = torch.stack(columns, 1).tolist()
        assert got == [plain_history(ids, position, 3) for position in range(first, len(ids))]


def test_an_eos_of_its_own_does_not_cut_its_context() -> None:
    columns = history_ids(torch.tensor([8, 9, EOS]), 2, 3, EOS)
    assert [int(column[0]) for column in columns] == [EOS, 9, 8]


def test_uneven_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads with 3 offsets do not divide over n-grams"):
        ngram_rows(
            torch.tensor([1]),
            0,
            eos_token=EOS,
            multipliers=[1, 1, 1],
            head_vocab_sizes=[5, 5, 5],
            head_offsets=[0, 5, 10],
        )
