"""Which bytes of a file to ask for, and in which requests. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes [start, stop) of a file that are wanted and arrive together. Never empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"[{self.start}, {self.stop}) is no range of bytes")


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Bytes [start, stop) of a file in one request. What lies between its pieces is read and thrown away."""

    start: int
    stop: int
    pieces: tuple[ByteRange, ...]
    """In order, disjoint; the first begins at `start`, the last ends at `stop`."""


def cut(start: int, stop: int, piece_bytes: int) -> tuple[ByteRange, ...]:
    """[start, stop) in pieces of at most `piece_bytes`, on a grid that begins at `start`; none if it is empty."""
    if piece_bytes < 1:
        raise ValueError(f"pieces have at least one byte, not {piece_bytes}")
    return tuple(ByteRange(at, min(at + piece_bytes, stop)) for at in range(start, stop, piece_bytes))


def plan_requests(
    pieces: Iterable[ByteRange], *, gap_bytes: int, request_bytes: int
) -> tuple[RangeRequest, ...]:
    """As few requests as cover the pieces: neighbours are joined over gaps of at most `gap_bytes`.

    A request spans at most `request_bytes`, unless a single piece is larger. In order of the file.

    Raises:
        ValueError: pieces overlap.
    """
    requests: list[RangeRequest] = []
    together: list[ByteRange] = []
    for piece in sorted(pieces):
        if together and piece.start < together[-1].stop:
            raise ValueError(f"{piece} overlaps {together[-1]}")
        if together and (
            piece.start - together[-1].stop > gap_bytes or piece.stop - together[0].start > request_bytes
        ):
            requests.append(_joined(together))
            together = []
        together.append(piece)
    if together:
        requests.append(_joined(together))
    return tuple(requests)


def _joined(pieces: list[ByteRange]) -> RangeRequest:
    return RangeRequest(pieces[0].start, pieces[-1].stop, tuple(pieces))
