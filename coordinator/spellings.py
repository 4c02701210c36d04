"""Finds the spellings of special tokens in text: the leftmost first, of several at one place the longest."""

import re
from collections.abc import Collection, Iterator


class Spellings:
    """A set of spellings, indexed by first character. Immutable; may be used from several threads."""

    def __init__(self, spellings: Collection[str]) -> None:
        self._known = frozenset(spellings)
        lengths: dict[str, set[int]] = {}
        for spelling in self._known:
            lengths.setdefault(spelling[0], set()).add(len(spelling))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted(lengths))
        self._candidates = re.compile(f"[{firsts}]") if firsts else None

    def __contains__(self, spelling: object) -> bool:
        return spelling in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def occurrences(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of every occurrence, overlapping ones included; the longest at each start."""
        if self._candidates is None:
            return
        for candidate in self._candidates.finditer(text):
            start = candidate.start()
            for length in self._lengths[text[start]]:
                if text[start : start + length] in self._known:
                    yield start, start + length
                    break

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of text in order: (part, whether it is a spelling). No part is empty."""
        done = 0
        for start, end in self.occurrences(text):
            if start < done:
                continue
            if start > done:
                yield text[done:start], False
            yield text[start:end], True
            done = end
        if done < len(text):
            yield text[done:], False
