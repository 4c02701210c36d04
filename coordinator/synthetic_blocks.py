"""Random bytes that are valid blocks of a ggml type, scaled to a wanted standard deviation.

Every byte pattern is a valid block of the types below, so a synthetic weight needs no quantiser: the bytes
are random and only the scale fields are set. The types and layouts are those of ggml-common.h, models.md
section 3.1 lists the sizes. numpy is imported inside the functions.

The same seed gives the same bytes with every release of numpy: only the raw words of a bit generator are
used, whose stream numpy promises to keep, and sums of integers in place of library functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.ggml_types import GGML_TYPES

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

F32, F16, BF16 = 0, 1, 30
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M = 16, 17, 18, 19, 20, 21, 22, 23, 29
TQ1_0, TQ2_0, MXFP4, NVFP4, Q2_0 = 34, 35, 39, 40, 42


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Where the fp16 fields of a block lie, and how wide its values are with a scale of one."""

    scale_offset: int
    unit_std: float  # of the values of a block of random bytes whose scale is one
    minimum_offset: int | None = None  # second fp16 field, added (Q5_1) or subtracted (Q4_K, Q5_K)
    minimum_ratio: float = 0.0  # minimum / scale that centres the values on zero


# unit_std of the types with sub-block scales is that of sc * q (- m * minimum_ratio) for uniform bits. Scales
# have either sign, so what counts is the root mean square.
LAYOUTS = {
    Q4_0: BlockLayout(scale_offset=0, unit_std=4.637),
    Q4_1: BlockLayout(scale_offset=0, unit_std=4.610, minimum_offset=2, minimum_ratio=-7.5),
    Q5_0: BlockLayout(scale_offset=0, unit_std=9.247),
    Q5_1: BlockLayout(scale_offset=0, unit_std=9.233, minimum_offset=2, minimum_ratio=-15.5),
    Q8_0: BlockLayout(scale_offset=0, unit_std=73.90),
    Q2_K: BlockLayout(scale_offset=80, unit_std=13.87, minimum_offset=82, minimum_ratio=1.5),
    Q3_K: BlockLayout(scale_offset=108, unit_std=43.33),
    Q4_K: BlockLayout(scale_offset=0, unit_std=258.3, minimum_offset=2, minimum_ratio=7.5),
    Q5_K: BlockLayout(scale_offset=0, unit_std=527.0, minimum_offset=2, minimum_ratio=15.5),
    Q6_K: BlockLayout(scale_offset=208, unit_std=1366.0),
    IQ1_S: BlockLayout(scale_offset=0, unit_std=7.198),
    IQ2_XXS: BlockLayout(scale_offset=0, unit_std=53.35),
    IQ2_XS: BlockLayout(scale_offset=0, unit_std=55.89),
    IQ2_S: BlockLayout(scale_offset=0, unit_std=56.39),
    IQ3_XXS: BlockLayout(scale_offset=0, unit_std=142.4),
    IQ3_S: BlockLayout(scale_offset=0, unit_std=140.2),
    IQ4_NL: BlockLayout(scale_offset=0, unit_std=67.4),
    IQ4_XS: BlockLayout(scale_offset=0, unit_std=1247.0),
    TQ1_0: BlockLayout(scale_offset=52, unit_std=0.8173),
    TQ2_0: BlockLayout(scale_offset=64, unit_std=1.225),
    Q2_0: BlockLayout(scale_offset=0, unit_std=1.225),
}
PLAIN_TYPES = (F32, F16, BF16)
# Types whose scale is no fp16 field.
_IQ1_M_STD, _IQ1_M_SCALES = 7.202, 48
_FP4_STD = 2.926
_SPECIAL_TYPES = (IQ1_M, MXFP4, NVFP4)
MAKEABLE_TYPES = frozenset({*PLAIN_TYPES, *LAYOUTS, *_SPECIAL_TYPES})


def row_bytes(ggml_type: int, row_length: int) -> int:
    """Return the bytes of one row of row_length values.

    Raises:
        ValueError: the type is not one that can be made here, or a row is not a whole number of blocks.
    """
    name, elements, num_bytes = GGML_TYPES.get(ggml_type, (str(ggml_type), 0, 0))
    if ggml_type not in MAKEABLE_TYPES:
        message = f"blocks of ggml type {name} cannot be made"
        raise ValueError(message)
    if row_length % elements:
        message = f"a row of {row_length} values is not a whole number of {name} blocks of {elements}"
        raise ValueError(message)
    return row_length // elements * num_bytes


class RandomSource:
    """A stream of random words, decided by its seeds alone."""

    def __init__(self, *seeds: int) -> None:
        import numpy as np

        self._words = np.random.SFC64(np.random.SeedSequence(seeds))

    def raw_bytes(self, count: int) -> npt.NDArray[np.uint8]:
        """Return count random bytes, writable."""
        import numpy as np

        return self._words.random_raw(-(-count // 8)).view(np.uint8)[:count]

    def uniform(self, count: int, low: float, high: float) -> npt.NDArray[np.float64]:
        """Return count values of [low, high)."""
        import numpy as np

        words = self._words.random_raw(count) >> np.uint64(11)
        return low + (high - low) * words.astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> npt.NDArray[np.float32]:
        """Return count values of mean 0 and variance 1, none beyond 3.47: a sum of four uniform ones."""
        import numpy as np

        parts = self._words.random_raw(count).view(np.uint16).reshape(count, 4)
        # The sum has mean 2 * 65535 and a standard deviation of 65536 / sqrt(3).
        centred = parts.sum(axis=1, dtype=np.int64) - 131_070
        values: npt.NDArray[np.float32] = (centred * (3.0**0.5 / 65_536)).astype(np.float32)
        return values


def random_rows(
    source: RandomSource, ggml_type: int, num_rows: int, row_length: int, *, std: float
) -> npt.NDArray[np.uint8]:
    """Return uint8 [num_rows, row_bytes]: rows whose dequantised values have mean 0 and about the given std.

    Block scales differ by up to a factor of three and in sign, as a wrong block stride shows only where
    neighbours differ.

    Raises:
        ValueError: as row_bytes.
    """
    import numpy as np

    width = row_bytes(ggml_type, row_length)
    if ggml_type in PLAIN_TYPES:
        values = source.normal(num_rows * row_length) * np.float32(std)
        if ggml_type == F16:
            return values.astype("<f2").view(np.uint8).reshape(num_rows, width)
        words = values.astype("<f4").view("<u2").reshape(-1, 2)
        return (
            np.ascontiguousarray(words if ggml_type == F32 else words[:, 1])
            .view(np.uint8)
            .reshape(num_rows, width)
        )
    _, elements, block_bytes = GGML_TYPES[ggml_type]
    num_blocks = num_rows * (row_length // elements)
    blocks = source.raw_bytes(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
    if ggml_type == MXFP4:
        blocks[:, 0] = _between_steps(source, num_blocks, std / _FP4_STD, 2.0 ** np.arange(-126.0, 127.0)) + 1
    elif ggml_type == NVFP4:
        codes = np.arange(127)
        steps = np.where(codes < 8, codes / 8 * 2.0**-6, (1 + codes % 8 / 8) * 2.0 ** (codes // 8 - 7))
        chosen = _between_steps(source, 4 * num_blocks, std / _FP4_STD, steps)
        blocks[:, :4] = chosen.reshape(num_blocks, 4)
    elif ggml_type == IQ1_M:
        _set_iq1_m(blocks, _scales(source, num_blocks, std / _IQ1_M_STD))
    else:
        layout = LAYOUTS[ggml_type]
        scales = _scales(source, num_blocks, std / layout.unit_std)
        _set_fp16(blocks, layout.scale_offset, scales)
        if layout.minimum_offset is not None:
            _set_fp16(blocks, layout.minimum_offset, scales * layout.minimum_ratio)
    return blocks.reshape(num_rows, width)


def _scales(source: RandomSource, count: int, wanted: float) -> npt.NDArray[np.float64]:
    """Return count scales of either sign whose root mean square is wanted."""
    import numpy as np

    # Uniform in [0.5, 1.5] has a root mean square of 1.0408.
    scales = source.uniform(count, -1.0, 1.0)
    scales += np.copysign(0.5, scales)
    scales *= wanted / 1.0408
    return scales


def _between_steps(
    source: RandomSource, count: int, wanted: float, steps: npt.NDArray[np.float64]
) -> npt.NDArray[np.uint8]:
    """Return count indices of the two ascending steps around wanted, which is their root mean square."""
    import numpy as np

    low = int(np.clip(np.searchsorted(steps, wanted, side="right") - 1, 0, len(steps) - 2))
    lower, upper = float(steps[low]) ** 2, float(steps[low + 1]) ** 2
    share = (wanted**2 - lower) / (upper - lower)
    return (low + (source.uniform(count, 0.0, 1.0) < share)).astype(np.uint8)


def _set_iq1_m(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.float64]) -> None:
    """Put an fp16 scale, four bits each, into the high bits of a block's four 16-bit words of scales."""
    import numpy as np

    bits = scales.astype("<f2").view("<u2").astype(np.uint16)
    for word in range(4):
        high = _IQ1_M_SCALES + 2 * word + 1
        nibble = ((bits >> np.uint16(4 * word)) & np.uint16(15)).astype(np.uint8)
        blocks[:, high] = (blocks[:, high] & np.uint8(15)) | (nibble << np.uint8(4))


def _set_fp16(blocks: npt.NDArray[np.uint8], offset: int, values: npt.NDArray[np.float64]) -> None:
    import numpy as np

    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
