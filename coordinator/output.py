"""Prints the answers of commands on stdout: a JSON object for scripts, a rich renderable for people.

Progress, notes and errors never come this way: they go to stderr.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPED_WIDTH = 110  # columns where nobody's terminal says otherwise; enough for the plan's widest table


@contextlib.contextmanager
def named_stdout() -> Iterator[None]:
    """Name standard output in the system's errors of what is printed inside: a full disk says no file.

    Raises:
        OSError: the same, with "standard output" as its file.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def print_json(value: object) -> None:
    """Print value as one indented JSON object. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=2, allow_nan=False)
    with named_stdout():
        print(text)


def print_renderable(renderable: "RenderableType") -> None:
    """Print for a person: in the terminal's width and colours, plain and PIPED_WIDTH wide into a pipe."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PIPED_WIDTH
    with named_stdout():
        Console(width=width, highlight=False, markup=False, emoji=False).print(renderable)
