import gguf
import numpy as np
import pytest
import torch

from strata_coord.kernels import native_dequant
from strata_coord.kernels.dequant import EXPANDERS, dequantize
from strata_coord.kernels.formats import block_format, type_id

Q2_0 = type_id("Q2_0")
# Where the fp16 fields of a block begin, where that is not at its first byte.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ1_M": (54,),  # its number is spread over four words; the highest bits lie here
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}
ORACLED = [kind for kind in EXPANDERS if kind != Q2_0]


def random_bytes(ggml_type: int, rows: int, blocks_per_row: int, seed: int = 0) -> np.ndarray:
    """Random blocks whose fp16 fields are finite: one exponent bit of each is cleared."""
    block = block_format(ggml_type)
    raw = np.random.default_rng(seed).integers(
        0, 256, (rows, blocks_per_row, block.block_bytes), dtype=np.uint8
    )
    if block.name in {"F32", "F16", "BF16"}:
        raw[..., block.block_bytes - 1] &= 0xBF
        return raw.reshape(rows, -1)
    for place in HALVES.get(block.name, (0,)):
        raw[..., place + 1] &= 0xBF
    return raw.reshape(rows, -1)


@pytest.fixture(params=["torch", "libgguf"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two ways that the CPU has."""
    if request.param == "torch":
        monkeypatch.setattr(native_dequant, "choose", lambda *_ignored: None)
    elif not native_dequant.describe().startswith("libgguf"):
        pytest.skip(native_dequant.describe())
    return str(request.param)


@pytest.mark.parametrize("ggml_type", ORACLED, ids=lambda kind: block_format(kind).name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5)])
def test_bit_equal_to_gguf(ggml_type: int, rows: int, blocks: int, way: str) -> None:
    raw = random_bytes(ggml_type, rows, blocks)
    kind = gguf.GGMLQuantizationType(ggml_type)
    want = gguf.quants.dequantize(raw, kind).astype(np.float32)
    got = dequantize(
        torch.from_numpy(raw).flatten(), ggml_type, (rows, blocks * block_format(ggml_type).block_elements)
    )
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy().view(np.int32), want.view(np.int32))
    assert np.isfinite(want).all()
    assert len(np.unique(want)) > 1 or want.size == 1


@pytest.mark.parametrize("ggml_type", ORACLED, ids=lambda kind: block_format(kind).name)
def test_any_bytes_give_what_gguf_gives(ggml_type: int, way: str) -> None:
    """Scales that are infinite, subnormal or no numbers included; 1200 blocks meet every byte everywhere."""
    block = block_format(ggml_type)
    raw = np.random.default_rng(ggml_type).integers(0, 256, (1200, block.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(ggml_type)).astype(np.float32)
    got = dequantize(torch.from_numpy(raw).flatten(), ggml_type, (1200, block.block_elements))
    np.testing.assert_array_equal(got.numpy(), want)


def test_every_type_that_gguf_expands_is_here() -> None:
    expandable = {kind.value for kind in gguf.quants._type_traits} | {type_id("F32"), type_id("F16")}
    assert set(EXPANDERS) == expandable | {Q2_0}


def test_q2_0_by_hand() -> None:
    raw = np.random.default_rng(1).integers(0, 256, (7, 18), dtype=np.uint8)
    raw[:, 1] &= 0xBF
    want = np.zeros((7, 64), dtype=np.float32)
    for row in range(7):
        scale = raw[row, :2].copy().view(np.float16).astype(np.float32)[0]
        for k in range(64):
            want[row, k] = (float((raw[row, 2 + k // 4] >> (2 * (k % 4))) & 3) - 1) * scale
    got = dequantize(torch.from_numpy(raw).flatten(), Q2_0, (7, 64))
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_1", "IQ2_XXS", "IQ1_M"])
@pytest.mark.parametrize("blocks", [1, 4])
def test_bytes_at_any_alignment(name: str, blocks: int, way: str) -> None:
    kind = type_id(name)
    raw = torch.from_numpy(random_bytes(kind, 1, blocks)).flatten()
    shape = (blocks * block_format(kind).block_elements,)
    shifted = torch.cat((torch.zeros(3, dtype=torch.uint8), raw))[3:]
    assert torch.equal(dequantize(shifted, kind, shape), dequantize(raw, kind, shape))


def test_out_is_used_and_shaped() -> None:
    kind = type_id("Q8_0")
    raw = torch.from_numpy(random_bytes(kind, 6, 2)).flatten()
    out = torch.full((6 * 64,), 7.0)
    got = dequantize(raw, kind, (2, 3, 64), out=out)
    assert got.data_ptr() == out.data_ptr()
    assert got.shape == (2, 3, 64)
    assert torch.equal(got, dequantize(raw, kind, (2, 3, 64)))


def test_an_int_is_a_shape() -> None:
    assert dequantize(torch.zeros(8, dtype=torch.uint8), 0, 2).tolist() == [0.0, 0.0]


def test_unsupported_type_is_named() -> None:
    with pytest.raises(ValueError, match="cannot expand Q8_K blocks; supported types: F32"):
        dequantize(torch.zeros(292, dtype=torch.uint8), type_id("Q8_K"), (1, 256))


def test_sizes_that_do_not_agree_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 68 bytes of uint8, got 34"):
        dequantize(torch.zeros(34, dtype=torch.uint8), type_id("Q8_0"), (2, 32))
    with pytest.raises(ValueError, match="out must be 32 contiguous floats, got 31"):
        dequantize(torch.zeros(34, dtype=torch.uint8), type_id("Q8_0"), (1, 32), out=torch.zeros(31))
