import gguf
import pytest

from strata_coord.kernels.formats import FORMATS, block_format, num_bytes, type_id


def test_table_equals_the_gguf_package_plus_q2_0() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {key: (block.name, block.block_elements, block.block_bytes) for key, block in FORMATS.items()}
    assert ours.pop(42) == ("Q2_0", 64, 18)
    theirs.pop(42, None)
    assert ours == theirs


def test_names_and_ids_agree() -> None:
    assert all(type_id(block.name) == key == block.type_id for key, block in FORMATS.items())


def test_num_bytes_counts_whole_blocks() -> None:
    assert num_bytes(type_id("Q4_K"), 2560) == 1440
    assert num_bytes(type_id("IQ4_NL"), 160) == 90
    assert num_bytes(type_id("BF16"), 3) == 6


def test_a_run_that_ends_inside_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="640 values are not a whole number of Q4_K blocks of 256"):
        num_bytes(type_id("Q4_K"), 640)


def test_unknown_types_are_refused() -> None:
    with pytest.raises(ValueError, match="ggml type 5 is not known"):
        block_format(5)
    with pytest.raises(ValueError, match="'Q9_Z'"):
        type_id("Q9_Z")
