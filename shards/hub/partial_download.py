"""A partial download of a tensor into the store: a file of its bytes and, behind them, a mark for each piece.

So what has arrived is known after a crash as well, and never without the bytes it speaks of.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from molink.shards.hub.hub import RemoteTensor
from molink.shards.hub.ranges import ByteRange, cut
from molink.shards.store.blobs import BlobStore

PIECE_BYTES: Final = 2**23
"""What a process that is killed loses at most of each request."""
_THERE: Final = b"\1"


@dataclass(frozen=True, slots=True)
class PartialDownload:
    """Bytes [start, stop) of a file of the hub, in a file that `BlobStore.reserve` has made."""

    path: Path
    start: int
    stop: int

    @classmethod
    def of(cls, store: BlobStore, remote: RemoteTensor) -> Self:
        """Where the tensor arrives, for any process that fetches it from any model with the same file."""
        tensor = remote.tensor
        name = f"{remote.file.content_id}-{tensor.start}-{tensor.stop}"
        return cls(store.unfinished(name), tensor.start, tensor.stop)

    @property
    def file_bytes(self) -> int:
        """The file's size until it is finished."""
        return self.stop - self.start + len(self._pieces)

    @property
    def _pieces(self) -> tuple[ByteRange, ...]:
        return cut(self.start, self.stop, PIECE_BYTES)

    def missing(self) -> tuple[ByteRange, ...]:
        """The pieces that are not there yet."""
        with self.path.open("rb") as file:
            file.seek(self.stop - self.start)
            marks = file.read()
        return tuple(piece for at, piece in enumerate(self._pieces) if marks[at : at + 1] != _THERE)

    def write(self, at: int, data: bytes) -> None:
        """Puts bytes of the hub's file where they belong; `at` is where they begin there."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(at - self.start)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]

    def mark(self, piece: ByteRange) -> None:
        """The piece is there, all of it."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.stop - self.start + (piece.start - self.start) // PIECE_BYTES)
            file.write(_THERE)

    def finish(self) -> Path:
        """The file with the tensor's bytes alone, to be adopted."""
        with self.path.open("r+b") as file:
            file.truncate(self.stop - self.start)
        return self.path
