"""Finds the sequences of a super-chunk whose values are no longer finite, and keeps them to themselves.

One NaN or infinity in a row reaches every later row of its sequence and stays in its state, so the sequence
is given up as a whole; the others of the super-chunk go on untouched. A row of a matrix product depends on
its own input row only, and each segment's mixer on its own state only. The guard clears the rows all the
same, so that no sum over rows and no padded tile can meet 0 * NaN.

Each half of a layer costs one sum over its rows. The sums are read back once a layer, at the point where
the walk reads the routing counts back anyway.
"""

from collections.abc import Sequence

import torch

from strata_coord.ipc.messages import NotFinite, Segment

ARRIVED = -1  # the layer of rows that were not finite before this stage's first layer


class FiniteGuard:
    """Watches one super-chunk on its way through the layers of a stage.

    Letters: S rows of the super-chunk, W floats of a residual row, D hidden size, K experts per token.
    """

    def __init__(self, segments: Sequence[Segment], rows_SW: torch.Tensor) -> None:
        """Begin with the rows as they came in."""
        self._segments = segments
        self._sums_S = rows_SW.sum(1)  # of the rows after the half that ran last, not read back yet
        self._layer = ARRIVED  # the layer of that half
        self._found: dict[int, int] = {}  # sequence -> first layer

    def after_attention(
        self, layer: int, *, rows_SW: torch.Tensor, x_SD: torch.Tensor, weights_SK: torch.Tensor
    ) -> None:
        """Check what layer's attention half left: the experts' input and the router's weights.

        The residual rows need no sum of their own: their norm, the experts' input, is not finite when they
        are not. All three are cleared for the sequences found.
        """
        sums_S = x_SD.sum(1).add_(weights_SK.sum(1))
        self._note(sums_S, layer)
        if self._found:
            self._clear(rows_SW, x_SD, weights_SK)

    def after_experts(self, layer: int, rows_SW: torch.Tensor) -> None:
        """Take the sums of the rows that layer is done with; they are looked at with the next half's."""
        if self._found:
            self._clear(rows_SW)
        self._sums_S, self._layer = rows_SW.sum(1), layer

    def finish(self, rows_SW: torch.Tensor) -> tuple[NotFinite, ...]:
        """Return the sequences found, and fill their rows with NaN.

        That tells the next stage not to go on with them, in the order of the stream and without a message.
        """
        self._note(torch.zeros_like(self._sums_S), self._layer)
        if self._found:
            self._clear(rows_SW, value=float("nan"))
        return tuple(NotFinite(sequence=sequence, layer=layer) for sequence, layer in self._found.items())

    def _note(self, sums_S: torch.Tensor, layer: int) -> None:
        if bool(torch.isfinite(self._sums_S + sums_S).all()):
            return
        for row_sums_S, at in ((self._sums_S, self._layer), (sums_S, layer)):
            counts = [segment.count for segment in self._segments]
            finite_rows = torch.split(torch.isfinite(row_sums_S), counts)
            for segment, finite in zip(self._segments, finite_rows, strict=True):
                if not bool(finite.all()):
                    self._found.setdefault(segment.sequence, at)

    def _clear(self, *rows: torch.Tensor, value: float = 0.0) -> None:
        start = 0
        for segment in self._segments:
            if segment.sequence in self._found:
                for tensor in rows:
                    tensor[start : start + segment.count].fill_(value)
            start += segment.count
