"""GGUF headers, read with limits: one file or a set of shards becomes checked records.

Shape, type, offset and file length must agree before anything is allocated from them, in integers that
cannot wrap. Whatever is wrong becomes a ModelError that names file, field, value and limit in one line.
Tensor data is never touched. The gguf package is not used for this: it needs many seconds for a real
vocabulary and loops on damaged files.
"""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata_coord.coordinator.foreign_file import PEEK_BYTES, foreign_kind
from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.gguf_cursor import MAX_KEY_BYTES, Cursor
from strata_coord.coordinator.gguf_metadata import Metadata, Value
from strata_coord.coordinator.printable import printable
from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError

MAX_KEYS = 65_536
MAX_TENSORS = 131_072
MAX_TENSOR_NAME_BYTES = 128
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ELEMENTS = 1 << 48
MAX_SHARDS = 1_024
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length, one character, n_dims, one dim, type, offset
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What the headers of a model say; metadata is that of the first file."""

    files: tuple[str, ...]  # absolute paths; TensorExtent.file indexes them
    metadata: Metadata
    tensors: tuple[TensorExtent, ...]  # in the files' order; names are unique over all files


def read_header(path: str | os.PathLike[str]) -> GgufHeader:
    """Read the header of a model: one file, or the first of its shards (the others are found beside it).

    Raises:
        ModelError: a file cannot be read, breaks a limit, or contradicts itself or its fellow shards.
    """
    first = os.path.abspath(path)
    metadata, tensors = _read_file(first, 0)
    count = metadata.integer("split.count", low=0, high=MAX_SHARDS, default=1)
    if count <= 1:
        return GgufHeader(files=(first,), metadata=metadata, tensors=tensors)
    files = _shard_paths(first, metadata, count)
    everything = list(tensors)
    for number, file in enumerate(files[1:], start=1):
        shard, more = _read_file(file, number)
        found = shard.integer("split.no", low=0, high=MAX_SHARDS)
        if found != number:
            shard.refuse("split.no", f"{found}, expected {number} by the file's name")
        if shard.integer("split.count", low=0, high=MAX_SHARDS) != count:
            shard.refuse("split.count", f"{shard['split.count']}, the first shard says {count}")
        everything += more
        if len(everything) > MAX_TENSORS:
            shard.refuse("n_tensors", f"{len(everything)} over all shards, the limit is {MAX_TENSORS}")
    _check_shards(metadata, everything, files)
    return GgufHeader(files=files, metadata=metadata, tensors=tuple(everything))


def parse_header(
    read: Callable[[int, int], bytes], size: int, path: str, file: int = 0
) -> tuple[Metadata, tuple[TensorExtent, ...]]:
    """Parse one file's header from a pread-like function; file becomes TensorExtent.file.

    Raises:
        ModelError: the bytes are not a header within the limits.
    """
    cursor = Cursor(read, size, path)
    magic = cursor.raw(4, "magic")
    if magic != b"GGUF":
        kind = foreign_kind(read(min(PEEK_BYTES, size), 0))
        seems = f" but {kind}" if kind else ""
        cursor.refuse("magic", f"{magic!r}, expected b'GGUF': this is not a GGUF file{seems}")
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        cursor.refuse("version", f"{version}{swapped}, supported are 2 and 3, little-endian")
    num_tensors = cursor.u64("n_tensors")
    num_keys = cursor.u64("n_kv")
    _check_count(cursor, "n_tensors", num_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
    _check_count(cursor, "n_kv", num_keys, MAX_KEYS, _MIN_KEY_BYTES)
    values = _read_keys(cursor, num_keys)
    metadata = Metadata(path, values)
    alignment = _alignment(metadata)
    tensors = [_read_tensor(cursor, file, index, alignment) for index in range(num_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, _placed(cursor, tensors, data_start, size)


def _read_file(path: str, file: int) -> tuple[Metadata, tuple[TensorExtent, ...]]:
    """Open, check and parse one file."""
    shown = printable(path, limit=400)
    try:
        # O_NONBLOCK: opening a pipe somebody named model.gguf must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"{shown}: cannot be opened: {reason}"
        raise ModelError(message) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            message = f"{shown}: is not a regular file"
            raise ModelError(message)
        return parse_header(lambda count, at: os.pread(descriptor, count, at), status.st_size, path, file)
    except OSError as error:
        message = f"{shown}: cannot be read: {error.strerror}"
        raise ModelError(message) from None
    finally:
        os.close(descriptor)


def _check_count(cursor: Cursor, field: str, count: int, limit: int, least_bytes: int) -> None:
    """Refuse a count that its limit or the bytes left in the file cannot hold."""
    if count > limit:
        cursor.refuse(field, f"{count}, the limit is {limit}")
    if count * least_bytes > cursor.left:
        cursor.refuse(field, f"{count} needs at least {count * least_bytes} bytes, {cursor.left} are left")


def _read_keys(cursor: Cursor, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for index in range(count):
        key = cursor.string(f"key {index}", limit=MAX_KEY_BYTES)
        if not key or not key.isascii():
            cursor.refuse(f"key {index}", f'"{printable(key, limit=60)}", expected ASCII, not empty')
        if key in values:
            cursor.refuse(key, f"key {index} of {count} repeats it")
        values[key] = cursor.value(cursor.u32(key), key)
    return values


def _alignment(metadata: Metadata) -> int:
    alignment = metadata.integer("general.alignment", low=8, high=65_536, default=32)
    if alignment & (alignment - 1):
        metadata.refuse("general.alignment", f"{alignment} is not a power of two")
    return alignment


def _read_tensor(cursor: Cursor, file: int, index: int, alignment: int) -> TensorExtent:
    """Read one tensor record; offset_bytes is still relative to the data section."""
    name = cursor.string(f"tensor {index}", limit=MAX_TENSOR_NAME_BYTES)
    if not name:
        cursor.refuse(f"tensor {index}", "its name is empty")
    field = f"tensor {name}"
    num_dims = cursor.u32(field)
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.refuse(field, f"n_dims {num_dims}, the limit is 1 to {MAX_DIMS}")
    dims = [cursor.u64(field) for _ in range(num_dims)]
    elements = 1
    for dim in dims:
        if not 1 <= dim < MAX_DIM:
            cursor.refuse(field, f"dimension {dim}, the limit is 1 to {MAX_DIM - 1}")
        elements *= dim
    if elements >= MAX_ELEMENTS:
        cursor.refuse(field, f"{elements} elements, the limit is {MAX_ELEMENTS - 1}")
    kind = cursor.u32(field)
    known = GGML_TYPES.get(kind)
    if known is None:
        cursor.refuse(field, f"type {kind} is unknown; known are 0 to {max(GGML_TYPES)}, with gaps")
    if dims[0] % known.block_elements:
        blocks = f"rows of {dims[0]} values do not fill blocks of {known.block_elements} ({known.name})"
        cursor.refuse(field, blocks)
    offset = cursor.u64(field)
    if offset % alignment:
        cursor.refuse(field, f"offset {offset} is not a multiple of the alignment {alignment}")
    return TensorExtent(
        name=name,
        file=file,
        offset_bytes=offset,
        num_bytes=elements // known.block_elements * known.block_bytes,
        ggml_type=kind,
        shape=tuple(reversed(dims)),
    )


def _placed(
    cursor: Cursor, tensors: list[TensorExtent], data_start: int, size: int
) -> tuple[TensorExtent, ...]:
    """Make offsets absolute; every tensor must lie inside the file and apart from all others."""
    names: set[str] = set()
    placed = []
    for tensor in tensors:
        if tensor.name in names:
            cursor.refuse(f"tensor {tensor.name}", "its name occurs twice")
        names.add(tensor.name)
        start = data_start + tensor.offset_bytes
        if start + tensor.num_bytes > size:
            problem = f"ends at byte {start + tensor.num_bytes}, the file has {size}"
            cursor.refuse(f"tensor {tensor.name}", f"{problem}: damaged or not fully downloaded")
        placed.append(
            TensorExtent(
                name=tensor.name,
                file=tensor.file,
                offset_bytes=start,
                num_bytes=tensor.num_bytes,
                ggml_type=tensor.ggml_type,
                shape=tensor.shape,
            )
        )
    end, before = 0, ""
    for tensor in sorted(placed, key=lambda tensor: tensor.offset_bytes):
        if tensor.offset_bytes < end:
            clash = f"starts at byte {tensor.offset_bytes}, inside {printable(before)} which ends at {end}"
            cursor.refuse(f"tensor {tensor.name}", clash)
        end, before = tensor.offset_bytes + tensor.num_bytes, tensor.name
    return tuple(placed)


def _shard_paths(first: str, metadata: Metadata, count: int) -> tuple[str, ...]:
    """Return the paths of all shards, given the first; say which is first when given another."""
    name = _SHARD_NAME.fullmatch(Path(first).name)
    if name is None or int(name["count"]) != count:
        found = printable(Path(first).name)
        metadata.refuse(
            "split.count", f'{count}, but the file is called "{found}", not NAME-00001-of-{count:05d}.gguf'
        )
    folder = Path(first).parent
    files = tuple(str(folder / f"{name['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))
    number = metadata.integer("split.no", low=0, high=MAX_SHARDS)
    if number != 0:
        metadata.refuse(
            "split.no",
            f"{number}: this is shard {number + 1} of {count}, name the first: {printable(files[0])}",
        )
    if files[0] != first:
        metadata.refuse("split.no", f"0, but the file's name says shard {int(name['number'])} of {count}")
    return files


def _check_shards(metadata: Metadata, tensors: list[TensorExtent], files: tuple[str, ...]) -> None:
    total = metadata.integer("split.tensors.count", low=0, high=MAX_TENSORS, default=len(tensors))
    if total != len(tensors):
        metadata.refuse("split.tensors.count", f"{total}, the {len(files)} shards hold {len(tensors)}")
    owner: dict[str, int] = {}
    for tensor in tensors:
        if tensor.name in owner:
            both = f"{printable(files[owner[tensor.name]])} and {printable(files[tensor.file])}"
            metadata.refuse(f"tensor {tensor.name}", f"is in two shards: {both}")
        owner[tensor.name] = tensor.file
