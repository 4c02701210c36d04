"""Text from outside made safe to show: no control characters, no bidirectional overrides, bounded length."""


def printable(text: str, *, limit: int = 200) -> str:
    r"""Return text on one line with everything that is not printable escaped.

    A model's names and templates, file names and prompts reach terminals and logs; an escape sequence inside
    them would run there. "\x1b" becomes the four characters backslash, x, 1, b.

    Args:
        text: anything.
        limit: characters kept; what is cut is marked by "...".
    """
    cut = text[:limit]
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in cut
    )
    return shown + "..." if len(text) > limit else shown
