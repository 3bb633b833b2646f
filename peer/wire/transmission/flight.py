"""Chunks in flight on one link: what was sent and is not acknowledged. Pure."""

from collections import deque

NO_PREDICTION = (0.0, 0.0)


class InFlightChunk:
    """In-flight chunk: what was known of the link when it was sent."""

    __slots__ = (
        "more",
        "on_line",
        "on_uplink",
        "resent",
        "sent_bytes",
        "sent_s",
        "sequence",
        "shared",
        "size_bytes",
        "unloaded",
    )

    def __init__(
        self,
        sequence: int,
        size_bytes: int,
        sent_bytes: int,
        sent_s: float,
        more: bool,
        bulk_links: int,
        unloaded: bool,
    ) -> None:
        self.sequence = sequence
        self.size_bytes = size_bytes
        self.sent_bytes = sent_bytes
        """What had been sent over all links with it."""
        self.sent_s = sent_s
        self.more = more
        """Bulk waited behind it on its link."""
        self.shared = bulk_links > more
        """Bulk waited on another link too: how fast this one is says no more than what part of the uplink it had."""
        self.on_line = NO_PREDICTION
        self.on_uplink = NO_PREDICTION
        self.unloaded = unloaded
        """There was too little in flight for a queue."""
        self.resent = False
        """Its times say nothing: it was sent again over another connection."""


class Flight:
    """Flight of one link: its chunks in order, their bytes, and the last sequence number given out."""

    __slots__ = ("chunks", "sequence", "size_bytes")

    def __init__(self) -> None:
        self.chunks: deque[InFlightChunk] = deque()
        self.size_bytes = 0
        self.sequence = 0
        """Of the last chunk sent."""

    def add(self, chunk: InFlightChunk) -> None:
        """A chunk leaves, under the number after `sequence`."""
        self.chunks.append(chunk)
        self.sequence = chunk.sequence
        self.size_bytes += chunk.size_bytes

    def take_first(self) -> InFlightChunk:
        """The oldest chunk is acknowledged."""
        chunk = self.chunks.popleft()
        self.size_bytes -= chunk.size_bytes
        return chunk

    def resend(self, now_s: float) -> None:
        """All of them are sent once more, over another connection."""
        for chunk in self.chunks:
            chunk.sent_s = now_s
            chunk.resent = True
