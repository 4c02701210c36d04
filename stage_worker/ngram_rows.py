"""Reads rows of the n-gram table from the file, one pread per distinct row, never the table as a whole.

The table of a real model is 29 to 54 GB and a prompt touches 16 random rows a token, so it stays in the file.
"""

import torch

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.kernels import dequant
from strata_coord.stage_worker.byte_reader import ByteReader


class FileNgramTable:
    """The rows of `per_layer_token_embd.weight`, [num_rows, row_width], read on demand."""

    def __init__(self, extent: TensorExtent, reader: ByteReader) -> None:
        self._extent = extent
        self._reader = reader
        self._row_bytes = extent.num_bytes // extent.shape[0]

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """fp32 [N, row_width] of the rows ids, int64 [N]; equal ids are read once."""
        distinct, inverse = torch.unique(ids, return_inverse=True)
        raw = torch.empty(distinct.numel(), self._row_bytes, dtype=torch.uint8)
        view = raw.numpy().data.cast("B")
        for place, row in enumerate(distinct.tolist()):
            self._reader.read_into(
                view[place * self._row_bytes : (place + 1) * self._row_bytes],
                file=self._extent.file,
                offset_bytes=self._extent.offset_bytes + row * self._row_bytes,
            )
        values = dequant.dequantize(raw, self._extent.ggml_type, (distinct.numel(), self._extent.shape[1]))
        return values[inverse]
