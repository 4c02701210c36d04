"""Bytes that a stage moves and reads, against the extents of the file's header."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from oracle.fixtures import TinyCase
from stage_chain import StageChain, Tiers

from strata_coord.ipc.assignment import TensorExtent
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.stage import NGRAM_TABLE

NUM_EXPERTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes")


def blob_bytes(chain: StageChain, layer: int) -> int:
    """Bytes of one expert of a layer, from the header's extents."""
    return sum(
        tensor.num_bytes // NUM_EXPERTS
        for tensor in chain.index.stage_tensors(layer, layer + 1, is_first=False, is_last=False)
        if tensor.name.startswith(f"blk.{layer}.ffn_") and tensor.name.endswith("_exps.weight")
    )


class Moved:
    """Counter differences of all stages of a chain since it was made."""

    def __init__(self, chain: StageChain) -> None:
        self._chain = chain
        self._before = [stage.counters.snapshot() for stage in chain.stages]

    def total(self, name: str) -> int:
        return sum(
            getattr(stage.counters.snapshot(), name) - getattr(before, name)
            for stage, before in zip(self._chain.stages, self._before, strict=True)
        )


@pytest.mark.parametrize("tiers", [Tiers(), Tiers(resident=5, arena=4), Tiers(resident=16), Tiers(arena=0)])
@pytest.mark.parametrize("num_super_chunks", [1, 4])
def test_stream_all_moves_what_is_not_resident_once_per_super_chunk(
    tiny_qwen3moe_q: TinyCase, folder: Path, tiers: Tiers, num_super_chunks: int
) -> None:
    ids = tiny_qwen3moe_q.ids[:64].tolist()
    with StageChain(tiny_qwen3moe_q.path, boundaries=(1,), tiers=tiers, max_rows=64) as chain:
        moved = Moved(chain)
        chain.prompt_logits(ids, folder, [64 // num_super_chunks] * num_super_chunks, upload="stream-all")
        layers = range(chain.index.geometry.num_layers)
        once = sum(blob_bytes(chain, layer) * (NUM_EXPERTS - tiers.resident) for layer in layers)
        in_file = NUM_EXPERTS - min(tiers.resident + tiers.arena, NUM_EXPERTS)
        assert moved.total("ram_to_device") == num_super_chunks * once
        assert moved.total("file_read") == num_super_chunks * in_file * sum(
            blob_bytes(chain, layer) for layer in layers
        )
        assert moved.total("resident_hit") == sum(
            blob_bytes(chain, layer) * sum(count > 0 for count in counts[: tiers.resident])
            for log in chain.logs
            for layer, counts in log.done
        )
        assert moved.total("rows_spilled") == 0


def test_routed_only_moves_what_was_routed_and_is_not_resident(tiny_qwen3moe_q: TinyCase) -> None:
    tiers = Tiers(resident=5, arena=4)
    with StageChain(tiny_qwen3moe_q.path, boundaries=(1,), tiers=tiers) as chain:
        moved = Moved(chain)
        chain.greedy(1, tiny_qwen3moe_q.ids[:3].tolist(), 3, upload="routed-only")
        hits = [
            (expert, blob_bytes(chain, layer))
            for log in chain.logs
            for layer, counts in log.done
            for expert, count in enumerate(counts)
            if count
        ]
        assert len(hits) < 3 * 3 * NUM_EXPERTS  # fewer than all, or the test shows nothing
        assert moved.total("resident_hit") == sum(size for expert, size in hits if expert < 5)
        assert moved.total("ram_to_device") == sum(size for expert, size in hits if expert >= 5)
        assert moved.total("file_read") == sum(size for expert, size in hits if expert >= 9)


class ReadLog:
    """Ranges that were read, in place of ByteReader.read_into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int, int]] = []
        read_into = ByteReader.read_into

        def logged(reader: ByteReader, target: memoryview, *, file: int, offset_bytes: int) -> None:
            self.ranges.append((file, offset_bytes, offset_bytes + len(target)))
            read_into(reader, target, file=file, offset_bytes=offset_bytes)

        monkeypatch.setattr(ByteReader, "read_into", logged)


def extent_ranges(extents: Iterable[TensorExtent]) -> list[tuple[int, int, int]]:
    return sorted(
        (extent.file, extent.offset_bytes, extent.offset_bytes + extent.num_bytes) for extent in extents
    )


def merged(ranges: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges with neighbours joined; fails where two overlap."""
    joined: list[tuple[int, int, int]] = []
    for file, start, stop in sorted(ranges):
        if joined and joined[-1][0] == file:
            assert start >= joined[-1][2], f"byte {start} of file {file} is read twice"
            if start == joined[-1][2]:
                joined[-1] = (file, joined[-1][1], stop)
                continue
        joined.append((file, start, stop))
    return joined


@pytest.mark.parametrize("tiers", [Tiers(resident=16), Tiers(resident=6, arena=10), Tiers()])
def test_loading_reads_each_byte_of_the_own_extents_once(
    tiny_qwen4exp_q: TinyCase, monkeypatch: pytest.MonkeyPatch, tiers: Tiers
) -> None:
    log = ReadLog(monkeypatch)
    with StageChain(tiny_qwen4exp_q.path, boundaries=(2, 5), tiers=tiers) as chain:
        own = [
            extent
            for stage in chain.stages
            for extent in stage.assignment.tensors
            if extent.name != NGRAM_TABLE  # stays in the file
        ]
        assert merged(log.ranges) == merged(extent_ranges(own))
        for stage in chain.stages:
            assert stage.counters.snapshot().file_read == sum(
                extent.num_bytes for extent in stage.assignment.tensors if extent.name != NGRAM_TABLE
            )
        assert len({extent.name for extent in own}) == len(own)  # no tensor on two stages


def test_what_lies_in_the_file_is_not_read_at_load(
    tiny_qwen3moe_q: TinyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ReadLog(monkeypatch)
    with StageChain(tiny_qwen3moe_q.path, tiers=Tiers(resident=1, arena=2)) as chain:
        read = sum(stop - start for _, start, stop in log.ranges)
        layers = range(chain.index.geometry.num_layers)
        experts = sum(NUM_EXPERTS * blob_bytes(chain, layer) for layer in layers)
        dense = sum(extent.num_bytes for extent in chain.stages[0].assignment.tensors) - experts
        assert read == dense + experts * 3 // NUM_EXPERTS
        aligned = sum(-(-blob_bytes(chain, layer) // 64) * 64 for layer in layers)
        assert chain.stages[0].arena_bytes() == 2 * aligned
        assert chain.stages[0].device_bytes() == dense - _embedding_bytes(chain) + aligned


def _embedding_bytes(chain: StageChain) -> int:
    return next(
        extent.num_bytes
        for extent in chain.stages[0].assignment.tensors
        if extent.name == "token_embd.weight"
    )
