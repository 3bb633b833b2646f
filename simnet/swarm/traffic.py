"""What the control plane puts on the wire, by the product's own encodings and intervals.

Every record is flooded: each peer that takes it in passes it on over all its links but the one it came over. With
`DEGREE` links dialled, and as many accepted on average, that is 2 * DEGREE - 1 copies from each peer, and as many to
it. What a frame costs beside its content is as `molink.dht.timing` counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from molink.dht import announcement_pb2 as pb
from molink.dht.upkeep import DEGREE

FRAME_BYTES, WIRE_BYTES = 2, 12 + 18 + 40 + 26
"""A frame's head; yamux, noise, TCP and IP, and half an acknowledgement, for each frame that goes alone."""
BUDGET_KBIT_S = 32.0
SOURCES_OF_NEWCOMERS, SOURCES_OF_CLIENTS = 3, 2
"""Of so many peers a newcomer copies the whole table, and a client the states."""
KINDS = ("states", "facts", "repair", "newcomers", "clients")
"""states, facts: announcements that are flooded. repair: comparing tables. newcomers, clients: their copies of it."""
MINUTE_S = 60.0
_MOST_AGE_MS = 2**21 - 1


def entry_bytes(state_bytes: float, facts_bytes: float = 0.0) -> float:
    """A peer's entry in a table that is handed over: the records, what their lengths and ages take, and the frame."""
    frame = pb.TableEntry(state=b"s", facts=b"f" if facts_bytes else b"", facts_age_ms=_MOST_AGE_MS,
                          state_age_ms=_MOST_AGE_MS)  # fmt: skip
    lengths = 2 if facts_bytes else 1
    return state_bytes + facts_bytes + frame.ByteSize() - (2 if facts_bytes else 1) + lengths + FRAME_BYTES


@dataclass(slots=True)
class ControlTraffic:
    """Bytes that the average peer sends, by kind and minute."""

    sent_bytes: dict[str, dict[int, float]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    records: dict[str, int] = field(default_factory=lambda: {"states": 0, "facts": 0})
    record_bytes: dict[str, int] = field(default_factory=lambda: {"states": 0, "facts": 0})
    largest_state_bytes: int = 0
    pulled_bytes: float = 0.0
    """By gateways, all together."""

    def flooded(self, kind: str, size_bytes: int, peers: int, now_s: float) -> None:
        """A record of `states` or `facts` goes to all of so many peers."""
        self.records[kind] += 1
        self.record_bytes[kind] += size_bytes
        if kind == "states":
            self.largest_state_bytes = max(self.largest_state_bytes, size_bytes)
        copies = min(2 * DEGREE, max(1, peers - 1)) - 1 + 1 / max(1, peers)
        self._add(kind, copies * (size_bytes + FRAME_BYTES + WIRE_BYTES), now_s)

    def mean_bytes(self, kind: str) -> float:
        """Of a record so far."""
        return self.record_bytes[kind] / max(1, self.records[kind])

    def repaired(self, entries: int, interval_s: float, now_s: float, lasting_s: float) -> None:
        """Each peer compares its table with a neighbour's every `interval_s`: it gets one and hands out one."""
        table_bytes = entries * entry_bytes(self.mean_bytes("states"))
        self._add("repair", table_bytes * lasting_s / interval_s, now_s)

    def joined(self, entries: int, peers: int, now_s: float) -> None:
        """A newcomer copies the table."""
        table_bytes = entries * entry_bytes(self.mean_bytes("states"), self.mean_bytes("facts"))
        self._add("newcomers", SOURCES_OF_NEWCOMERS * table_bytes / max(1, peers), now_s)

    def pulled(self, entries: int, peers: int, now_s: float) -> None:
        """A gateway copies the states."""
        table_bytes = SOURCES_OF_CLIENTS * entries * entry_bytes(self.mean_bytes("states"))
        self.pulled_bytes += table_bytes
        self._add("clients", table_bytes / max(1, peers), now_s)

    def kbit_s(self, minute: int) -> Mapping[str, float]:
        """What the average peer sent in that minute."""
        return {kind: sent.get(minute, 0.0) * 8 / MINUTE_S / 1000 for kind, sent in self.sent_bytes.items()}

    def mean_kbit_s(self, kind: str, duration_s: float) -> float:
        """What the average peer sent in the minutes that began within the duration: later nobody comes any more."""
        minutes = math.ceil(duration_s / MINUTE_S)
        sent_bytes = sum(size for minute, size in self.sent_bytes[kind].items() if minute < minutes)
        return sent_bytes * 8 / (minutes * MINUTE_S) / 1000

    def _add(self, kind: str, size_bytes: float, now_s: float) -> None:
        minute = int(now_s // MINUTE_S)
        sent = self.sent_bytes[kind]
        sent[minute] = sent.get(minute, 0.0) + size_bytes
