import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.messages import Segment
from strata_coord.stage_worker.sub_chunks import CUT_TOKENS, SubChunk, cut_sub_chunks


def segment(first: int, count: int) -> Segment:
    return Segment(sequence=1, seat=0, first_position=first, count=count)


segments = st.lists(st.builds(segment, st.integers(0, 300), st.integers(1, 300)), max_size=6)


def positions(segments: list[Segment], chunks: list[SubChunk]) -> list[tuple[int, int]]:
    """(segment, position) of every row, in the order of the sub-chunks."""
    return [
        (piece.segment, piece.first_position + row)
        for chunk in chunks
        for piece in chunk.pieces
        for row in range(piece.stop - piece.start)
    ]


@given(segments=segments, max_rows=st.one_of(st.integers(1, 200), st.sampled_from([8, 16, 64, 128, 256])))
def test_every_row_is_in_one_sub_chunk_in_order(segments: list[Segment], max_rows: int) -> None:
    chunks = cut_sub_chunks(segments, max_rows=max_rows)
    assert positions(segments, chunks) == [
        (number, part.first_position + row)
        for number, part in enumerate(segments)
        for row in range(part.count)
    ]
    end = 0
    for chunk in chunks:
        assert chunk.start == end < chunk.stop <= chunk.start + max_rows
        end = chunk.stop
        assert chunk.pieces[0].start == 0
        assert chunk.pieces[-1].stop == chunk.stop - chunk.start
        for piece, following in zip(chunk.pieces, chunk.pieces[1:], strict=False):
            assert piece.stop == following.start
            assert piece.segment < following.segment
    assert end == sum(part.count for part in segments)


@given(segments=segments, blocks=st.integers(1, 4))
def test_a_segment_is_cut_on_multiples_of_the_chunk_only(segments: list[Segment], blocks: int) -> None:
    chunks = cut_sub_chunks(segments, max_rows=blocks * CUT_TOKENS)
    for chunk in chunks:
        for piece in chunk.pieces:
            last = piece.first_position + piece.stop - piece.start
            of = segments[piece.segment]
            assert piece.first_position == of.first_position or piece.first_position % CUT_TOKENS == 0
            assert last == of.first_position + of.count or last % CUT_TOKENS == 0


@given(count=st.integers(1, 400), cut=st.integers(1, 5), blocks=st.integers(1, 3))
def test_a_prompt_in_two_super_chunks_is_cut_at_the_same_positions(count: int, cut: int, blocks: int) -> None:
    """What makes two readings of a prompt do the same arithmetic when they are cut on whole sub-chunks."""
    max_rows = blocks * CUT_TOKENS
    at = min(cut * max_rows, count)
    whole = cut_sub_chunks([segment(0, count)], max_rows=max_rows)
    parts = [
        chunk
        for part in (segment(0, at), segment(at, count - at))
        if part.count
        for chunk in cut_sub_chunks([part], max_rows=max_rows)
    ]

    def bounds(chunks: list[SubChunk]) -> list[tuple[int, int]]:
        return [(chunk.pieces[0].first_position, chunk.stop - chunk.start) for chunk in chunks]

    assert bounds(parts) == bounds(whole)


def test_short_segments_share_a_sub_chunk() -> None:
    (chunk,) = cut_sub_chunks([segment(5, 1), segment(900, 1), segment(0, 3)], max_rows=8)
    assert [(piece.segment, piece.start, piece.stop) for piece in chunk.pieces] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 2, 5),
    ]


def test_nothing_has_no_sub_chunks_and_no_room_is_a_bug() -> None:
    assert cut_sub_chunks([], max_rows=64) == []
    with pytest.raises(InvariantError, match="a sub-chunk of 0 rows holds nothing"):
        cut_sub_chunks([segment(0, 1)], max_rows=0)
