"""Where a sequence's rows lie in paged tensors: row i is at page i // S, place i mod S, for S rows a page.

Letters: G groups, P pages of the pool, S rows of a page, D values of a row, T rows.
"""

import torch
from torch import Tensor


class PageTable:
    """The pages of one sequence, in order; used for all its paged tensors, whatever their rows per page."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.set_pages([])

    def set_pages(self, pages: list[int]) -> None:
        """Take other pages."""
        self.pages = list(pages)
        self._contiguous = not pages or pages == list(range(pages[0], pages[0] + len(pages)))
        self._table = torch.tensor(pages, dtype=torch.int64, device=self._device)

    def write(self, pool_GPSD: Tensor, first: int, rows_GTD: Tensor) -> None:
        """Store rows from row first on; their pages exist."""
        flat, per_page = pool_GPSD.flatten(1, 2), pool_GPSD.shape[2]
        count = rows_GTD.shape[1]
        if self._contiguous and self.pages:
            start = self.pages[0] * per_page + first
            flat[:, start : start + count].copy_(rows_GTD)
            return
        places = self._places(torch.arange(first, first + count, device=flat.device), per_page)
        flat.index_copy_(1, places, rows_GTD.to(flat.dtype))

    def read(self, pool_GPSD: Tensor, length: int) -> Tensor:
        """Return rows [G, length, D] from row 0 on: a view where the pages are one run."""
        flat, per_page = pool_GPSD.flatten(1, 2), pool_GPSD.shape[2]
        if self._contiguous:
            start = self.pages[0] * per_page if self.pages else 0
            return flat[:, start : start + length]
        used = -(-length // per_page)
        return pool_GPSD.index_select(1, self._table[:used]).flatten(1, 2)[:, :length]

    def read_at(self, pool_GPSD: Tensor, rows_N: Tensor) -> Tensor:
        """Return the rows [G, N, D] of int64 numbers in any order, copied."""
        return pool_GPSD.flatten(1, 2).index_select(1, self._places(rows_N, pool_GPSD.shape[2]))

    def _places(self, rows_N: Tensor, per_page: int) -> Tensor:
        """Return where rows lie on the pool's axis of all pages' rows."""
        if self._contiguous:
            return rows_N + self.pages[0] * per_page
        return self._table[rows_N // per_page] * per_page + rows_N % per_page
