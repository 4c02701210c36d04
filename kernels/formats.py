"""The ggml block formats: name, values per block and bytes per block of every type id. Pure table.

Ids are those of enum ggml_type. Whether a type can be expanded here is dequant.py's business: a header with
any of these types can be sized, also one that this program cannot run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """One ggml type: a row is a whole number of blocks."""

    type_id: int
    name: str
    block_elements: int
    block_bytes: int


_ROWS: tuple[tuple[int, str, int, int], ...] = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),  # the gguf package does not know this one
)

FORMATS: Mapping[int, BlockFormat] = MappingProxyType(
    {
        type_id: BlockFormat(type_id=type_id, name=name, block_elements=elements, block_bytes=num_bytes)
        for type_id, name, elements, num_bytes in _ROWS
    }
)

_BY_NAME = {block.name: block for block in FORMATS.values()}


def block_format(ggml_type: int) -> BlockFormat:
    """Return the format of a type id.

    Raises:
        ValueError: no such type is known.
    """
    try:
        return FORMATS[ggml_type]
    except KeyError:
        message = f"ggml type {ggml_type} is not known; known ids reach {max(FORMATS)}"
        raise ValueError(message) from None


def type_id(name: str) -> int:
    """Return the id of a type name such as "Q4_K".

    Raises:
        ValueError: no such type is known.
    """
    try:
        return _BY_NAME[name].type_id
    except KeyError:
        message = f"ggml type {name!r} is not known"
        raise ValueError(message) from None


def num_bytes(ggml_type: int, elements: int) -> int:
    """Return the bytes of a run of elements, which must be a whole number of blocks.

    Raises:
        ValueError: the type is not known or the run ends inside a block.
    """
    block = block_format(ggml_type)
    if elements % block.block_elements:
        message = f"{elements} values are not a whole number of {block.name} blocks of {block.block_elements}"
        raise ValueError(message)
    return elements // block.block_elements * block.block_bytes
