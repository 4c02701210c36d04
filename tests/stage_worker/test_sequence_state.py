from dataclasses import replace

import pytest
import torch
from layer_oracle import tiny_geometry_qwen4exp
from real_geometries import flash_next

from strata_coord.ipc.assignment import KvDtype
from strata_coord.ipc.errors import InvariantError, RequestError
from strata_coord.stage_worker.sequence_state import StatePool


def pool(
    *, tokens: int = 256, sequences: int = 3, dtype: KvDtype = "fp32", first: int = 0, last: int = 4
) -> StatePool:
    return StatePool(
        tiny_geometry_qwen4exp(),
        first,
        last,
        kv_dtype=dtype,
        kv_pool_tokens=tokens,
        max_sequences=sequences,
        device="cpu",
    )


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 32, generator=generator), torch.randn(count, 2, 32, generator=generator)


def test_keys_come_back_in_order_also_from_scattered_pages() -> None:
    states = pool()
    one, two = states.create(1), states.create(2)
    k, v = rows(130)
    other, _ = rows(60, seed=9)
    for start, stop in ((0, 60), (60, 64), (64, 65), (65, 130)):
        one.write_kv(3, start, k[start:stop], v[start:stop])
        if start == 0:
            two.write_kv(3, 0, other, other)
    assert one.pages == [0, 2, 3]
    for length in (1, 64, 65, 130):
        got_k, got_v = one.read_kv(3, length)
        assert torch.equal(got_k, k[:length].transpose(0, 1))
        assert torch.equal(got_v, v[:length].transpose(0, 1))
    assert torch.equal(two.read_kv(3, 60)[0], other.transpose(0, 1))


def test_one_run_of_pages_is_read_without_a_copy() -> None:
    states = pool()
    state = states.create(1)
    k, v = rows(100)
    state.write_kv(3, 0, k, v)
    assert state.read_kv(3, 100)[0].data_ptr() == states.keys[3].data_ptr()


@pytest.mark.parametrize("scattered", [False, True])
def test_block_keys_follow_the_pages(scattered: bool) -> None:
    states = pool()
    one, two = states.create(1), states.create(2)
    one.reserve(64)
    if scattered:
        two.reserve(64)
    one.reserve(128)
    keys = torch.randn(32, 16)
    one.write_blocks(3, 0, keys[:10])
    one.write_blocks(3, 10, keys[10:])
    assert torch.equal(one.read_blocks(3, 32), keys)
    assert torch.equal(one.read_blocks(3, 17), keys[:17])


def test_a_full_pool_refuses_with_both_numbers_and_takes_nothing() -> None:
    states = pool(tokens=128)
    one, two = states.create(1), states.create(2)
    one.reserve(65)
    with pytest.raises(RequestError, match="64 more tokens needed, 0 of 128 free"):
        two.reserve(1)
    states.drop(1)
    assert states.free_tokens == 128
    with pytest.raises(RequestError, match="192 more tokens needed, 128 of 128 free"):
        two.reserve(129)
    assert states.free_tokens == 128
    two.reserve(128)
    assert states.free_tokens == 0


def test_too_many_sequences_are_refused() -> None:
    states = pool(sequences=2)
    states.create(1)
    states.create(2)
    with pytest.raises(RequestError, match="no room for another sequence: 2 of 2 in use"):
        states.create(3)
    states.drop(1)
    states.create(3)


def test_create_twice_and_get_of_none_are_bugs() -> None:
    states = pool()
    states.create(1)
    with pytest.raises(InvariantError, match="sequence 1 already has a state"):
        states.create(1)
    with pytest.raises(InvariantError, match="sequence 5 has no state"):
        states.get(5)
    states.drop(5)


def test_a_new_sequence_finds_no_trace_of_the_last_one() -> None:
    states = pool(sequences=1)
    old = states.create(1)
    for view in (old.conv(0), old.recurrent(0), old.ngram_conv(1), old.raw_keys(3)):
        view.fill_(5.0)
    old.advance(0, 0, 10)
    states.drop(1)
    new = states.create(2)
    assert all(not bool(v.any()) for v in (new.conv(0), new.recurrent(0), new.ngram_conv(1), new.raw_keys(3)))
    assert new.length(0) == 0
    assert new.pages == []


def test_a_layer_refuses_rows_that_do_not_follow_on() -> None:
    state = pool().create(1)
    state.advance(2, 0, 5)
    with pytest.raises(InvariantError, match="sequence 1, layer 2: rows start at 4, the state ends at 5"):
        state.advance(2, 4, 1)
    state.advance(1, 0, 3)
    state.advance(2, 5, 1)
    assert state.length(2) == 6


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_narrow_keys_read_as_float32(dtype: KvDtype, tolerance: float) -> None:
    state = pool(dtype=dtype).create(1)
    k, v = rows(20)
    state.write_kv(3, 0, k, v)
    got, _ = state.read_kv(3, 20)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, k.transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_a_stage_without_attention_needs_no_pages() -> None:
    states = pool(tokens=0, last=3)
    states.create(1).reserve(10_000)
    assert states.free_tokens == 0


def test_a_stage_holds_the_state_of_its_own_layers_only() -> None:
    states = pool(first=2, last=4)
    assert set(states.recurrent) == {2}
    assert set(states.keys) == {3}
    assert not states.ngram_conv


def test_state_sizes_are_those_of_the_real_model() -> None:
    """Bytes per token and per sequence of models.md section 1.7, block keys in fp32 here."""
    tokens, sequences = 64, 1
    states = StatePool(
        flash_next(), 0, 48, kv_dtype="fp16", kv_pool_tokens=tokens, max_sequences=sequences, device="meta"
    )
    kv = sum(x.nbytes for group in (states.keys, states.values) for x in group.values())
    assert kv == 24_576 * tokens
    assert sum(x.nbytes for x in states.block_keys.values()) == 2 * 768 * tokens
    assert states.conv[0].nbytes == 122_880
    assert states.recurrent[0].nbytes == 3_145_728
    linear = sum(x.nbytes for group in (states.conv, states.recurrent) for x in group.values())
    assert linear == pytest.approx(112.2 * 2**20, rel=1e-3)
    assert states.ngram_conv[1].nbytes == 368_640
    raw = sum(x.nbytes for x in states.raw_keys.values())
    assert raw == 12 * 3 * 128 * 4
    assert states.num_bytes == kv + 2 * 768 * tokens + linear + 368_640 + raw


def test_a_ratio_that_does_not_divide_a_page_is_refused() -> None:
    sparse = tiny_geometry_qwen4exp().sparse_attention
    assert sparse is not None
    geometry = replace(
        tiny_geometry_qwen4exp(), sparse_attention=replace(sparse, compress_ratios=(0, 0, 0, 5))
    )
    with pytest.raises(InvariantError, match="compress ratio 5 does not divide a page of 64 tokens"):
        StatePool(geometry, 0, 4, kv_dtype="fp32", kv_pool_tokens=64, max_sequences=1, device="cpu")
