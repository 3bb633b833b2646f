"""State of a process's uplink and of each link on it, by which policies decide. Owned by `uplink.Uplink`. Pure."""

import math

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.decode_intervals import PASSED_S, DecodeIntervalPredictor
from molink.peer.wire.estimation.shared_rate import LinkEvidence, UplinkRate
from molink.peer.wire.estimation.slow_start import START_WINDOW_BYTES
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.fair_parts import FairShareGuard, LinkShare
from molink.peer.wire.transmission.flight import NO_PREDICTION, Flight, InFlightChunk
from molink.peer.wire.transmission.line_model import LineModel
from molink.peer.wire.transmission.send_queue import SendQueue
from molink.peer.wire.transmission.values import Send

STALLED_S = 1.0
"""Bulk that waits behind a chunk that nobody acknowledges for so long and two round trips does not wait for the
uplink, but for its receiver."""
LOOK_S = 0.1
"""How often that is looked for."""
_DECODE, _CONTROL = TrafficClass.DECODE, TrafficClass.CONTROL
"""Asked for at every step; by its name, an enumeration finds a member by a call."""


class LinkDecodes:
    """Decodes of one link: when the next one is expected, as predicted or as learnt, whichever is earlier."""

    __slots__ = ("expected_s", "intervals")

    def __init__(self) -> None:
        self.intervals = DecodeIntervalPredictor()
        self.expected_s = math.inf
        """When the peer predicts the next one."""

    def next_s(self, now_s: float) -> float:
        """When the next one is expected; infinite when none is."""
        learnt_s = self.intervals.next_s(now_s)
        return min(learnt_s, self.expected_s) if self.expected_s >= now_s - PASSED_S else learnt_s


class LinkState:
    """Link state: what waits on a link, what is in flight, and what its acknowledgements have shown."""

    __slots__ = (
        "acked_bytes",
        "decodes",
        "evidence",
        "flight",
        "line",
        "number",
        "send_queue",
        "share",
        "stalled",
        "suspended",
    )

    def __init__(self, number: int, send_queue: SendQueue) -> None:
        self.number = number
        self.send_queue = send_queue
        self.flight = Flight()
        self.line = LineModel()
        self.decodes = LinkDecodes()
        self.evidence = LinkEvidence(START_WINDOW_BYTES)
        self.share = LinkShare()
        self.acked_bytes = START_WINDOW_BYTES
        """All that has arrived, and what may be in flight at first. So slow start's window, grown by everything, as
        TCP's: for policies that send as TCP does."""
        self.suspended = False
        self.stalled = False
        """Its receiver has not acknowledged for long: what waits on it counts for this link alone."""

    @property
    def has_bulk(self) -> bool:
        """Whether anything below decode and control waits: what the window holds back."""
        heads = self.send_queue.heads
        return len(heads) > (_DECODE in heads) + (_CONTROL in heads)

    def idle(self) -> None:
        """Notes that the line may run empty though bulk waits: measurements of that must not lower the rate."""
        chunks = self.flight.chunks
        if chunks:
            chunks[-1].more = False
        else:
            self.line.rate.idle()


class UplinkDecodes:
    """Decodes of all links: when one was pushed last, and when the next one is expected."""

    __slots__ = ("_links", "_next_s", "pushed_s")

    def __init__(self) -> None:
        self.pushed_s = -math.inf
        """When a decode was last pushed, on any link."""
        self._links: dict[int, LinkState] = {}
        self._next_s = math.inf

    def record_push(self, link: LinkState, sessions: tuple[bytes, ...], now_s: float) -> None:
        """A decode of these sessions is pushed now."""
        self.pushed_s = now_s
        link.decodes.intervals.record_decode(sessions, now_s)
        self.expect(link, math.inf)

    def expect(self, link: LinkState, at_s: float) -> None:
        """Sets when the next decode is predicted on a link."""
        link.decodes.expected_s = at_s
        self._links[link.number] = link
        self._next_s = -math.inf

    def forget_link(self, link: LinkState) -> None:
        """Removes a link."""
        self._links.pop(link.number, None)
        self._next_s = -math.inf

    def next_s(self, now_s: float) -> float:
        """When the next decode is expected on any link; infinite when none is."""
        if self._next_s < now_s - PASSED_S:
            expected = [link.decodes.next_s(now_s) for link in self._links.values() if not link.suspended]
            self._next_s = min(expected, default=math.inf)
        return self._next_s


class UplinkState:
    """Uplink state: the links of a process and what they share."""

    def __init__(self) -> None:
        self.links: dict[int, LinkState] = {}
        self.bottleneck = BottleneckModel()
        self.rate = UplinkRate(self.bottleneck)
        self.decodes = UplinkDecodes()
        self.fair_shares = FairShareGuard()
        self.sent_bytes = 0
        """Over all links."""
        self.waiting = dict.fromkeys(TrafficClass, 0)
        """For each class, the links on which it waits."""
        self.bulk_links = 0
        """Links on which bulk waits."""
        self._looked_s = -math.inf

    def forget_link(self, link: LinkState) -> None:
        """Removes a link."""
        del self.links[link.number]
        self.rate.forget_link(link.evidence)
        self.decodes.forget_link(link)

    def sent(self, link: LinkState, part: Send, now_s: float) -> None:
        """Records a chunk that leaves now: in flight, and in the bottleneck models."""
        line, flight, size_bytes = link.line, link.flight, part.size_bytes
        in_flight_bytes = flight.size_bytes
        rate, uplink_rate = line.rate.bytes_per_s, self.rate.bytes_per_s
        unloaded = not in_flight_bytes or (
            rate is not None and in_flight_bytes <= rate * (line.delay.min_rtt_s or 0.0)
        )
        has_bulk = self.bulk_links > 0 and link.has_bulk
        self.sent_bytes = sent_bytes = self.sent_bytes + size_bytes
        chunk = InFlightChunk(
            flight.sequence + 1, size_bytes, sent_bytes, now_s, has_bulk, self.bulk_links, unloaded
        )
        flight.add(chunk)
        if rate is not None:
            chunk.on_line = line.bottleneck.record_sent(size_bytes, line.gain * rate, now_s)
        if uplink_rate is not None:
            chunk.on_uplink = self.bottleneck.record_sent(size_bytes, line.gain * uplink_rate, now_s)

    @property
    def fair_bytes_per_s(self) -> float:
        """The part of the uplink that each link with bulk may count on; infinite while nothing is known."""
        rate = self.rate.bytes_per_s
        return math.inf if rate is None else rate / max(1, self.bulk_links)

    def count_bulk(self, link: LinkState, links: int) -> None:
        """Bulk waits on one link more (1) or less (-1)."""
        if not link.stalled:
            self.bulk_links += links

    def look(self, now_s: float) -> None:
        """Sees, now and then, which links have stalled."""
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for link in self.links.values():
            chunks = link.flight.chunks
            if chunks and not link.stalled and link.has_bulk:
                patience_s = STALLED_S + 2 * link.line.delay.round_s
                if now_s - chunks[0].sent_s > patience_s:
                    self.stalls(link, True)

    def stalls(self, link: LinkState, stalls: bool) -> None:
        """What waits on a link counts for nobody else from now on, or does again."""
        links = -1 if stalls else 1
        link.stalled = False
        for traffic_class in link.send_queue.heads:
            self.waiting[traffic_class] += links
        if link.has_bulk:
            self.count_bulk(link, links)
        link.stalled = stalls
        link.evidence.is_busy = link.has_bulk and not stalls

    def acked(self, link: LinkState, chunk: InFlightChunk, at_s: float | None, now_s: float) -> None:
        """A chunk that was in flight has arrived, at `at_s` of the receiver's clock if that is known."""
        link.acked_bytes += chunk.size_bytes
        if chunk.resent:
            return
        line, more = link.line, chunk.more
        evidence, sent_bytes = link.evidence, chunk.sent_bytes
        own_bytes, round_s = sent_bytes - evidence.sent_bytes, line.delay.base_rtt_s
        if evidence.rate.record_arrival(now_s, chunk.sent_s, own_bytes, more, round_s):
            self.rate.record_measurement(evidence, link.acked_bytes, now_s)
        evidence.sent_bytes = sent_bytes
        if at_s is None:
            return
        rate, uplink_rate = line.rate.bytes_per_s, self.rate.bytes_per_s
        if rate is None:
            found = line.record_start(chunk, at_s, now_s)
            if found is not None:
                evidence.rate.found(found)
                self.rate.record_measurement(evidence, link.acked_bytes, now_s)
            return
        queueing_s = line.record_arrival(chunk, rate, uplink_rate, link.flight.size_bytes, at_s, now_s)
        if queueing_s is None:
            return
        standing_s = line.delay.standing_s
        if more and self.bulk_links > 1:
            self.fair_shares.report_queue(link.share, standing_s, self.fair_bytes_per_s, now_s)
        if chunk.on_uplink is not NO_PREDICTION:
            # What a chunk waited on one link's way may not be the uplink's queue: it can only be shorter.
            own_s = chunk.size_bytes / (uplink_rate or rate)
            self.bottleneck.record_arrival(chunk.on_uplink, queueing_s, now_s, 0.0, standing_s, own_s)
