"""Random bytes that are valid blocks of a ggml type, scaled to a wanted standard deviation.

Every byte pattern is a valid block of the types below, so a synthetic weight needs no quantiser: the bytes
are random and only the fp16 scale fields are set. The types and layouts are those of ggml-common.h, models.md
section 3.1 lists the sizes. numpy is imported inside the functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

F32, F16, BF16 = 0, 1, 30
Q4_0, Q5_0, Q5_1, Q8_0 = 2, 6, 7, 8
Q4_K, Q5_K, Q6_K = 12, 13, 14
IQ4_NL, Q2_0 = 20, 42


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Size of a block, where its fp16 fields lie, and how wide its values are with a scale of one."""

    name: str
    elements: int
    num_bytes: int
    scale_offset: int
    unit_std: float  # of the values of a block of random bytes whose scale is one
    minimum_offset: int | None = None  # second fp16 field, added (Q5_1) or subtracted (Q4_K, Q5_K)
    minimum_ratio: float = 0.0  # minimum / scale that centres the values on zero


# unit_std of the types with sub-block scales is that of sc * q (- m * minimum_ratio) for uniform bits.
LAYOUTS = {
    Q4_0: BlockLayout(name="Q4_0", elements=32, num_bytes=18, scale_offset=0, unit_std=4.637),
    Q5_0: BlockLayout(name="Q5_0", elements=32, num_bytes=22, scale_offset=0, unit_std=9.247),
    Q5_1: BlockLayout(
        name="Q5_1",
        elements=32,
        num_bytes=24,
        scale_offset=0,
        unit_std=9.233,
        minimum_offset=2,
        minimum_ratio=-15.5,
    ),
    Q8_0: BlockLayout(name="Q8_0", elements=32, num_bytes=34, scale_offset=0, unit_std=73.90),
    Q4_K: BlockLayout(
        name="Q4_K",
        elements=256,
        num_bytes=144,
        scale_offset=0,
        unit_std=258.3,
        minimum_offset=2,
        minimum_ratio=7.5,
    ),
    Q5_K: BlockLayout(
        name="Q5_K",
        elements=256,
        num_bytes=176,
        scale_offset=0,
        unit_std=527.0,
        minimum_offset=2,
        minimum_ratio=15.5,
    ),
    Q6_K: BlockLayout(name="Q6_K", elements=256, num_bytes=210, scale_offset=208, unit_std=1366.0),
    IQ4_NL: BlockLayout(name="IQ4_NL", elements=32, num_bytes=18, scale_offset=0, unit_std=71.4),
    Q2_0: BlockLayout(name="Q2_0", elements=64, num_bytes=18, scale_offset=0, unit_std=1.225),
}
PLAIN_BYTES = {F32: 4, F16: 2, BF16: 2}
PLAIN_NAMES = {F32: "F32", F16: "F16", BF16: "BF16"}


def type_name(ggml_type: int) -> str:
    """Return the usual name of a type, for messages."""
    return PLAIN_NAMES[ggml_type] if ggml_type in PLAIN_NAMES else LAYOUTS[ggml_type].name


def row_bytes(ggml_type: int, row_length: int) -> int:
    """Return the bytes of one row of row_length values.

    Raises:
        ValueError: the type is not one that can be made here, or a row is not a whole number of blocks.
    """
    if ggml_type in PLAIN_BYTES:
        return row_length * PLAIN_BYTES[ggml_type]
    if ggml_type not in LAYOUTS:
        message = f"ggml type {ggml_type} cannot be made; known: {sorted([*PLAIN_BYTES, *LAYOUTS])}"
        raise ValueError(message)
    layout = LAYOUTS[ggml_type]
    if row_length % layout.elements:
        message = (
            f"a row of {row_length} values is not a whole number of {layout.name} blocks of {layout.elements}"
        )
        raise ValueError(message)
    return row_length // layout.elements * layout.num_bytes


def random_rows(
    rng: np.random.Generator, ggml_type: int, num_rows: int, row_length: int, *, std: float
) -> npt.NDArray[np.uint8]:
    """Return uint8 [num_rows, row_bytes]: rows whose dequantised values have mean 0 and about the given std.

    Block scales differ by up to a factor of three and in sign, as a wrong block stride shows only where
    neighbours differ. The same generator state gives the same bytes.

    Raises:
        ValueError: as row_bytes.
    """
    import numpy as np

    width = row_bytes(ggml_type, row_length)
    if ggml_type in PLAIN_BYTES:
        values = rng.standard_normal((num_rows, row_length), dtype=np.float32) * np.float32(std)
        if ggml_type == F32:
            return values.view(np.uint8)
        if ggml_type == F16:
            return values.astype(np.float16).view(np.uint8)
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    layout = LAYOUTS[ggml_type]
    num_blocks = num_rows * (row_length // layout.elements)
    blocks = np.frombuffer(bytearray(rng.bytes(num_blocks * layout.num_bytes)), dtype=np.uint8)
    blocks = blocks.reshape(num_blocks, layout.num_bytes)
    # Uniform in [0.5, 1.5] has a root mean square of 1.0408.
    scales = rng.uniform(0.5, 1.5, num_blocks) * (std / layout.unit_std / 1.0408)
    scales *= rng.choice(np.array([-1.0, 1.0]), num_blocks)
    _set_fp16(blocks, layout.scale_offset, scales)
    if layout.minimum_offset is not None:
        _set_fp16(blocks, layout.minimum_offset, scales * layout.minimum_ratio)
    return blocks.reshape(num_rows, width)


def _set_fp16(blocks: npt.NDArray[np.uint8], offset: int, values: npt.NDArray[np.float64]) -> None:
    import numpy as np

    blocks[:, offset : offset + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
