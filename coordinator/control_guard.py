"""Keeps control tokens that a user spells from becoming control tokens when a chat template is rendered.

A rendered prompt is one string in which the template's own control tokens and the user's words look alike.
So before rendering, one unused character, the mark, goes into every spelling of a control token that the
user's strings hold, which breaks it; the tokenizer then looks for control tokens in the marked text and drops
the mark. Text without such spellings, nearly all text, is left as it is. A control token that the template's
text and the user's would make together is broken too, by a mark at the edge of the user's string.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from strata_coord.coordinator.spellings import Spellings
from strata_coord.ipc.errors import RequestError

# U+007F first: templates neither trim it nor escape it in JSON. Then the private use areas.
_MARKS = (0x7F, *range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))


class ControlGuard:
    """The control tokens of one vocabulary. May be used from several threads."""

    def __init__(self, control: Spellings) -> None:
        self._control = control
        self._openings: frozenset[str] = frozenset()
        self._endings: frozenset[str] = frozenset()
        self._longest = max(map(len, control), default=0)
        for spelling in control:
            # Words alone are left unmarked: templates compare them ('user', 'function').
            self._openings |= {part for at in range(1, len(spelling)) if _has_sign(part := spelling[:at])}
            self._endings |= {part for at in range(1, len(spelling)) if _has_sign(part := spelling[at:])}

    def guard(self, value: Any, used: Sequence[Any]) -> tuple[Any, str | None]:
        """Return value with the mark in its strings where needed, and the mark; None: nothing was marked.

        Args:
            value: strings, in lists and mappings of any depth; keys count as strings.
            used: what else is rendered, which may not hold the mark.

        Raises:
            RequestError: the strings use every character that could be the mark.
        """
        if not self._needs_mark(value):
            return value, None
        taken = set().union(*map(_characters, (value, *used)))
        mark = next((chr(code) for code in _MARKS if chr(code) not in taken), None)
        if mark is None:
            message = "the messages use every character of Unicode's private use areas"
            raise RequestError(message)
        return self._marked(value, mark), mark

    def _needs_mark(self, value: Any) -> bool:
        if isinstance(value, str):
            return bool(self._places(value))
        if isinstance(value, Mapping):
            return any(self._needs_mark(part) for item in value.items() for part in item)
        return isinstance(value, list | tuple) and any(map(self._needs_mark, value))

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            done, parts = 0, []
            for place in self._places(value):
                parts.append(value[done:place])
                done = place
            return mark.join([*parts, value[done:]])
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(part, mark) for key, part in value.items()}
        return [self._marked(part, mark) for part in value] if isinstance(value, list | tuple) else value

    def _places(self, text: str) -> list[int]:
        """Return before which characters the mark goes, ascending."""
        places = {start + 1 for start, _ in self._control.occurrences(text)}
        # Templates trim, so what is next to their text may be the string or what is left without its blanks.
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        for start in {0, first}:
            head = text[start : start + self._longest]
            if any(head[:size] in self._endings for size in range(1, len(head) + 1)) or self._is_inside(head):
                places.add(start)
        for end in {last, len(text)}:
            tail = text[max(0, end - self._longest) : end]
            if any(tail[-size:] in self._openings for size in range(1, len(tail) + 1)):
                places.add(end)
        return sorted(places)

    def _is_inside(self, text: str) -> bool:
        """Return whether a short string could be the middle of a control token."""
        core = text.rstrip()
        return len(core) < self._longest and _has_sign(core) and any(core in token for token in self._control)


def _has_sign(text: str) -> bool:
    return any(not (char.isalnum() or char == "_") for char in text)


def _characters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        return set().union(*(_characters(part) for item in value.items() for part in item))
    return set().union(*map(_characters, value)) if isinstance(value, list | tuple) else set()
