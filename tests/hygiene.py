"""Three checks that need no tool of their own; pre-commit calls them, and test_hygiene.py covers the tree."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_BYTES = 500_000
MARKERS = (b"<" * 7 + b" ", b">" * 7 + b" ", b"|" * 7 + b" ")


def end_of_file(path: Path) -> str | None:
    """Return what is wrong with the end of a text file, or None."""
    data = path.read_bytes()
    if not data or b"\0" in data[:8192]:
        return None
    if not data.endswith(b"\n"):
        return "does not end with a newline"
    return "ends with an empty line" if data.endswith(b"\n\n") else None


def merge_markers(path: Path) -> str | None:
    """Return the first line that starts like a conflict marker, or None."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.startswith(MARKERS):
            return f"line {number} is a merge marker"
    return None


def large_files(path: Path) -> str | None:
    """Return the size of a file over the limit, or None."""
    size = path.stat().st_size
    return f"has {size} bytes, the limit is {MAX_BYTES}" if size > MAX_BYTES else None


CHECKS: dict[str, Callable[[Path], str | None]] = {
    "end-of-file": end_of_file,
    "merge-markers": merge_markers,
    "large-files": large_files,
}


def problems(check: str, paths: Sequence[Path]) -> list[str]:
    """Run one check over files; links and folders are passed over."""
    found = ((path, CHECKS[check](path)) for path in paths if path.is_file() and not path.is_symlink())
    return [f"{path}: {problem}" for path, problem in found if problem is not None]


if __name__ == "__main__":
    lines = problems(sys.argv[1], [Path(name) for name in sys.argv[2:]])
    print("\n".join(lines))
    sys.exit(bool(lines))
