"""What the control plane puts on the wire, by the product's own encodings, intervals and deflate.

Where there is little news, each peer pushes a record over all its links but the one it came over. Otherwise it comes
once to each peer, which asks for it by a name that neighbours offer: over each link in one direction, or, where both
ends offer at the same moment, in both; `OFFERS` counts a quarter more. With `DEGREE` links dialled and as many
accepted, a peer has 2 * DEGREE. Frames cost what `molink.dht.membership.timing` says; those of offers, asks and
answers are counted minute by minute, from how many records there were.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from molink.dht.gossip.spreading import RECORD_ID_BYTES
from molink.dht.gossip.table import DIGESTS
from molink.dht.host.compressed_stream import Deflater
from molink.dht.membership.send_pace import LINE_BITS_PER_S, WIRE_BYTES
from molink.dht.membership.timing import DEGREE, DiscoveryTiming, NewsRate, ihave_interval_s
from molink.dht.records import announcement_pb2 as pb

FRAME_BYTES = 2
"""A frame's head."""
BUDGET_KBIT_S = LINE_BITS_PER_S / 1000
COMPARISONS_OF_NEWCOMERS, COMPARISONS_OF_CLIENTS = 2, 2
"""Peers with which a newcomer compares the table that it has copied from another, and a client its own."""
KINDS = ("states", "facts", "losses", "frames", "repair", "newcomers", "clients")
"""states, facts, losses: records that are flooded. frames: what carries them. repair: comparing tables. newcomers,
clients: what they copy of them."""
MINUTE_S = 60.0
LINKS = 2 * DEGREE
OFFERS = 1.25 * DEGREE
"""Of a record, that a peer makes."""
_TIMING = DiscoveryTiming()
_DIGEST_BYTES = pb.Digest(peer_tags=[2**63] * DIGESTS, sequences=[2**41] * DIGESTS).ByteSize() / DIGESTS


@dataclass(slots=True)
class Packing:
    """One deflate stream that all records of a kind of stream pass, as they would between two neighbours."""

    deflater: Deflater = field(default_factory=Deflater)
    sizes: dict[str, list[float]] = field(default_factory=dict)
    """By kind: count and sum."""

    def add(self, kind: str, frame: bytes) -> int:
        """Bytes that the frame takes after all before it."""
        size_bytes = sum(map(len, self.deflater.pack([frame])))
        counted = self.sizes.setdefault(kind, [0, 0.0])
        counted[0] += 1
        counted[1] += size_bytes
        return size_bytes

    def mean_bytes(self, kind: str) -> float:
        """Of a frame so far."""
        count, total = self.sizes.get(kind, (0, 0.0))
        return total / max(1, count)


@dataclass(slots=True)
class ControlTraffic:
    """Bytes that the average peer sends, by kind and minute."""

    news: NewsRate = field(default_factory=lambda: NewsRate(0.0, 0.0))
    """As each peer counts it."""
    sent_bytes: dict[str, dict[int, float]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    offered: dict[int, int] = field(default_factory=dict)
    """Records that were offered, by minute, and the gap between offers then."""
    gaps_s: dict[int, float] = field(default_factory=dict)
    gossip: Packing = field(default_factory=Packing)
    entries: Packing = field(default_factory=Packing)
    """Of tables that are handed over whole."""
    newer_states: Packing = field(default_factory=Packing)
    """Of what is newer than another's."""
    state_bytes: list[int] = field(default_factory=list)
    pulled_bytes: float = 0.0
    """By gateways, all together."""

    def flooded(self, kind: str, record: bytes, peers: int, now_s: float, cost_bits: float) -> None:
        """A record goes to all of so many peers, who count it as `cost_bits`."""
        if kind == "states":
            self.state_bytes.append(len(record))
        packed_bytes = self.gossip.add(kind, record)
        copies = min(LINKS, max(1, peers - 1)) - 1 + 1 / max(1, peers)
        if self.news.after(now_s).pushes:
            self._add(kind, copies * (packed_bytes + FRAME_BYTES + WIRE_BYTES), now_s)
        else:
            names = min(OFFERS, copies) + 1
            self._add(kind, packed_bytes + names * RECORD_ID_BYTES, now_s)
            minute = int(now_s // MINUTE_S)
            self.offered[minute] = self.offered.get(minute, 0) + 1
        self.news = self.news.after(now_s, cost_bits)
        self.gaps_s[int(now_s // MINUTE_S)] = ihave_interval_s(self.news.bits_per_s)

    def repaired(self, entries: int, interval_s: float, now_s: float, lasting_s: float) -> None:
        """Each peer compares its table with a neighbour's every `interval_s`."""
        self._add("repair", entries * _DIGEST_BYTES * lasting_s / interval_s, now_s)

    def joined(self, entries: int, peers: int, now_s: float) -> None:
        """A newcomer copies the table of one peer, and compares it with others'."""
        table_bytes = entries * (self.entries.mean_bytes("entry") + COMPARISONS_OF_NEWCOMERS * _DIGEST_BYTES)
        self._add("newcomers", table_bytes / max(1, peers), now_s)

    def pulled(self, entries: int, newer: int, peers: int, now_s: float) -> None:
        """A gateway compares its table of so many entries, and copies the states that are newer."""
        table_bytes = COMPARISONS_OF_CLIENTS * entries * _DIGEST_BYTES
        table_bytes += newer * self.newer_states.mean_bytes("entry")
        self.pulled_bytes += table_bytes
        self._add("clients", table_bytes / max(1, peers), now_s)

    def kbit_s(self, minute: int) -> Mapping[str, float]:
        """What the average peer sent in that minute, which is over."""
        sent = {kind: by_minute.get(minute, 0.0) for kind, by_minute in self.sent_bytes.items()}
        return {kind: size * 8 / MINUTE_S / 1000 for kind, size in (sent | self._frames(minute)).items()}

    def mean_kbit_s(self, kind: str, duration_s: float) -> float:
        """What the average peer sent in the minutes that began within the duration: later nobody comes any more."""
        minutes = math.ceil(duration_s / MINUTE_S)
        return sum(self.kbit_s(minute)[kind] for minute in range(minutes)) / minutes

    def _frames(self, minute: int) -> dict[str, float]:
        """Of offers, asks and answers in a minute: each link carries one frame of offers in a gap if there is any, each
        neighbour that has offered first is asked once, and answers once. A link that carries nothing keeps alive."""
        gap_s = self.gaps_s.get(minute, 1.0)
        records = self.offered.get(minute, 0) * gap_s / MINUTE_S
        offers = LINKS * (1 - math.exp(-records * OFFERS / LINKS))
        asked = LINKS * (1 - math.exp(-records / LINKS))
        frames = (offers + 2 * asked) * MINUTE_S / gap_s
        frames = max(frames, LINKS * MINUTE_S / _TIMING.keepalive_s)
        return {"frames": frames * (FRAME_BYTES + WIRE_BYTES)}

    def _add(self, kind: str, size_bytes: float, now_s: float) -> None:
        minute = int(now_s // MINUTE_S)
        sent = self.sent_bytes[kind]
        sent[minute] = sent.get(minute, 0.0) + size_bytes
