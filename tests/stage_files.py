"""A file of tensors without a GGUF header, and the extents that say where each lies in it."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.stage_worker.blobs import BlobLayout, expert_blob_layout
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.counters import TransferCounters

F32, Q8_0 = 0, 8  # ggml types


class TensorFile:
    """Tensors one after the other, with a gap before each; values is what a reader must find."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        """tensors: name -> (values, ggml type F32 or Q8_0)."""
        self.path = path
        self.extents: dict[str, TensorExtent] = {}
        self.values: dict[str, torch.Tensor] = {}
        self.raw: dict[str, bytes] = {}
        content = bytearray()
        for name, (values, ggml_type) in tensors.items():
            content += b"gap" * 11
            array = values.numpy()
            if ggml_type == Q8_0:
                packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
                self.values[name] = torch.from_numpy(
                    gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).reshape(array.shape)
                )
                self.raw[name] = packed.tobytes()
            else:
                self.values[name], self.raw[name] = values, array.astype(np.float32).tobytes()
            self.extents[name] = TensorExtent(
                name=name,
                file=0,
                offset_bytes=len(content),
                num_bytes=len(self.raw[name]),
                ggml_type=ggml_type,
                shape=tuple(values.shape),
            )
            content += self.raw[name]
        path.write_bytes(content)

    def reader(self, counters: TransferCounters | None = None) -> ByteReader:
        return ByteReader([str(self.path)], counters or TransferCounters())


class ExpertFile(TensorFile):
    """The routed experts of layers 0 .. num_layers: gate and up Q8_0 [32, 64], down F32 [64, 32] or Q8_0."""

    def __init__(self, path: Path, *, num_layers: int = 2, num_experts: int = 6, fused: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        tensors: dict[str, tuple[torch.Tensor, int]] = {}
        for layer in range(num_layers):
            shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
            if fused:
                shapes = {"gate_up": (64, 64), "down": (64, 32)}
            for part, shape in shapes.items():
                values = torch.randn(num_experts, *shape, generator=generator) / 8
                # Layers of different sizes, so that a slot is not filled to its end by each of them.
                tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = (
                    values,
                    F32 if part == "down" and layer % 2 else Q8_0,
                )
        super().__init__(path, tensors)
        self.num_layers, self.num_experts = num_layers, num_experts

    def layouts(self) -> list[BlobLayout]:
        return [
            expert_blob_layout(layer, self.extents, num_experts=self.num_experts)
            for layer in range(self.num_layers)
        ]

    def blob(self, layer: int, expert: int) -> bytes:
        """The expert's parts, one after the other."""
        parts = [name for name in self.raw if name.startswith(f"blk.{layer}.")]
        sizes = [len(self.raw[name]) // self.num_experts for name in parts]
        return b"".join(
            self.raw[name][expert * size : (expert + 1) * size]
            for name, size in zip(parts, sizes, strict=True)
        )
