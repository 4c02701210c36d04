"""The key-value part of a GGUF header: values, and accessors that check type and range.

Arrays stay compact: numbers in an array.array, strings as one block of bytes that is decoded when somebody
asks for it. A vocabulary of 250,000 tokens costs milliseconds until the tokenizer wants it.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, overload

from strata_coord.coordinator.printable import printable
from strata_coord.ipc.errors import ModelError


class StringArray(Sequence[str]):
    """An array of strings in the file's own form: per string eight bytes of length, then the bytes.

    The reader has walked all lengths, so the block is consistent; whether its bytes are UTF-8 shows on
    decoding.
    """

    __slots__ = ("_block", "_count", "_decoded", "_field")

    def __init__(self, block: bytes, count: int, field: str) -> None:
        self._block = block
        self._count = count
        self._field = field  # file and key, for messages
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.decoded())

    def decoded(self) -> list[str]:
        """Return all strings; the work is done once.

        Raises:
            ModelError: a string is not UTF-8.
        """
        if self._decoded is None:
            block, unpack = self._block, struct.Struct("<Q").unpack_from
            strings, at = [], 0
            try:
                for _ in range(self._count):
                    start = at + 8
                    at = start + unpack(block, at)[0]
                    strings.append(block[start:at].decode())
            except UnicodeDecodeError as error:
                message = f"{self._field}[{len(strings)}]: not UTF-8 at byte {error.start} of the string"
                raise ModelError(message) from None
            self._decoded = strings
            self._block = b""
        return self._decoded


Value = bool | int | float | str | StringArray | array  # type: ignore[type-arg]  # element type is in typecode


class Metadata(Mapping[str, Value]):
    """Keys and values of one file. BOOL arrays are array("B") of zeros and ones.

    The accessors return a checked value, or raise ModelError with file, key, value and limit.
    """

    __slots__ = ("_values", "path")

    def __init__(self, path: str, values: dict[str, Value]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise ModelError for a value that cannot be used; problem names the value and what is allowed."""
        message = f"{printable(self.path, limit=400)}: {printable(key)}: {printable(problem, limit=600)}"
        raise ModelError(message) from None

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """Return an integer with low <= value <= high, or the default where the key is absent."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                self.refuse(key, "missing; this architecture needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, f"{describe(value)}, expected an integer")
        if not low <= value <= high:
            self.refuse(key, f"{value} is outside {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number with low <= value <= high, or the default where the key is absent."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                self.refuse(key, "missing; this architecture needs it")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, f"{describe(value)}, expected a number")
        if not (math.isfinite(value) and low <= value <= high):
            self.refuse(key, f"{value} is outside {low} to {high}")
        return float(value)

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string, or the default where the key is absent."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            self.refuse(key, "missing")
        if not isinstance(value, str):
            self.refuse(key, f"{describe(value)}, expected a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the default where the key is absent."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, f"{describe(value)}, expected true or false")
        return value

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """Return an array of integers, each within low to high. BOOL arrays count as zeros and ones."""
        value = self._values.get(key)
        if value is None:
            self.refuse(key, "missing; this architecture needs it")
        if not isinstance(value, array) or value.typecode in "fd":
            self.refuse(key, f"{describe(value)}, expected an array of integers")
        numbers: tuple[int, ...] = tuple(value)
        if numbers and (min(numbers) < low or max(numbers) > high):
            index = next(at for at, number in enumerate(numbers) if not low <= number <= high)
            self.refuse(f"{key}[{index}]", f"{numbers[index]} is outside {low} to {high}")
        return numbers

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return an array of finite numbers; integers count."""
        value = self._values.get(key)
        if value is None:
            self.refuse(key, "missing")
        if not isinstance(value, array):
            self.refuse(key, f"{describe(value)}, expected an array of numbers")
        index = next((at for at, number in enumerate(value) if not math.isfinite(number)), None)
        if index is not None:
            self.refuse(f"{key}[{index}]", f"{value[index]} is not finite")
        return tuple(map(float, value))

    def strings(self, key: str) -> list[str]:
        """Return an array of strings, decoded."""
        value = self._values.get(key)
        if value is None:
            self.refuse(key, "missing")
        if not isinstance(value, StringArray):
            self.refuse(key, f"{describe(value)}, expected an array of strings")
        return value.decoded()


def describe(value: Value) -> str:
    """Say what a value is, in a few words and on one line."""
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, array):
        return f"an array of {len(value)} numbers"
    if isinstance(value, str):
        return f'"{printable(value, limit=60)}"'
    return str(value)
