from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_files import ExpertFile

from strata_coord.ipc.errors import InvariantError
from strata_coord.stage_worker.blobs import BLOB_ALIGNMENT_BYTES, BlobLayout
from strata_coord.stage_worker.residency import place_experts


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> list[BlobLayout]:
    return ExpertFile(tmp_path_factory.mktemp("experts") / "experts.bin").layouts()


@settings(deadline=None)
@given(
    tiers=st.lists(
        st.lists(st.sampled_from(["vram", "ram", "file"]), min_size=6, max_size=6), min_size=2, max_size=2
    )
)
def test_places_do_not_overlap_and_each_expert_is_in_one_tier(
    layouts: list[BlobLayout], tiers: list[list[str]]
) -> None:
    def chosen(tier: str) -> list[list[int]]:
        return [[expert for expert, at in enumerate(row) if at == tier] for row in tiers]

    found = place_experts(layouts, resident=chosen("vram"), in_arena=chosen("ram"))
    for layer, row in enumerate(tiers):
        assert [found.tier(layer, expert) for expert in range(6)] == row
        assert found.streamed(layer, range(6)) == [expert for expert in range(6) if row[expert] != "vram"]
    for offsets, num_bytes in (
        (found.cache_offsets, found.cache_bytes),
        (found.arena_offsets, found.arena_bytes),
    ):
        end = 0
        for (layer, _), offset in sorted(offsets.items(), key=lambda item: item[1]):
            assert offset >= end
            assert offset % BLOB_ALIGNMENT_BYTES == 0
            end = offset + layouts[layer].num_bytes
        assert end <= num_bytes < end + BLOB_ALIGNMENT_BYTES


@pytest.mark.parametrize(
    ("resident", "in_arena", "message"),
    [
        ([[1], []], [[1], []], r"1 experts are assigned to the cache and to the arena, first \(0, 1\)"),
        ([[2, 2], []], [[], []], "layer 0: expert 2 is absent or assigned twice"),
        ([[], []], [[], [6]], "layer 1: expert 6 is absent or assigned twice"),
        ([[-1], []], [[], []], "layer 0: expert -1 is absent or assigned twice"),
    ],
)
def test_impossible_places_are_refused(
    layouts: list[BlobLayout], resident: list[list[int]], in_arena: list[list[int]], message: str
) -> None:
    with pytest.raises(InvariantError, match=message):
        place_experts(layouts, resident=resident, in_arena=in_arena)


def test_layers_and_lists_must_match(layouts: list[BlobLayout]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        place_experts(layouts, resident=[[]], in_arena=[[], []])


def test_nothing_needs_no_room(layouts: list[BlobLayout], tmp_path: Path) -> None:
    found = place_experts(layouts, resident=[[], []], in_arena=[[], []])
    assert (found.cache_bytes, found.arena_bytes) == (0, 0)
    assert found.tier(0, 0) == "file"
