"""Write a synthetic model as one GGUF file: keys, tokenizer, then random blocks tensor by tensor.

Holds one piece of one tensor in memory. What a tensor has beyond its first piece are that piece's rows again,
in another order for each piece: drawing them all would take longer than a fast drive. The file appears under
its name only when it is complete: it is written beside it and renamed.
"""

import math
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from strata_coord.coordinator.synthetic_blocks import RandomSource, random_rows, row_bytes
from strata_coord.coordinator.synthetic_metadata import add_keys
from strata_coord.coordinator.synthetic_presets import SyntheticShape
from strata_coord.coordinator.synthetic_tensors import PlannedTensor, planned_tensors
from strata_coord.coordinator.synthetic_types import TypeRecipe
from strata_coord.ipc.errors import ConfigError, InvariantError

Progress = Callable[[int, int], None]  # bytes of tensor data written, bytes in all
# Part of the recipe, like the turn of each further piece.
_PIECE_BYTES = 16 << 20
_TURN = 0.381966  # of a piece, from one piece to the next; the golden ratio keeps turns apart
_ALIGNMENT = 32


def write_synthetic_model(
    path: Path,
    shape: SyntheticShape,
    recipe: TypeRecipe,
    *,
    name: str,
    seed: int,
    header_only: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the model to path, replacing what is there.

    Args:
        path: of the file.
        shape: geometry and vocabulary.
        recipe: types.
        name: general.name of the file.
        seed: the same seed, shape and recipe give the same bytes.
        header_only: leave a hole in place of the tensor data: sizes are true, weights are zeros.
        progress: called with bytes written and bytes in all.

    Raises:
        ConfigError: the folder cannot be written, or the drive has too little room; both sizes are named.
    """
    tensors = list(planned_tensors(shape.geometry, recipe))
    needed = sum(tensor.num_bytes for tensor in tensors)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        free = shutil.disk_usage(path.parent).free
        if free < needed and not header_only:
            message = f"{path}: needs {needed >> 20} MiB, {path.parent} has {free >> 20} MiB free"
            raise ConfigError(message)
        try:
            _write(partial, shape, tensors, name=name, seed=None if header_only else seed, progress=progress)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        message = f"{path}: cannot be written: {error.strerror}"
        raise ConfigError(message) from error


def _write(
    partial: Path,
    shape: SyntheticShape,
    tensors: list[PlannedTensor],
    *,
    name: str,
    seed: int | None,
    progress: Progress | None,
) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(partial, shape.geometry.architecture)
    try:
        writer.add_name(name)
        add_keys(writer, shape)
        known = {int(kind): kind for kind in gguf.GGMLQuantizationType}
        for tensor in tensors:
            # The package does not know every type; it writes the number as it is.
            kind = known.get(tensor.ggml_type, tensor.ggml_type)
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32),
                tensor.num_bytes,
                kind,  # type: ignore[arg-type]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if writer.fout is None:
            message = f"{partial}: the writer has no file open"
            raise InvariantError(message)
        file = writer.fout[0]
        _pad(file)
        if seed is None:
            file.truncate(file.tell() + sum(_padded(tensor.num_bytes) for tensor in tensors))
        else:
            _write_data(file, tensors, seed=seed, progress=progress)
        file.flush()
        # Without this a power cut after the rename can leave a whole file of zeros under the final name.
        os.fsync(file.fileno())
    finally:
        writer.close()


def _write_data(
    file: BinaryIO, tensors: list[PlannedTensor], *, seed: int, progress: Progress | None
) -> None:
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        # A tensor's bytes hang on its name alone, so models of more and fewer layers share their layers.
        source = RandomSource(seed, zlib.crc32(tensor.name.encode()))
        width = row_bytes(tensor.ggml_type, tensor.shape[-1])
        piece = min(max(1, _PIECE_BYTES // width), tensor.num_rows)
        values = _values(tensor, source, piece)
        for number, first in enumerate(range(0, tensor.num_rows, piece)):
            rows = min(piece, tensor.num_rows - first)
            turn = int(number * _TURN * piece) % piece
            file.write(values[turn : turn + rows])
            file.write(values[: max(0, turn + rows - piece)])
            done += rows * width
            if progress is not None:
                progress(done, total)
        _pad(file)


def _values(tensor: PlannedTensor, source: RandomSource, num_rows: int) -> memoryview:
    """Return num_rows rows as bytes [num_rows, bytes of a row]."""
    import numpy as np

    rows = random_rows(source, tensor.ggml_type, num_rows, tensor.shape[-1], std=tensor.std)
    if tensor.mean:
        if tensor.num_bytes != 4 * math.prod(tensor.shape):
            message = f"{tensor.name}: a mean of {tensor.mean} needs F32, its type is {tensor.ggml_type}"
            raise InvariantError(message)
        rows.view(np.float32)[...] += np.float32(tensor.mean)
    return rows.data


def _pad(file: BinaryIO) -> None:
    file.write(bytes(_padded(file.tell()) - file.tell()))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
