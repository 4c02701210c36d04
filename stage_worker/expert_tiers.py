"""The places of a stage's experts: expert cache (device), arena (host), files; filled once at load.

Owns the two buffers and knows how to bring one blob into a given target. Does not decide what lies where
(residency.py) nor when a blob moves (stager.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from strata_coord.stage_worker.backend import Backend
from strata_coord.stage_worker.blobs import BlobLayout, aligned
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.residency import Residency


class ExpertTiers:
    """The expert cache and the arena of one stage, and the way to the file for the rest."""

    def __init__(
        self,
        *,
        layouts: Sequence[BlobLayout],
        residency: Residency,
        backend: Backend,
        reader: ByteReader,
        arena: torch.Tensor | None = None,
    ) -> None:
        """Take room for both buffers; arena is uint8 host memory of at least residency.arena_bytes."""
        self.layouts = {layout.layer: layout for layout in layouts}
        self.residency = residency
        self.max_blob_bytes = max((layout.num_bytes for layout in layouts), default=0)
        self._reader = reader
        self._cache = backend.empty(residency.cache_bytes)
        self._arena = torch.empty(residency.arena_bytes, dtype=torch.uint8) if arena is None else arena
        self._staging = torch.empty(self.max_blob_bytes, dtype=torch.uint8)
        self._residents: dict[int, dict[int, int]] = {layer: {} for layer in self.layouts}
        starts: dict[int, int] = {}
        for (layer, expert), offset in residency.cache_offsets.items():
            starts.setdefault(layer, offset)
            self._residents[layer][expert] = len(self._residents[layer])
        self._resident_blobs = {
            layer: self._rows_of(layout, starts.get(layer, 0), len(self._residents[layer]))
            for layer, layout in self.layouts.items()
        }

    def _rows_of(self, layout: BlobLayout, start: int, num_experts: int) -> torch.Tensor:
        stride = aligned(layout.num_bytes)
        return self._cache[start : start + stride * num_experts].view(num_experts, stride)

    def load(self, *, progress: Callable[[int, int], None]) -> None:
        """Read the experts of both buffers from the files; progress gets bytes done and bytes in all."""
        places = list(self._places())
        done, total = 0, sum(target.numel() for _, target in places)
        for (layer, expert), target in places:
            blob = self._staging[: self.layouts[layer].num_bytes]
            self.read_file(layer, expert, blob)
            target.copy_(blob)
            done += target.numel()
            progress(done, total)

    def _places(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        for offsets, buffer in (
            (self.residency.cache_offsets, self._cache),
            (self.residency.arena_offsets, self._arena),
        ):
            for (layer, expert), offset in offsets.items():
                yield (layer, expert), buffer[offset : offset + self.layouts[layer].num_bytes]

    def resident_blob(self, layer: int, expert: int) -> torch.Tensor | None:
        """The expert's bytes in the expert cache, uint8 [blob bytes], or None if it must be streamed."""
        offset = self.residency.cache_offsets.get((layer, expert))
        return None if offset is None else self._cache[offset : offset + self.layouts[layer].num_bytes]

    def resident_experts(self, layer: int) -> Mapping[int, int]:
        """Resident experts of a layer -> their row in resident_blobs."""
        return self._residents[layer]

    def resident_blobs(self, layer: int) -> torch.Tensor:
        """All resident experts of a layer, uint8 [experts, stride], as they lie in the expert cache."""
        return self._resident_blobs[layer]

    def arena_blobs(self, layer: int, experts: Sequence[int]) -> torch.Tensor | None:
        """The bytes of neighbours in the arena, first blob to last, or None if they are only in the file."""
        offset = self.residency.arena_offsets.get((layer, experts[0]))
        if offset is None:
            return None
        num_bytes = self.layouts[layer].num_bytes
        return self._arena[offset : offset + aligned(num_bytes) * (len(experts) - 1) + num_bytes]

    def are_neighbours(self, layer: int, expert: int, other: int) -> bool:
        """Whether other lies right behind expert in the arena."""
        offsets = self.residency.arena_offsets
        here, there = offsets.get((layer, expert)), offsets.get((layer, other))
        return here is not None and there == here + aligned(self.layouts[layer].num_bytes)

    def read_file(self, layer: int, expert: int, target: torch.Tensor) -> None:
        """Read the expert's parts from the file into target, host uint8 [blob bytes], as one blob."""
        view = target.numpy().data
        for part in self.layouts[layer].parts:
            file, offset = part.file_place(expert)
            self._reader.read_into(
                view[part.offset_bytes : part.offset_bytes + part.num_bytes], file=file, offset_bytes=offset
            )
