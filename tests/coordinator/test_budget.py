"""Claims of a stage, held to what the stage takes for them."""

from types import SimpleNamespace

import pytest
import torch

from strata_coord.coordinator import budget
from strata_coord.coordinator.budget import StageShape, _expansion_bytes
from strata_coord.coordinator.config_checks import GRID_TOKENS
from strata_coord.ipc.assignment import TensorExtent
from strata_coord.stage_worker import blobs, head
from strata_coord.stage_worker.backend import CpuBackend
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.dense import DenseWeights
from strata_coord.stage_worker.sub_chunks import CUT_TOKENS

BLOCKS = {0: (1, 4), 2: (32, 18), 8: (32, 34)}  # F32, Q4_0, Q8_0: elements and bytes of a block
SHAPE = StageShape(stage=0, first_layer=0, last_layer=3, is_first=True, is_last=True)


@pytest.mark.parametrize(
    "layers",
    [
        [{"a": (2, 64), "b": (2, 32)}] * 3,
        [{"a": (2, 64), "b": (2, 32)}, {"a": (8, 64), "b": (2, 32)}, {"a": (0, 32), "b": (8, 96)}],
        [{"a": (2, 64), "b": (2, 64)}, {"a": (2, 96)}, {"b": (2, 96)}],
    ],
    ids=["alike", "types differ", "sizes differ"],
)
def test_the_scratch_planned_for_dense_weights_is_what_they_take(layers, tmp_path):
    groups: dict[str, dict[str, TensorExtent]] = {}
    end = 0
    for layer, tensors in enumerate(layers):
        groups[f"blk.{layer}"] = {}
        for name, (ggml_type, columns) in tensors.items():
            elements, block_bytes = BLOCKS[ggml_type]
            size = 2 * columns // elements * block_bytes
            groups[f"blk.{layer}"][name] = TensorExtent(
                name=f"blk.{layer}.{name}",
                file=0,
                offset_bytes=end,
                num_bytes=size,
                ggml_type=ggml_type,
                shape=(2, columns),
            )
            end += size
    file = tmp_path / "weights"
    file.write_bytes(bytes(end))
    reader = ByteReader([str(file)], TransferCounters())
    dense = DenseWeights(groups, backend=CpuBackend(), reader=reader, dtype=torch.float32)
    dense.load(progress=lambda _done, _total: None)
    for group in groups:
        dense.expand(group)
    reader.close()
    taken = sum(scratch.nbytes for scratch in dense._scratch.values())
    model = SimpleNamespace(layer_tensors=lambda layer: tuple(groups[f"blk.{layer}"].values()))
    assert _expansion_bytes(model, SHAPE) == taken > 0  # type: ignore[arg-type]


def test_sizes_that_both_sides_round_to_are_the_same():
    assert budget.HEAD_BLOCK_ROWS == head.VOCABULARY_BLOCK_ROWS
    assert budget.BLOB_ALIGNMENT_BYTES == blobs.BLOB_ALIGNMENT_BYTES
    assert GRID_TOKENS == CUT_TOKENS
