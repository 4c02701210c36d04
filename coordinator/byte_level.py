"""The spelling of bytes in byte-level BPE vocabularies: one visible character per byte.

Printable Latin-1 bytes stand for themselves; the 68 others, in ascending order, for the characters from
U+0100 on. A space is therefore spelt U+0120.
"""


def _spelling() -> tuple[str, ...]:
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(0x100 + index) for index in range(256 - len(plain)))
    return tuple(chr(byte) if byte in plain else next(others) for byte in range(256))


CHAR_OF_BYTE = _spelling()
BYTE_OF_CHAR = {char: byte for byte, char in enumerate(CHAR_OF_BYTE)}
