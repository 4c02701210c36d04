from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stage_files import F32, Q8_0, TensorFile

from strata_coord.ipc.messages import NOT_FINITE, SamplingSettings, Segment, SuperChunk
from strata_coord.stage_worker import head as head_module
from strata_coord.stage_worker.backend import CpuBackend
from strata_coord.stage_worker.dense import DenseWeights
from strata_coord.stage_worker.head import HEAD_GROUP, OUTPUT_GROUP, Head

VOCABULARY, HIDDEN, NUM_REAL = 50, 32, 48


class _Geometry:
    num_real_tokens = NUM_REAL


class _Family:
    """A head that scales by a norm's weight, so that the group is seen to be used."""

    geometry = _Geometry()

    def head(self, rows_TW: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return rows_TW * weights["output_norm.weight"]


@pytest.fixture(params=[F32, Q8_0])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> TensorFile:
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    output[NUM_REAL:] *= 100  # padding would win every draw
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    return TensorFile(
        tmp_path / "head.bin", {"output_norm.weight": (norm, F32), "output.weight": (output, request.param)}
    )


@pytest.fixture
def head(file: TensorFile) -> Iterator[Head]:
    reader = file.reader()
    dense = DenseWeights(
        {
            HEAD_GROUP: {"output_norm.weight": file.extents["output_norm.weight"]},
            OUTPUT_GROUP: {"output.weight": file.extents["output.weight"]},
        },
        backend=CpuBackend(),
        reader=reader,
    )
    dense.load(progress=lambda _done, _total: None)
    yield Head(family=_Family(), dense=dense)  # type: ignore[arg-type]
    reader.close()


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(9))


def expected_logits(file: TensorFile, rows: torch.Tensor) -> torch.Tensor:
    return (rows * file.values["output_norm.weight"]) @ file.values["output.weight"].T


def super_chunk(*segments: Segment, sub_chunk_tokens: int = 4) -> SuperChunk:
    return SuperChunk(
        epoch=1,
        index=0,
        operations=(),
        segments=segments,
        sub_chunk_tokens=sub_chunk_tokens,
        slot_rows=8,
        upload="stream-all",
    )


@pytest.mark.parametrize("block_rows", [1, 7, 50, 8192])
def test_logits_do_not_depend_on_how_the_output_is_cut(
    file: TensorFile, head: Head, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(head_module, "VOCABULARY_BLOCK_ROWS", block_rows)
    assert torch.allclose(head.logits(rows), expected_logits(file, rows), rtol=1e-5, atol=1e-4)


def test_each_segment_that_asks_gets_the_token_after_its_last_row(
    file: TensorFile, head: Head, rows: torch.Tensor
) -> None:
    greedy, warm = SamplingSettings(), SamplingSettings(temperature=1.5, seed=4)
    tokens = head.sample(
        super_chunk(
            Segment(sequence=5, seat=0, first_position=100, count=3, sample=greedy),
            Segment(sequence=6, seat=1, first_position=0, count=4),
            Segment(sequence=7, seat=2, first_position=9, count=1, sample=warm),
            Segment(sequence=8, seat=3, first_position=20, count=4, sample=greedy),
        ),
        rows,
    )
    assert [(token.sequence, token.position) for token in tokens] == [(5, 103), (7, 10), (8, 24)]
    real = expected_logits(file, rows)[:, :NUM_REAL]
    for token, row in ((tokens[0], 2), (tokens[2], 11)):
        assert token.token == int(real[row].argmax())
        assert token.logprob == pytest.approx(float(real[row].log_softmax(0).max()), abs=1e-4)
    assert 0 <= tokens[1].token < NUM_REAL
    alone = head.sample(
        super_chunk(Segment(sequence=7, seat=0, first_position=9, count=1, sample=warm)), rows[7:8]
    )
    assert alone[0].token == tokens[1].token  # a draw depends on seed and position, not on company


def test_no_segment_that_asks_costs_nothing(
    head: Head, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "logits", lambda *_: pytest.fail("the head ran"))
    assert head.sample(super_chunk(Segment(sequence=1, seat=0, first_position=0, count=12)), rows) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token(head: Head, rows: torch.Tensor, bad: float) -> None:
    rows[2, 0] = bad
    segments = [
        Segment(sequence=number, seat=0, first_position=0, count=3, sample=SamplingSettings())
        for number in range(4)
    ]
    tokens = head.sample(super_chunk(*segments), rows)
    assert [token.token == NOT_FINITE for token in tokens] == [True, False, False, False]


def test_logits_of_every_row_land_at_its_position(
    file: TensorFile, head: Head, rows: torch.Tensor, tmp_path: Path
) -> None:
    base = 128  # a header of somebody else
    paths = [tmp_path / "one.bin", tmp_path / "two.bin"]
    for path in paths:
        path.write_bytes(b"h" * base)
    segments = (
        Segment(sequence=1, seat=0, first_position=2, count=5, logits=True),
        Segment(sequence=2, seat=1, first_position=0, count=1),
        Segment(sequence=3, seat=2, first_position=0, count=6, logits=True),
    )
    with paths[0].open("r+b") as one, paths[1].open("r+b") as two:
        head.write_logits(super_chunk(*segments), rows, {1: (one.fileno(), base), 3: (two.fileno(), base)})
    expected = expected_logits(file, rows)
    row_bytes = 4 * VOCABULARY
    for path, first, slice_ in ((paths[0], 2, slice(0, 5)), (paths[1], 0, slice(6, 12))):
        content = path.read_bytes()
        assert content[:base] == b"h" * base
        assert len(content) == base + (first + slice_.stop - slice_.start) * row_bytes
        assert not any(content[base : base + first * row_bytes])
        found = torch.frombuffer(bytearray(content[base + first * row_bytes :]), dtype=torch.float32)
        assert torch.allclose(found.view(-1, VOCABULARY), expected[slice_], rtol=1e-5, atol=1e-4)
