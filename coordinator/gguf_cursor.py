"""A bounded cursor over the head of a file: reads with pread, refuses before it allocates.

Nothing here trusts a length from the file: a value is read only after it was compared with the bytes that are
left. The file is never mapped, since a file that shrinks meanwhile would end the process with SIGBUS.
"""

import struct
import sys
from array import array
from collections.abc import Callable
from typing import NoReturn

from strata_coord.coordinator.gguf_metadata import StringArray, Value
from strata_coord.coordinator.printable import printable
from strata_coord.ipc.errors import ModelError

MAX_METADATA_BYTES = 256 << 20
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_KEY_BYTES = 256

_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type -> struct format and size; 8 is a string, 9 an array
_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4),
    6: ("f", 4), 7: ("B", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRUCTS = {kind: struct.Struct("<" + code) for kind, (code, _) in _SCALARS.items()}
_U64 = struct.Struct("<Q")
_FIRST_READ = 64 << 10


class Cursor:
    """Reads little-endian values one after the other.

    Args:
        read: read(count, offset) returns up to count bytes of the file, like pread.
        size: bytes of the file.
        path: names the file in messages.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int, path: str) -> None:
        self._read = read
        self._limit = min(size, MAX_METADATA_BYTES)
        self._size = size
        self._path = printable(path, limit=400)
        self._buffer = bytearray()
        self.at = 0  # offset of the next byte

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise ModelError for a field; problem names the value and its limit."""
        message = f"{self._path}: {printable(field)}: {printable(problem, limit=600)}"
        raise ModelError(message) from None

    @property
    def left(self) -> int:
        """Bytes between here and the end of the file, or the limit for metadata."""
        return self._limit - self.at

    def _need(self, count: int, field: str) -> None:
        """Have count bytes from here on in the buffer."""
        end = self.at + count
        if end <= len(self._buffer):
            return
        if end > self._limit:
            if self._limit < self._size:
                self.refuse(field, f"needs bytes up to {end}, the limit for metadata is {self._limit}")
            self.refuse(
                field, f"needs {count} bytes at offset {self.at}, the file has {max(self.left, 0)} left"
            )
        while len(self._buffer) < end:
            # Doubling keeps a short header at one small read and a long one at a dozen.
            want = max(end - len(self._buffer), len(self._buffer), _FIRST_READ)
            got = self._read(min(want, self._limit - len(self._buffer)), len(self._buffer))
            if not got:
                self.refuse(field, f"the file ended at {len(self._buffer)} bytes, it had {self._size} before")
            self._buffer += got

    def raw(self, count: int, field: str) -> bytes:
        """Return the next count bytes; count is a size of this program, not of the file."""
        self._need(count, field)
        value = bytes(self._buffer[self.at : self.at + count])
        self.at += count
        return value

    def scalar(self, kind: int, field: str) -> int | float:
        """Return the next number of a GGUF value type (not BOOL, STRING, ARRAY)."""
        packed = _STRUCTS[kind]
        self._need(packed.size, field)
        (value,) = packed.unpack_from(self._buffer, self.at)
        self.at += packed.size
        result: int | float = value
        return result

    def u32(self, field: str) -> int:
        """Return the next unsigned 32-bit integer."""
        return int(self.scalar(4, field))

    def u64(self, field: str) -> int:
        """Return the next unsigned 64-bit integer."""
        return int(self.scalar(10, field))

    def string(self, field: str, *, limit: int = MAX_STRING_BYTES) -> str:
        """Return the next string of at most limit bytes of UTF-8."""
        length = self.u64(field)
        if length > limit:
            self.refuse(field, f"string of {length} bytes, the limit is {limit}")
        data = self.raw(length, field)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.refuse(field, f"not UTF-8 at byte {error.start} of the string")

    def value(self, kind: int, field: str) -> Value:
        """Return the next metadata value of the given GGUF value type."""
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self._array(field)
        if kind == _BOOL:
            number = self.scalar(kind, field)
            if number > 1:
                self.refuse(field, f"boolean with value {number}, expected 0 or 1")
            return bool(number)
        if kind not in _SCALARS:
            self.refuse(field, f"value type {kind}, known are 0 to 12")
        return self.scalar(kind, field)

    def _array(self, field: str) -> "StringArray | array[int] | array[float]":
        kind = self.u32(field)
        count = self.u64(field)
        if kind == _ARRAY:
            self.refuse(field, "an array of arrays, which is not allowed")
        if kind != _STRING and kind not in _SCALARS:
            self.refuse(field, f"array element type {kind}, known are 0 to 12 without 9")
        if count > MAX_ARRAY_ELEMENTS:
            self.refuse(field, f"array of {count} elements, the limit is {MAX_ARRAY_ELEMENTS}")
        size = 8 if kind == _STRING else _SCALARS[kind][1]
        if count * size > self.left:
            self.refuse(field, f"array of {count} elements needs {count * size} bytes, {self.left} are left")
        if kind == _STRING:
            return self._string_array(count, field)
        numbers: array[int] | array[float] = array(_SCALARS[kind][0])
        numbers.frombytes(self.raw(count * size, field))
        if sys.byteorder == "big":
            numbers.byteswap()
        if kind == _BOOL and count and max(numbers) > 1:
            self.refuse(field, f"array of booleans holds {max(numbers)}, expected 0 or 1")
        return numbers

    def _string_array(self, count: int, field: str) -> StringArray:
        """Walk the lengths of count strings in one tight loop and keep the block undecoded."""
        start = at = self.at
        unpack, buffer, have = _U64.unpack_from, self._buffer, len(self._buffer)
        for index in range(count):
            if at + 8 > have:
                self.at = at
                self._need(8, field)
                have = len(buffer)
            length = unpack(buffer, at)[0]
            at += 8 + length
            if length > MAX_STRING_BYTES:
                problem = f"string of {length} bytes, the limit is {MAX_STRING_BYTES}"
                self.refuse(f"{field}[{index}]", problem)
            if at > have:
                self.at = at - length
                self._need(length, f"{field}[{index}]")
                have = len(buffer)
        self.at = at
        return StringArray(bytes(buffer[start:at]), count, f"{self._path}: {printable(field)}")
