"""The dense weights of a stage: quantised bytes at rest, expanded layer by layer as the walk reaches them.

All layers share one set of scratch tensors, so the expanded weights of a layer are valid until the next
expand call. fp32 tensors are not copied at all.
"""

import math
from collections.abc import Callable, Mapping

import torch

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.ipc.errors import ModelError
from strata_coord.kernels import dequant
from strata_coord.stage_worker.backend import Backend
from strata_coord.stage_worker.byte_reader import ByteReader


F32 = 0  # ggml type: such a tensor is its own expanded form


class DenseWeights:
    """Quantised bytes of named tensors, and their fp32 form on demand."""

    def __init__(self, extents: Mapping[str, TensorExtent], *, backend: Backend, reader: ByteReader) -> None:
        self._extents = dict(extents)
        self._backend = backend
        self._reader = reader
        self._raw: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def load(self, *, progress: Callable[[int, int], None]) -> None:
        """Read all tensors; progress gets bytes done and bytes in all."""
        done, total = 0, self.num_bytes
        for name, extent in self._extents.items():
            raw = torch.empty(extent.num_bytes, dtype=torch.uint8)
            self._reader.read_into(
                memoryview(raw.numpy()), file=extent.file, offset_bytes=extent.offset_bytes
            )
            self._raw[name] = raw.to(self._backend.device)
            done += extent.num_bytes
            progress(done, total)

    @property
    def num_bytes(self) -> int:
        """Quantised bytes of all tensors."""
        return sum(extent.num_bytes for extent in self._extents.values())

    def __contains__(self, name: str) -> bool:
        return name in self._extents

    def expand(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """The fp32 tensors of names (key -> full tensor name), in torch shape.

        The result of a key is overwritten by the next call that expands a tensor under the same key.
        """
        return {key: self._expand_one(key, name) for key, name in names.items()}

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids (int64 [N]) of a matrix as fp32 [N, in], expanding nothing else."""
        extent = self._extents[name]
        num_rows, in_features = extent.shape
        raw = self._raw[name].view(num_rows, -1)[ids]
        return dequant.dequantize(raw, extent.ggml_type, (ids.numel(), in_features))

    def expand_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a matrix as fp32, valid until the next expand_rows call."""
        extent = self._extents[name]
        num_rows, in_features = extent.shape
        raw = self._raw[name].view(num_rows, -1)[start:stop]
        return self._expand_raw("rows", raw, extent.ggml_type, (stop - start, in_features))

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in torch order."""
        return self._extents[name].shape

    def _expand_one(self, key: str, name: str) -> torch.Tensor:
        extent = self._extents[name]
        return self._expand_raw(key, self._raw[name], extent.ggml_type, extent.shape)

    def _expand_raw(
        self, key: str, raw: torch.Tensor, ggml_type: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        if ggml_type == F32:
            return raw.view(torch.float32).view(shape)
        elements = math.prod(shape)
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < elements:
            scratch = self._scratch[key] = torch.empty(elements, dtype=torch.float32, device=raw.device)
        return dequant.dequantize(raw, ggml_type, shape, out=scratch[:elements].view(shape))


def check_shapes(extents: Mapping[str, TensorExtent], required: Mapping[str, tuple[int, ...]]) -> None:
    """Compare tensors with the shapes that the architecture's maths needs.

    Raises:
        ModelError: a required tensor has another shape; both shapes are named.
    """
    for name, shape in required.items():
        extent = extents.get(name)
        if extent is not None and extent.shape != shape:
            message = (
                f"tensor {name} has shape {list(extent.shape)}, but the architecture needs {list(shape)}"
            )
            raise ModelError(message)
