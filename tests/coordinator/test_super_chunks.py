import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_coord.coordinator.super_chunks import even_super_chunks, round_up_to_grid
from strata_coord.ipc.errors import PlanError


@pytest.mark.parametrize(
    ("tokens", "most", "parts"),
    [
        (32768, 28672, (16384, 16384)),
        (1, 512, (1,)),
        (512, 512, (512,)),
        (513, 512, (256, 257)),
        (129, 128, (64, 65)),
        (65, 64, (64, 1)),  # a part is one block here: the tail cannot be joined to anything
        (4096, 512, (512,) * 8),
        (100, 100, (100,)),
        (10, 3, (2, 2, 3, 3)),
    ],
)
def test_known_cuts(tokens, most, parts):
    assert even_super_chunks(tokens, max_tokens=most) == parts


@given(tokens=st.integers(1, 300_000), blocks=st.integers(1, 600))
def test_parts_are_the_fewest_and_even_and_cut_on_the_grid(tokens, blocks):
    most = blocks * 64
    parts = even_super_chunks(tokens, max_tokens=most)
    assert sum(parts) == tokens
    assert len(parts) == -(-tokens // most)
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 64
    assert all(part % 64 == 0 for part in parts[:-1])
    if blocks > 1:
        assert len(parts) == 1 or min(parts) > 64 * (tokens // 64 // len(parts) - 1)
        assert parts[-1] > 1 or tokens == 1


@given(tokens=st.integers(1, 5000), most=st.integers(1, 5000))
def test_any_cap_is_kept(tokens, most):
    parts = even_super_chunks(tokens, max_tokens=most)
    assert sum(parts) == tokens
    assert 1 <= min(parts) <= max(parts) <= most
    assert max(parts) - min(parts) <= 64


def test_nothing_to_cut_is_an_error():
    with pytest.raises(PlanError, match="cannot cut 0 tokens"):
        even_super_chunks(0, max_tokens=64)
    with pytest.raises(PlanError, match="at most 0"):
        even_super_chunks(64, max_tokens=0)


def test_round_up_to_grid():
    assert [round_up_to_grid(tokens) for tokens in (1, 64, 65)] == [64, 64, 128]
