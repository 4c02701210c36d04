"""Text from outside, safe and short enough to stand inside a one-line message."""

from strata_coord.coordinator.terminal_text import escape_control


def printable(text: str, *, limit: int = 200) -> str:
    """Return text on one line, escaped, cut to limit characters; a cut is marked by "...".

    A model's names and templates reach terminals and logs; an escape sequence inside them would run there.
    """
    return escape_control(text[:limit]) + ("..." if len(text) > limit else "")
