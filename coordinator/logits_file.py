"""The .npy file that takes the logits of every prompt position: float32 [tokens, vocabulary].

The coordinator writes the header and sizes the file; the last stage fills the rows in through its own
descriptor. The header is written by hand since numpy is not loaded here for thirty bytes.
"""

import os
from pathlib import Path

from strata_coord.ipc.errors import ConfigError

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER_BYTES = 128  # a multiple of 64, as the format asks; holds any shape


def create_logits_file(path: Path, *, num_tokens: int, vocabulary_size: int) -> int:
    """Create the file with its header and full size; returns a descriptor that the caller owns.

    Raises:
        ConfigError: the file cannot be written there.
    """
    shape = f"({num_tokens}, {vocabulary_size})"
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    room = _HEADER_BYTES - len(_MAGIC) - 2
    header = _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1).encode() + b"\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, header, 0)
            os.truncate(descriptor, _HEADER_BYTES + num_tokens * vocabulary_size * 4)
        except OSError:
            os.close(descriptor)
            raise
    except OSError as error:
        message = f"--logits {path}: {error.strerror}"
        raise ConfigError(message) from error
    return descriptor


def logits_offset() -> int:
    """Where the first row begins."""
    return _HEADER_BYTES
