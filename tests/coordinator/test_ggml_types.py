import gguf

from strata_coord.coordinator.ggml_types import GGML_TYPES, WEIGHT_TYPES, type_name
from strata_coord.kernels.dequant import EXPANDERS


def test_the_table_holds_every_type_of_the_gguf_package_with_its_sizes() -> None:
    ours = {
        number: (kind.block_elements, kind.block_bytes) for number, kind in GGML_TYPES.items() if number != 42
    }
    assert ours == {int(number): sizes for number, sizes in gguf.GGML_QUANT_SIZES.items()}


def test_the_names_are_those_of_the_gguf_package() -> None:
    ours = {number: kind.name for number, kind in GGML_TYPES.items() if number != 42}
    assert ours == {int(kind): kind.name for kind in gguf.GGMLQuantizationType}


def test_q2_0_has_sixty_four_values_in_eighteen_bytes() -> None:
    assert GGML_TYPES[42] == ("Q2_0", 64, 18)


def test_weights_may_have_exactly_the_types_that_the_kernels_expand() -> None:
    assert {type_name(number) for number in EXPANDERS} == WEIGHT_TYPES


def test_an_unknown_type_is_named_by_its_number() -> None:
    assert type_name(12) == "Q4_K"
    assert type_name(99) == "type 99"
