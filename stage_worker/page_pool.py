"""Pure: which pages of the KV pool are free, and how many holders each of the others has.

A holder is a sequence or a snapshot. A page is free again when its last holder lets go of it.
"""

from collections.abc import Iterable

from strata_coord.ipc.assignment import KV_PAGE_TOKENS
from strata_coord.ipc.errors import InvariantError, RequestError


class PagePool:
    """Counts the holders of num_pages pages; holds no memory itself."""

    def __init__(self, num_pages: int) -> None:
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: lowest first

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return how many sequences and snapshots hold a page."""
        return self._holders[page]

    def take(self, num_pages: int) -> list[int]:
        """Return so many free pages, each with one holder now; all or nothing.

        Raises:
            RequestError: too few are free.
        """
        if num_pages > len(self._free):
            message = (
                f"KV pool is full: {num_pages * KV_PAGE_TOKENS} more tokens needed, "
                f"{self.num_free * KV_PAGE_TOKENS} of {self.num_pages * KV_PAGE_TOKENS} free; "
                "raise kv.pool_tokens or send fewer prompts at once"
            )
            raise RequestError(message)
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each page.

        Raises:
            InvariantError: a page is free.
        """
        for page in pages:
            if self._holders[page] < 1:
                message = f"page {page} is free and cannot be shared"
                raise InvariantError(message)
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page.

        Raises:
            InvariantError: a page has none.
        """
        freed = []
        for page in pages:
            if self._holders[page] < 1:
                message = f"page {page} is free and cannot be released"
                raise InvariantError(message)
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        if freed:
            self._free += freed
            # Lowest first keeps the next sequence's pages in one run, which reads without a copy.
            self._free.sort(reverse=True)
