"""Retransmit buffer: chunks that are not acknowledged, to be sent again over a link's next connection. Pure."""

import math
from collections import deque
from typing import NamedTuple

from molink.peer.wire.protocol.packets import CloseCode, PacketError, encode_data
from molink.peer.wire.transmission.classes import TrafficClass

MAX_UNACKNOWLEDGED_BYTES = 32 * 1024 * 1024
MAX_UNACKNOWLEDGED_CHUNKS = 16 * 1024


class SentChunk(NamedTuple):
    """Sent chunk; the payload is a view of its message."""

    sequence: int
    traffic_class: TrafficClass
    message: int
    message_bytes: int
    offset: int
    payload: memoryview
    sent_s: float

    def packet(self) -> bytes:
        return encode_data(
            self.traffic_class, self.message, self.message_bytes, self.offset, self.sequence, self.payload
        )


class RetransmitBuffer:
    """Retransmit buffer: the chunks in flight, in order. Nothing more is to be sent while it is full."""

    def __init__(
        self, limit_bytes: int = MAX_UNACKNOWLEDGED_BYTES, limit_chunks: int = MAX_UNACKNOWLEDGED_CHUNKS
    ) -> None:
        self.acknowledged = 0
        """Every chunk up to this sequence number has arrived."""
        self.queued_bytes = 0
        self.resends: deque[SentChunk] = deque()
        """To be sent once more, before anything new."""
        self.resent = 0
        """The last chunk that ever was among these: the times of those up to it say nothing of the round trip."""
        self._limit_bytes = limit_bytes
        self._limit_chunks = limit_chunks
        self._chunks: deque[SentChunk] = deque()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def sent(self) -> int:
        """The last sequence number given out."""
        return self.acknowledged + len(self._chunks)

    @property
    def is_full(self) -> bool:
        return self.queued_bytes >= self._limit_bytes or len(self._chunks) >= self._limit_chunks

    def add_chunk(self, chunk: SentChunk) -> None:
        """Adds a chunk that leaves now, under the sequence number after `sent`."""
        self._chunks.append(chunk)
        self.queued_bytes += len(chunk.payload)

    def acknowledge(self, sequence: int) -> SentChunk | None:
        """Removes all chunks up to `sequence`, and returns the last of them; None if there was none.

        Raises:
            PacketError: `sequence` was never sent.
        """
        if sequence > self.sent:
            raise PacketError(
                CloseCode.ACKNOWLEDGEMENT, f"chunk {sequence} is acknowledged, {self.sent} was the last sent"
            )
        last = None
        while self.acknowledged < sequence:
            last = self._chunks.popleft()
            self.acknowledged += 1
            self.queued_bytes -= len(last.payload)
        return last

    @property
    def oldest_s(self) -> float:
        """When the oldest of them was sent; infinite: none is in flight."""
        return self._chunks[0].sent_s if self._chunks else math.inf

    def resend(self) -> None:
        """All that is in flight is to be sent once more, over another connection."""
        self.resends.extend(self._chunks)
        self.resent = self.sent
