"""State of a process's uplink and of each link on it, by which policies decide. Owned by `uplink.Uplink`. Pure."""

import math
from collections import deque

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.decode_intervals import PASSED_S, DecodeIntervalPredictor
from molink.peer.wire.estimation.estimator import DelayEstimator, RateEstimator
from molink.peer.wire.estimation.shared_rate import LinkEvidence, UplinkRate
from molink.peer.wire.estimation.slow_start import START_WINDOW_BYTES, SlowStart
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.fair_parts import FairShareGuard, LinkShare
from molink.peer.wire.transmission.round_robin import RoundRobin
from molink.peer.wire.transmission.send_queue import QueuedMessage, SendQueue
from molink.peer.wire.transmission.values import Send

NO_PREDICTION = (0.0, 0.0)
CHUNK_S = 0.003
"""A chunk of bulk occupies the line for so long."""
LONG_CHUNK_S = 0.012
"""The same while nobody decodes."""
FULL_S = 0.003
"""Bulk that waits so long on the way fills the line; if it waits less, more is tried."""
MOST_GAIN = 1.25
"""Of BBR's probing for bandwidth."""
GROWING_GAIN = 2.0
"""While the rate grows: twice as much in every round trip, as in slow start."""
STALLED_S = 1.0
"""Bulk that waits behind a chunk that nobody acknowledges for so long and two round trips does not wait for the
uplink, but for its receiver."""
LOOK_S = 0.1
"""How often that is looked for."""
MOST_OF_UPLINK = 1.5
"""A link is not taken to be faster than the uplink that it goes over by more than this: its rate is measured by the
receiver's clock, that of the uplink by ours."""
_DECODE, _CONTROL = TrafficClass.DECODE, TrafficClass.CONTROL
"""Asked for at every step; by its name, an enumeration finds a member by a call."""


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


class LinkState:
    """Link state: what waits on a link, what is in flight, and what its acknowledgements have shown."""

    __slots__ = (
        "bottleneck",
        "committed",
        "committed_bytes",
        "decode_held",
        "decode_intervals",
        "delay",
        "drains",
        "evidence",
        "expected_s",
        "flight",
        "gain",
        "in_flight_bytes",
        "number",
        "rate",
        "round",
        "round_robin",
        "round_start_s",
        "send_queue",
        "sequence",
        "share",
        "slow_start",
        "slow_start_bytes",
        "stalled",
        "suspended",
    )  # fmt: skip

    def __init__(self, number: int, send_queue: SendQueue, now_s: float) -> None:
        self.number = number
        self.send_queue = send_queue
        self.flight: deque[InFlightChunk] = deque()
        self.in_flight_bytes = 0
        self.sequence = 0
        """Of the last chunk sent."""
        self.rate = RateEstimator()
        self.evidence = LinkEvidence(START_WINDOW_BYTES)
        self.share = LinkShare()
        self.delay = DelayEstimator()
        self.slow_start = SlowStart()
        self.gain = 1.0
        """What is sent at a time, relative to what the estimate allows."""
        self.bottleneck = BottleneckModel()
        self.decode_intervals = DecodeIntervalPredictor()
        self.expected_s = math.inf
        """When the peer predicts the next decode."""
        self.suspended = False
        self.stalled = False
        """Its receiver has not acknowledged for long: what waits on it counts for this link alone."""
        self.slow_start_bytes = START_WINDOW_BYTES
        """The same, grown by everything, as TCP's: for policies that send as TCP does."""
        self.decode_held = False
        """A decode waits because too much is in flight: the decodes ask for more than the link gives."""
        self.committed: QueuedMessage | None = None
        """A message that a policy has decided to send `committed_bytes` more of before anything else."""
        self.committed_bytes = 0
        self.round_robin = RoundRobin()
        """For a policy that serves all at once."""
        self.round = 1
        self.round_start_s = now_s
        self.drains = False
        """In this round trip bulk leaves the queue empty."""

    @property
    def has_bulk(self) -> bool:
        """Whether anything below decode and control waits: what the window holds back."""
        heads = self.send_queue.heads
        return len(heads) > (_DECODE in heads) + (_CONTROL in heads)

    def next_decode_s(self, now_s: float) -> float:
        """When the next decode is expected on this link: as predicted or as learnt, whichever is earlier."""
        learnt_s = self.decode_intervals.next_s(now_s)
        return min(learnt_s, self.expected_s) if self.expected_s >= now_s - PASSED_S else learnt_s

    def idle(self) -> None:
        """Notes that the line may run empty though bulk waits: measurements of that must not lower the rate."""
        if self.flight:
            self.flight[-1].more = False
        else:
            self.rate.idle()


class UplinkState:
    """Uplink state: the links of a process and what they share."""

    def __init__(self) -> None:
        self.links: dict[int, LinkState] = {}
        self.bottleneck = BottleneckModel()
        self.rate = UplinkRate(self.bottleneck)
        self.sent_bytes = 0
        """Over all links."""
        self.fair_shares = FairShareGuard()
        self._looked_s = -math.inf
        self.busy_until_s = -math.inf
        """Until when a policy that sends one thing at a time takes the uplink to be occupied."""
        self.waiting = dict.fromkeys(TrafficClass, 0)
        """For each class, the links on which it waits."""
        self.bulk_links = 0
        """Links on which bulk waits."""
        self.last_bulk: LinkState | None = None
        """The link that sent bulk last."""
        self.decode_s = -math.inf
        """When a decode was last pushed, on any link."""
        self._decoding: dict[int, LinkState] = {}
        self._next_decode_s = math.inf

    def decodes_change(self, link: LinkState) -> None:
        """Invalidates when the next decode is expected: it may have changed on this link."""
        self._decoding[link.number] = link
        self._next_decode_s = -math.inf

    def forget_link(self, link: LinkState) -> None:
        """Removes a link."""
        del self.links[link.number]
        self.rate.forget_link(link.evidence)
        self._decoding.pop(link.number, None)
        self._next_decode_s = -math.inf
        if self.last_bulk is link:
            self.last_bulk = None

    def next_decode_s(self, now_s: float) -> float:
        """When the next decode is expected on any link; infinite when none is."""
        if self._next_decode_s < now_s - PASSED_S:
            expected = [link.next_decode_s(now_s) for link in self._decoding.values() if not link.suspended]
            self._next_decode_s = min(expected, default=math.inf)
        return self._next_decode_s

    def sent(self, link: LinkState, part: Send, now_s: float) -> None:
        """Records a chunk that leaves now: in flight, and in the bottleneck models."""
        link.sequence += 1
        size_bytes, in_flight_bytes = part.size_bytes, link.in_flight_bytes
        rate, uplink_rate = link.rate.bytes_per_s, self.rate.bytes_per_s
        unloaded = not in_flight_bytes or (
            rate is not None and in_flight_bytes <= rate * (link.delay.min_rtt_s or 0.0)
        )
        has_bulk = self.bulk_links > 0 and link.has_bulk
        self.sent_bytes = sent_bytes = self.sent_bytes + size_bytes
        chunk = InFlightChunk(
            link.sequence, size_bytes, sent_bytes, now_s, has_bulk, self.bulk_links, unloaded
        )
        link.flight.append(chunk)
        link.in_flight_bytes = in_flight_bytes + size_bytes
        if rate is not None:
            chunk.on_line = link.bottleneck.record_sent(size_bytes, link.gain * rate, now_s)
        if uplink_rate is not None:
            chunk.on_uplink = self.bottleneck.record_sent(size_bytes, link.gain * uplink_rate, now_s)

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
            if link.flight and not link.stalled and link.has_bulk:
                patience_s = STALLED_S + 2 * link.delay.round_s
                if now_s - link.flight[0].sent_s > patience_s:
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
        """The oldest chunk in flight has arrived, at `at_s` of the receiver's clock if that is known."""
        size_bytes, sent_s, more = chunk.size_bytes, chunk.sent_s, chunk.more
        link.in_flight_bytes -= size_bytes
        link.slow_start_bytes += size_bytes
        if chunk.resent:
            return
        delay = link.delay
        round_s = delay.base_rtt_s
        evidence, sent_bytes = link.evidence, chunk.sent_bytes
        if evidence.rate.record_arrival(now_s, sent_s, sent_bytes - evidence.sent_bytes, more, round_s):
            self.rate.record_measurement(evidence, link.slow_start_bytes, now_s)
        evidence.sent_bytes = sent_bytes
        if at_s is None:
            return
        rate = link.rate.bytes_per_s
        if rate is None:
            self._starts(link, chunk, at_s, now_s)
            return
        known = rate
        if link.rate.record_arrival(at_s, sent_s, size_bytes, more and not chunk.shared, round_s):
            known = self._measured(link, rate)
        delay.timed(at_s, size_bytes, MOST_GAIN * known, now_s)
        # Its own time on the line is not queueing. Taken from the estimate, so it must not weigh much.
        line_s = size_bytes / rate
        if line_s > 2 * LONG_CHUNK_S:
            return
        if line_s > LONG_CHUNK_S:
            line_s = LONG_CHUNK_S
        queueing_s = delay.record_arrival(sent_s, at_s - line_s, now_s, more, chunk.unloaded)
        standing_s = delay.standing_s
        if more:
            most_gain = GROWING_GAIN if link.rate.grows else MOST_GAIN
            part = 1.0 - standing_s / FULL_S
            link.gain = 1.0 + (most_gain - 1.0) * part if part > 0.0 else 1.0
            if self.bulk_links > 1:
                self.fair_shares.report_queue(link.share, standing_s, self.fair_bytes_per_s, now_s)
        if chunk.on_line is not NO_PREDICTION:
            link.bottleneck.record_arrival(
                chunk.on_line, queueing_s, now_s, link.in_flight_bytes / rate, standing_s
            )
        if chunk.on_uplink is not NO_PREDICTION:
            # What a chunk waited on one link's way may not be the uplink's queue: it can only be shorter.
            own_s = size_bytes / (self.rate.bytes_per_s or rate)
            self.bottleneck.record_arrival(chunk.on_uplink, queueing_s, now_s, 0.0, standing_s, own_s)

    def _measured(self, link: LinkState, before: float) -> float:
        """A link was measured by its receiver's stamps; its rate was `before`. Returns what it is now."""
        link.rate.limit(MOST_OF_UPLINK * (self.rate.bytes_per_s or math.inf))
        known = link.rate.bytes_per_s or before
        if known > before:
            link.delay.jitter.forget()
        return known

    def _starts(self, link: LinkState, chunk: InFlightChunk, at_s: float, now_s: float) -> None:
        """A chunk has arrived over a link of unknown rate."""
        delay, more = link.delay, chunk.more
        queueing_s = delay.record_arrival(chunk.sent_s, at_s, now_s, more, chunk.unloaded)
        found = link.slow_start.record_arrival(
            at_s, chunk.size_bytes, queueing_s, more, delay.min_rtt_s or 0.0
        )
        if found is not None:
            link.rate.found(found)
            link.evidence.rate.found(found)
            self.rate.record_measurement(link.evidence, link.slow_start_bytes, now_s)
