"""Prints the answers of commands on stdout: a JSON object for scripts, a rich renderable for people.

Progress, notes and errors never come this way: they go to stderr.
"""

import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPED_WIDTH = 110  # columns where nobody's terminal says otherwise; enough for the plan's widest table


def print_json(value: object) -> None:
    """Print value as one indented JSON object. NaN and infinity are refused: they are not JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))


def print_renderable(renderable: "RenderableType") -> None:
    """Print for a person: in the terminal's width and colours, plain and PIPED_WIDTH wide into a pipe."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    Console(width=None if is_terminal else PIPED_WIDTH, highlight=False, markup=False, emoji=False).print(
        renderable
    )
