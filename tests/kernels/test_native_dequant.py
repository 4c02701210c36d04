"""Which of the two ways expands a block on the CPU, and what is said about it."""

import logging
from collections.abc import Iterator
from importlib import metadata

import pytest
import torch

from strata_coord.kernels import native_dequant
from strata_coord.kernels.dequant import EXPANDERS, dequantize
from strata_coord.kernels.formats import block_format, type_id

Q4_K = type_id("Q4_K")
installed = pytest.mark.skipif(
    not native_dequant.describe().startswith("libgguf"), reason=native_dequant.describe()
)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing is remembered of what was chosen before, nor afterwards."""
    caches = (native_dequant._load, native_dequant._agreed)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class OtherRounding:
    """A library that expands everything to ones."""

    def row_size(self, qtype: int, n_per_row: int) -> int:
        block = block_format(qtype)
        return n_per_row // block.block_elements * block.block_bytes

    def dequantize_rows_into_raw(self, qtype, src, dst, n_rows, n_per_row) -> int:  # type: ignore[no-untyped-def]
        dst[...] = 1.0
        return 0


def sample(ggml_type: int, elements: int) -> torch.Tensor:
    block = block_format(ggml_type)
    size = (elements // block.block_elements * block.block_bytes,)
    return torch.randint(0, 60, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@installed
def test_the_library_is_used_for_every_quantised_type_but_q2_0() -> None:
    own = {kind for kind in EXPANDERS if native_dequant.choose(kind, 256, EXPANDERS[kind]) is None}
    assert own == {type_id(name) for name in ("F32", "F16", "BF16", "Q2_0")}


@installed
def test_large_codebook_tensors_stay_with_torch() -> None:
    kind = type_id("IQ3_S")
    assert native_dequant.choose(kind, 1 << 17, EXPANDERS[kind]) is None
    assert native_dequant.choose(kind, 1 << 16, EXPANDERS[kind]) is not None


@pytest.mark.usefixtures("fresh")
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert native_dequant.describe() == "torch (libgguf is not installed)"
    assert native_dequant.choose(Q4_K, 256, EXPANDERS[Q4_K]) is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("version", ["0.2.1", "0.3", "0.3.0", "1.0", "0.2"])
def test_another_version_is_not_used(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    want = f"torch (libgguf {version} is installed, 0.2.2 up to but not including 0.3 is supported)"
    assert native_dequant.describe() == want


@pytest.mark.usefixtures("fresh")
def test_a_type_that_the_library_expands_otherwise_stays_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raw = sample(Q4_K, 512)
    want = dequantize(raw, Q4_K, 512)
    native_dequant._agreed.cache_clear()
    monkeypatch.setattr(native_dequant, "_load", lambda: (OtherRounding(), "0.2.9"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(dequantize(raw, Q4_K, 512), want)
        assert torch.equal(dequantize(raw, Q4_K, 512), want)
    assert caplog.messages == ["libgguf 0.2.9 expands Q4_K blocks otherwise than torch: torch does"]


@installed
@pytest.mark.leaves("a pool of two threads, ended here")
def test_threads_share_a_large_expansion() -> None:
    elements = 2 * native_dequant.ELEMENTS_PER_THREAD + 5 * 256
    raw = sample(Q4_K, elements)
    want = dequantize(raw, Q4_K, elements)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = dequantize(raw, Q4_K, elements)
    finally:
        torch.set_num_threads(before)
        native_dequant._pool(2).shutdown()
        native_dequant._pool.cache_clear()
    assert torch.equal(got, want)
