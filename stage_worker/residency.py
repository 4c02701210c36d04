"""Pure: which expert lies in which tier of this stage, and where in it.

An expert is in exactly one of vram (the expert cache), ram (the arena) or file. The coordinator chose; this
module only turns its lists into offsets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strata_coord.ipc.errors import InvariantError
from strata_coord.stage_worker.blobs import BlobLayout, aligned

Tier = Literal["vram", "ram", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Offsets of the experts that have a place in the expert cache or in the arena."""

    cache_offsets: Mapping[tuple[int, int], int]  # (layer, expert) -> byte offset
    arena_offsets: Mapping[tuple[int, int], int]
    cache_bytes: int
    arena_bytes: int

    def tier(self, layer: int, expert: int) -> Tier:
        """Where the expert's bytes live."""
        if (layer, expert) in self.cache_offsets:
            return "vram"
        return "ram" if (layer, expert) in self.arena_offsets else "file"

    def streamed(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Those of experts that must be uploaded for a pass, in the order given."""
        return [expert for expert in experts if (layer, expert) not in self.cache_offsets]


def place_experts(
    layouts: Sequence[BlobLayout],
    *,
    resident: Sequence[Sequence[int]],
    in_arena: Sequence[Sequence[int]],
) -> Residency:
    """Lay the chosen experts out one after the other, layer by layer.

    Raises:
        InvariantError: an expert is in two tiers, twice in one, or does not exist.
    """
    cache_offsets, cache_bytes = _offsets(layouts, resident)
    arena_offsets, arena_bytes = _offsets(layouts, in_arena)
    twice = cache_offsets.keys() & arena_offsets.keys()
    if twice:
        message = f"{len(twice)} experts are assigned to the cache and to the arena, first {min(twice)}"
        raise InvariantError(message)
    return Residency(
        cache_offsets=cache_offsets,
        arena_offsets=arena_offsets,
        cache_bytes=cache_bytes,
        arena_bytes=arena_bytes,
    )


def _offsets(
    layouts: Sequence[BlobLayout], chosen: Sequence[Sequence[int]]
) -> tuple[dict[tuple[int, int], int], int]:
    offsets: dict[tuple[int, int], int] = {}
    end = 0
    for layout, experts in zip(layouts, chosen, strict=True):
        for expert in experts:
            key = (layout.layer, expert)
            if key in offsets or not 0 <= expert < layout.num_experts:
                message = f"layer {layout.layer}: expert {expert} is absent or assigned twice"
                raise InvariantError(message)
            offsets[key] = end
            end += aligned(layout.num_bytes)
    return offsets, end
