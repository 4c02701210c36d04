"""What a file is that is no GGUF file, from its first bytes: most often the wrong link was fetched."""

from collections.abc import Sequence

PEEK_BYTES = 256

_LFS = b"version https://git-lfs"
_STARTS: Sequence[tuple[bytes, str]] = (
    (_LFS, "a Git LFS pointer; fetch the file itself, as with git lfs pull"),
    (b"PK\x03\x04", "a zip archive or PyTorch checkpoint; give a GGUF conversion of the model"),
    (b"ggml", "a GGML file, older than GGUF; convert it"),
    (b"ggjt", "a GGML file, older than GGUF; convert it"),
    (b"\x1f\x8b", "a gzip archive; unpack it"),
)
_LENGTH_BYTES = 8  # a safetensors file opens with the length of a JSON header


def foreign_kind(first: bytes) -> str:
    """Return what a file that does not open with the magic seems to be, and what to do; "" if unknown."""
    for start, kind in _STARTS:
        if first.startswith(start):
            return kind
    if first[_LENGTH_BYTES:].startswith(b'{"'):
        return "a safetensors file; give a GGUF conversion of the model"
    text = first.lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page; fetch the file behind the page's download link"
    if first and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in first):
        return "a text file; give a .gguf file"
    if first and not any(first):
        return "zeros, an unfinished download; fetch it again"
    return ""
