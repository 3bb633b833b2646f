"""Which requests are made for which pieces of a file."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.hub.ranges import ByteRange, cut, plan_requests


@st.composite
def disjoint_pieces(draw: st.DrawFn) -> list[ByteRange]:
    at = 0
    pieces = []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 300)), max_size=40)):
        pieces.append(ByteRange(at + gap, at + gap + size))
        at += gap + size
    return draw(st.permutations(pieces))


@given(disjoint_pieces(), st.integers(0, 100), st.integers(1, 1000))
def test_every_piece_is_in_exactly_one_request_and_little_else(
    pieces: list[ByteRange], gap_bytes: int, request_bytes: int
) -> None:
    requests = plan_requests(pieces, gap_bytes=gap_bytes, request_bytes=request_bytes)

    assert [piece for request in requests for piece in request.pieces] == sorted(pieces)
    for request in requests:
        assert (request.start, request.stop) == (request.pieces[0].start, request.pieces[-1].stop)
        assert len(request.pieces) == 1 or request.stop - request.start <= request_bytes
        gaps = [later.start - sooner.stop for sooner, later in itertools.pairwise(request.pieces)]
        assert all(gap <= gap_bytes for gap in gaps)
    for one, other in itertools.pairwise(requests):
        assert one.stop <= other.start
        near = other.start - one.stop <= gap_bytes
        assert not near or other.pieces[0].stop - one.start > request_bytes


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1000, 10**6))
def test_pieces_fill_what_they_are_cut_from(start: int, size: int, piece_bytes: int) -> None:
    pieces = cut(start, start + size, piece_bytes)

    assert sum(piece.stop - piece.start for piece in pieces) == size
    assert all(piece.stop - piece.start == piece_bytes for piece in pieces[:-1])
    assert [piece.start for piece in pieces] == [
        start + number * piece_bytes for number in range(len(pieces))
    ]


def test_pieces_that_overlap_or_are_empty_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        plan_requests([ByteRange(0, 10), ByteRange(9, 12)], gap_bytes=0, request_bytes=100)
    with pytest.raises(ValueError, match="no range"):
        ByteRange(5, 5)
    with pytest.raises(ValueError, match="at least one byte"):
        cut(0, 10, 0)
