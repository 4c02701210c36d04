"""The dense weights of a stage: quantised bytes at rest, expanded group by group as the walk reaches them.

A group is what is used together: one layer, or the head. Tensors of a group that have the same block type lie
side by side, so that a group expands with one kernel per type instead of one per tensor. All groups share one
scratch buffer per type: the tensors of a group are valid until the next expand call. fp32 tensors are
their own expanded form and are not copied.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError
from strata_coord.kernels import dequant
from strata_coord.stage_worker.backend import Backend
from strata_coord.stage_worker.byte_reader import ByteReader

F32 = 0  # ggml type


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Tensors of one group and one block type, side by side."""

    ggml_type: int
    extents: dict[str, TensorExtent]
    raw: torch.Tensor | None = None  # uint8, all bytes

    @property
    def num_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents.values())

    @property
    def num_elements(self) -> int:
        return sum(math.prod(extent.shape) for extent in self.extents.values())

    def loaded(self) -> torch.Tensor:
        if self.raw is None:
            message = f"tensor {next(iter(self.extents))} is used before it is loaded"
            raise ModelError(message)
        return self.raw


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expanded:
    """A group's place in the scratch. Views are made once: a token makes thousands else."""

    batches: tuple[tuple[_Batch, torch.Tensor], ...]  # what must be expanded, and where to
    tensors: Mapping[str, torch.Tensor]


class DenseWeights:
    """Quantised bytes of named groups of tensors, and their expanded form on demand."""

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, TensorExtent]],
        *,
        backend: Backend,
        reader: ByteReader,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """groups: group name -> tensor key -> extent. dtype: of expanded weights; fp32 tensors stay fp32."""
        self._dtype = dtype
        self._backend = backend
        self._reader = reader
        self._batches = {name: _batches(extents) for name, extents in groups.items()}
        self._scratch: dict[int, torch.Tensor] = {}
        self._expanded: dict[str, _Expanded] = {}  # by group

    def load(self, *, progress: Callable[[int, int], None]) -> None:
        """Read all tensors and take the scratch; progress gets bytes done and bytes in all."""
        done, total = 0, self.num_bytes
        for batches in self._batches.values():
            for batch in batches:
                raw = torch.empty(batch.num_bytes, dtype=torch.uint8)
                view = raw.numpy().data
                start = 0
                for extent in batch.extents.values():
                    stop = start + extent.num_bytes
                    self._reader.read_into(
                        view[start:stop], file=extent.file, offset_bytes=extent.offset_bytes
                    )
                    start = stop
                batch.raw = raw.to(self._backend.device)
                done += batch.num_bytes
                progress(done, total)

    @property
    def num_bytes(self) -> int:
        """Quantised bytes of all tensors."""
        return sum(batch.num_bytes for batches in self._batches.values() for batch in batches)

    def expand(self, group: str) -> Mapping[str, torch.Tensor]:
        """The tensors of a group in torch shape, valid until the next call."""
        expanded = self._expanded.get(group)
        if expanded is None:
            expanded = self._expanded[group] = self._views(group)
        for batch, values in expanded.batches:
            dequant.dequantize(batch.loaded(), batch.ggml_type, values.numel(), out=values)
        return expanded.tensors

    def rows(
        self, group: str, ids: torch.Tensor | slice, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Rows of the one matrix of a group, [N, in]; ids: int64 [N], or a slice of rows.

        device: where the rows are wanted, if not where the matrix is: they cross quantised.
        """
        (batch,) = self._batches[group]
        ((_, extent),) = batch.extents.items()
        num_rows, in_features = extent.shape
        raw = batch.loaded().view(num_rows, -1)[ids]
        if device is not None:
            raw = raw.to(device)
        dtype = torch.float32 if extent.ggml_type == F32 else self._dtype
        out = torch.empty(raw.shape[0], in_features, dtype=dtype, device=raw.device)
        return dequant.dequantize(raw.contiguous(), extent.ggml_type, tuple(out.shape), out=out)

    def num_rows(self, group: str) -> int:
        """Rows of the one matrix of a group."""
        (batch,) = self._batches[group]
        ((_, extent),) = batch.extents.items()
        return extent.shape[0]

    def _views(self, group: str) -> _Expanded:
        batches: list[tuple[_Batch, torch.Tensor]] = []
        tensors: dict[str, torch.Tensor] = {}
        for batch in self._batches[group]:
            if batch.ggml_type == F32:
                values = batch.loaded().view(torch.float32)
            else:
                values = self._scratch_of(batch)
                batches.append((batch, values))
            sizes = [math.prod(extent.shape) for extent in batch.extents.values()]
            for (key, extent), piece in zip(batch.extents.items(), torch.split(values, sizes), strict=True):
                tensors[key] = piece.view(extent.shape)
        return _Expanded(batches=tuple(batches), tensors=MappingProxyType(tensors))

    def _scratch_of(self, batch: _Batch) -> torch.Tensor:
        elements = batch.num_elements
        scratch = self._scratch.get(batch.ggml_type)
        if scratch is None or scratch.numel() < elements:
            # Views of the smaller buffer would keep it alive; the other groups make theirs anew.
            self._expanded.clear()
            scratch = torch.empty(elements, dtype=self._dtype, device=batch.loaded().device)
            self._scratch[batch.ggml_type] = scratch
        return scratch[:elements]


def _batches(extents: Mapping[str, TensorExtent]) -> list[_Batch]:
    by_type: dict[int, _Batch] = {}
    for key, extent in extents.items():
        batch = by_type.setdefault(extent.ggml_type, _Batch(ggml_type=extent.ggml_type, extents={}))
        batch.extents[key] = extent
    return list(by_type.values())


def check_shapes(extents: Mapping[str, TensorExtent], required: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a group's tensors with the shapes that the architecture's maths needs.

    Raises:
        ModelError: a tensor has another shape; both shapes are named.
    """
    for key, shape in required.items():
        extent = extents.get(key)
        if extent is not None and math.prod(extent.shape) != math.prod(shape):
            message = (
                f"tensor {extent.name} has shape {list(extent.shape)}, the architecture needs {list(shape)}"
            )
            raise ModelError(message)
