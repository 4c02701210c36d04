from tokenizers import pre_tokenizers

from strata_coord.coordinator.byte_level import BYTE_OF_CHAR, CHAR_OF_BYTE


def test_the_spelling_is_that_of_the_tokenizers_package() -> None:
    assert set(CHAR_OF_BYTE) == set(pre_tokenizers.ByteLevel.alphabet())
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" é\n\x00")
    assert spelt[0][0] == "".join(CHAR_OF_BYTE[byte] for byte in " é\n\x00".encode())


def test_every_byte_has_a_spelling_of_its_own() -> None:
    assert [BYTE_OF_CHAR[char] for char in CHAR_OF_BYTE] == list(range(256))
