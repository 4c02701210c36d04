from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stage_files import F32, Q8_0, TensorFile

from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.backend import CpuBackend
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.dense import DenseWeights, check_shapes

GROUPS = {
    "small": ("norm", "q", "k", "bias"),
    "large": ("up", "down", "scale"),
    "matrix": ("table",),
}


@pytest.fixture
def file(tmp_path: Path) -> TensorFile:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return TensorFile(
        tmp_path / "dense.bin",
        {
            "norm": (draw(64), F32),
            "q": (draw(8, 64), Q8_0),
            "k": (draw(4, 64), Q8_0),
            "bias": (draw(8), F32),
            "up": (draw(32, 64), Q8_0),
            "down": (draw(64, 32), Q8_0),
            "scale": (draw(2, 3, 5), F32),
            "table": (draw(20, 32), Q8_0),
        },
    )


class Loaded:
    def __init__(self, file: TensorFile) -> None:
        self.counters = TransferCounters()
        self.reader = file.reader(self.counters)
        groups = {
            group: {f"{name}.weight": file.extents[name] for name in names} for group, names in GROUPS.items()
        }
        self.dense = DenseWeights(groups, backend=CpuBackend(), reader=self.reader)
        self.progress: list[tuple[int, int]] = []

    def load(self) -> DenseWeights:
        self.dense.load(progress=lambda done, total: self.progress.append((done, total)))
        return self.dense


@pytest.fixture
def loaded(file: TensorFile) -> Iterator[Loaded]:
    made = Loaded(file)
    yield made
    made.reader.close()


def test_a_group_expands_to_its_tensors_in_their_shapes(file: TensorFile, loaded: Loaded) -> None:
    dense = loaded.load()
    for group in ("small", "large", "small", "matrix"):  # the smaller one again, in the larger one's scratch
        expanded = dense.expand(group)
        assert set(expanded) == {f"{name}.weight" for name in GROUPS[group]}
        for name in GROUPS[group]:
            assert torch.equal(expanded[f"{name}.weight"], file.values[name]), (group, name)


def test_all_bytes_are_read_once_and_told(file: TensorFile, loaded: Loaded) -> None:
    dense = loaded.load()
    total = sum(map(len, file.raw.values()))
    assert loaded.counters.snapshot().file_read == total == dense.num_bytes
    assert loaded.progress[-1] == (total, total)
    assert [done for done, _ in loaded.progress] == sorted({done for done, _ in loaded.progress})


def test_expanded_tensors_share_scratch_and_plain_ones_are_not_copied(loaded: Loaded) -> None:
    dense = loaded.load()
    dense.expand("large")
    first, second = dense.expand("small"), dense.expand("large")
    assert first["q.weight"].data_ptr() == second["up.weight"].data_ptr()
    assert dense.expand("small")["norm.weight"].data_ptr() == first["norm.weight"].data_ptr()
    assert first["norm.weight"].data_ptr() != second["scale.weight"].data_ptr()


@pytest.mark.parametrize("ids", [slice(3, 9), slice(0, 20), torch.tensor([7, 0, 7, 19])])
def test_rows_of_a_matrix(file: TensorFile, loaded: Loaded, ids: torch.Tensor | slice) -> None:
    dense = loaded.load()
    assert torch.equal(dense.rows("matrix", ids), file.values["table"][ids])
    assert dense.num_rows("matrix") == 20


def test_use_before_loading_is_refused(loaded: Loaded) -> None:
    with pytest.raises(ModelError, match="is used before it is loaded"):
        loaded.dense.expand("small")


def test_shapes_are_compared_by_what_they_hold(file: TensorFile) -> None:
    extents = {"q.weight": file.extents["q"], "scale.weight": file.extents["scale"]}
    check_shapes(extents, {"q.weight": (8, 64), "scale.weight": (2, 15), "absent.weight": (1,)})
    with pytest.raises(ModelError, match=r"tensor q has shape \[8, 64\], the architecture needs \[8, 65\]"):
        check_shapes(extents, {"q.weight": (8, 65)})
