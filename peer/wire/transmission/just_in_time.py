"""Just-in-time policy: decode never waits for bulk, and bulk leaves no gap. Pure.

Decode and control leave at once; only a bound on memory holds them back. Bulk keeps in flight what the way holds plus
a small allowed delay, so that it queues here, where a decode overtakes it, and not at the bottleneck. The allowed
delay shrinks before a predicted decode (the MoLink transmission paper's just-in-time chunk, section 4.2: what is put
on the line must have left it by then) and is larger while none is near. Where the paper stops a decode for the whole
remainder of a prefill after 30 decodes, each class here has a share of the bytes (`shares.ByteShares`).

Every chunk costs both ends processor time, whatever its size: chunks are longer while nobody decodes.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from molink.peer.wire.estimation.estimator import DelayEstimator
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.line_model import CHUNK_S, LONG_CHUNK_S
from molink.peer.wire.transmission.send_queue import QueuedMessage
from molink.peer.wire.transmission.state import LinkState, UplinkState
from molink.peer.wire.transmission.values import MAX_CHUNK_BYTES, Send
from molink.peer.wire.transmission.weighted_fair_queue import WeightedFairQueue

ALLOWED_S = 0.006
"""Queue that bulk keeps at the bottleneck when nothing is known of the next decode: two chunks."""
ALLOWED_FAR_S = 0.010
"""The same while a decode is known to be further away than that."""
ALLOWED_LULL_S = 0.016
"""The same while nobody decodes."""
ALLOWED_NEAR_S = 0.002
"""The same while a decode is expected at any moment: the link must not run dry for a guess."""
LULL_S = 1.0
"""Nobody decodes when no decode was sent for so long, on any link, and none is predicted."""
OWED_S = 0.020
"""Queue up to which a class may send that has not had its share of the bytes."""
DECODE_S = 0.060
"""Queue up to which decode may send; beyond it decodes ask for more than the link gives, and shares decide."""
LEAST_DECODE_BYTES = 512 * 1024
MOST_DECODE_BYTES = 8 * 1024 * 1024
"""In flight, while nothing is estimated: a receiver that does not read cannot make memory grow."""
MOST_IN_FLIGHT_BYTES = 24 * 1024 * 1024
"""The same whatever is estimated: 1 Gbit/s over 190 ms there and back, and less than what may be unacknowledged."""
CREDIT_LIMIT_BYTES = 1024 * 1024
LEAST_CHUNK_BYTES = 1024
LEAST_CHUNK_S = 0.0018
"""Where the allowed queue is too short for whole chunks, one that occupies the line for so long may go."""
FIRST_CHUNK_BYTES = 16 * 1024
"""Until the bandwidth is known."""
EXCESS_GAIN = 0.5
"""Part of a queue beyond the allowed one that is taken off the window: 1 would swing, acks being a round trip late."""
LEAST_ROUND_S = 0.010
ROUNDS = 64
"""In one round trip of so many bulk leaves the queue empty, so that the least delay is seen."""
JITTER_ROUNDS = 16
"""The same where there is jitter: what is waited without a queue is to be seen too."""
UNTIMED_ROUND = 4
"""In one round trip of so many no decode is waited for: the link is kept busy, and its rate seen. Among the
measurements that count there are two such round trips."""
_RETRY_S = 0.001
_DECODE, _CONTROL = TrafficClass.DECODE, TrafficClass.CONTROL
"""Asked for at every step; by its name, an enumeration finds a member by a call."""


class LinkWindow:
    """What the policy remembers of one link: its round trips, and what its window holds back."""

    __slots__ = ("_round_start_s", "decode_held", "drains", "round")

    def __init__(self, now_s: float) -> None:
        self.decode_held = False
        """A decode waits because too much is in flight: the decodes ask for more than the link gives."""
        self.round = 1
        self.drains = False
        """In this round trip bulk leaves the queue empty."""
        self._round_start_s = now_s

    def advance(self, delay: DelayEstimator, now_s: float) -> None:
        """Begins the next round trip, if this one is over."""
        passed_s = now_s - self._round_start_s
        if passed_s > LEAST_ROUND_S and passed_s > delay.round_s:
            self.round += 1
            self._round_start_s = now_s
            self.drains = self.round % (JITTER_ROUNDS if delay.jitter.spread_s else ROUNDS) == 0


class JustInTime:
    """Just-in-time policy: one weighted fair queue over the uplink, a window for each link."""

    USES_DEADLINES: ClassVar[bool] = True
    USES_FORECASTS: ClassVar[bool] = True

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None:
        self._uplink = uplink
        self._shares = WeightedFairQueue(shares, CREDIT_LIMIT_BYTES)
        self._windows: dict[int, LinkWindow] = {}
        self._last_bulk: LinkState | None = None
        """The link that sent bulk last."""

    def opened(self, link: LinkState, now_s: float) -> None:
        self._windows[link.number] = LinkWindow(now_s)

    def closed(self, link: LinkState) -> None:
        del self._windows[link.number]
        if self._last_bulk is link:
            self._last_bulk = None

    def pushed(self, link: LinkState, queued: QueuedMessage) -> None:
        """Nothing to do."""

    def sent(self, link: LinkState, traffic_class: TrafficClass, part: Send, now_s: float) -> None:
        uplink = self._uplink
        if traffic_class > _CONTROL:
            self._last_bulk = link
            if uplink.bulk_links > 1:
                link.share.record_sent(part.size_bytes, now_s)
        if uplink.bulk_links or uplink.waiting[_CONTROL]:
            waiting = [one for one, links in uplink.waiting.items() if links or one is traffic_class]
            self._shares.charge(traffic_class, part.size_bytes, waiting)

    def window_bytes(self, link: LinkState) -> int | None:
        rate = link.line.rate.bytes_per_s
        return None if rate is None else int(rate * (link.line.delay.round_s + ALLOWED_S))

    def next(self, link: LinkState, now_s: float) -> tuple[QueuedMessage, int] | float:
        heads = link.send_queue.heads
        if len(heads) == 1:
            [(only, queued)] = heads.items()
            if only > _CONTROL:
                nobody_decodes = self._nobody_decodes(now_s)
                chunk_bytes = self._chunk_bytes(link, self._chunk_s(nobody_decodes))
                left_bytes = queued.left_bytes
                size_bytes = left_bytes if left_bytes < chunk_bytes else chunk_bytes
                return self._bulk(link, queued, size_bytes, nobody_decodes, now_s)
        urgent = heads.get(_DECODE) or heads.get(_CONTROL)
        urgent_bytes = 0
        if urgent is not None:
            urgent_bytes = min(urgent.left_bytes, MAX_CHUNK_BYTES)
            window, in_flight_bytes = self._windows[link.number], link.flight.size_bytes
            if in_flight_bytes and in_flight_bytes + urgent_bytes > self._decode_limit(link):
                window.decode_held = True
                return math.inf
            if len(heads) == 1:
                window.decode_held = False
                return urgent, urgent_bytes
            if _DECODE not in heads:
                window.decode_held = False
        nobody_decodes = self._nobody_decodes(now_s)
        chunk_bytes = self._chunk_bytes(link, self._chunk_s(nobody_decodes))
        sizes = {
            one: min(queued.left_bytes, MAX_CHUNK_BYTES if one <= _CONTROL else chunk_bytes)
            for one, queued in heads.items()
        }
        chosen = self._shares.choose(sizes)
        if chosen <= _CONTROL:
            return heads[chosen], sizes[chosen]
        decided = self._bulk(link, heads[chosen], sizes[chosen], nobody_decodes, now_s)
        if urgent is not None and isinstance(decided, float):
            return urgent, urgent_bytes
        return decided

    def _decode_limit(self, link: LinkState) -> float:
        rate = link.line.rate.bytes_per_s
        if rate is None:
            return MOST_DECODE_BYTES
        held_bytes = rate * (link.line.delay.round_s + DECODE_S)
        return min(max(held_bytes, LEAST_DECODE_BYTES), MOST_IN_FLIGHT_BYTES)

    def _chunk_s(self, nobody_decodes: bool) -> float:
        """How long a chunk may occupy the line. Links that take turns take short ones."""
        return LONG_CHUNK_S if nobody_decodes and self._uplink.bulk_links <= 1 else CHUNK_S

    def _nobody_decodes(self, now_s: float) -> bool:
        decodes = self._uplink.decodes
        return now_s - decodes.pushed_s > LULL_S and decodes.next_s(now_s) == math.inf

    def _chunk_bytes(self, link: LinkState, chunk_s: float = CHUNK_S) -> int:
        rate = link.line.rate.bytes_per_s
        if rate is None:
            return FIRST_CHUNK_BYTES
        size_bytes = int(rate * chunk_s)
        if size_bytes >= MAX_CHUNK_BYTES:
            return MAX_CHUNK_BYTES
        return size_bytes if size_bytes > LEAST_CHUNK_BYTES else LEAST_CHUNK_BYTES

    def _bulk(
        self, link: LinkState, queued: QueuedMessage, size_bytes: int, nobody_decodes: bool, now_s: float
    ) -> tuple[QueuedMessage, int] | float:
        """Sends a chunk of bulk, a smaller one, or waits."""
        uplink, line, in_flight_bytes = self._uplink, link.line, link.flight.size_bytes
        if uplink.bulk_links > 1:
            uplink.look(now_s)
            wait_s = uplink.fair_shares.wait_s(link.share, uplink.fair_bytes_per_s, now_s)
            if wait_s and in_flight_bytes:
                return now_s + wait_s
        rate = line.rate.bytes_per_s
        if rate is None:
            fits = not in_flight_bytes or in_flight_bytes + size_bytes <= line.slow_start.window_bytes
            fits = fits or self._shares.pays(queued.outgoing.traffic_class, size_bytes)
            return (queued, size_bytes) if fits else math.inf
        window = self._windows[link.number]
        if self._shares.pays(queued.outgoing.traffic_class, size_bytes):
            allowed_s = DECODE_S if window.decode_held else OWED_S
        else:
            window.advance(line.delay, now_s)
            allowed_s = self._allowed_s(window, nobody_decodes, now_s)
        room_bytes, grows_bytes_per_s = self._room_bytes(link, rate, allowed_s, window.drains, now_s)
        if room_bytes >= size_bytes:
            return queued, size_bytes
        least_bytes = size_bytes
        if allowed_s < ALLOWED_S or uplink.bulk_links > 1:
            least_bytes = min(size_bytes, max(LEAST_CHUNK_BYTES, int(rate * LEAST_CHUNK_S)))
        if room_bytes >= least_bytes:
            return queued, int(room_bytes)
        if not in_flight_bytes and not uplink.bottleneck.queued_s(now_s):
            return queued, least_bytes
        if not grows_bytes_per_s:
            grows_bytes_per_s = 0.0 if in_flight_bytes else rate
        wait_s = (least_bytes - room_bytes) / grows_bytes_per_s if grows_bytes_per_s else math.inf
        return now_s + max(_RETRY_S, wait_s)

    def _allowed_s(self, window: LinkWindow, nobody_decodes: bool, now_s: float) -> float:
        """How long a queue bulk may make now."""
        if window.drains:
            return ALLOWED_NEAR_S
        if nobody_decodes:
            return ALLOWED_LULL_S
        next_s = self._uplink.decodes.next_s(now_s)
        if next_s == math.inf or window.round % UNTIMED_ROUND == 1:
            return ALLOWED_S
        away_s = next_s - now_s
        return ALLOWED_NEAR_S if away_s < ALLOWED_NEAR_S else min(away_s, ALLOWED_FAR_S)

    def _room_bytes(
        self, link: LinkState, rate: float, allowed_s: float, drains: bool, now_s: float
    ) -> tuple[float, float]:
        """What may be sent now so that no queue on the way gets longer than allowed, below 0 when one is; and by how
        many bytes a second that grows: 0 where only what arrives makes room."""
        line, uplink = link.line, self._uplink
        delay = line.delay
        rate *= line.gain
        excess_s = delay.standing_s - allowed_s - ALLOWED_S
        held_s = delay.min_rtt_s or 0.0 if drains else delay.round_s
        window_s = held_s + allowed_s - (EXCESS_GAIN * excess_s if excess_s > 0.0 else 0.0)
        room_bytes, grows_bytes_per_s = rate * window_s - link.flight.size_bytes, 0.0
        line_room_bytes = rate * (allowed_s - line.bottleneck.queued_s(now_s))
        if line_room_bytes < room_bytes:
            room_bytes, grows_bytes_per_s = line_room_bytes, rate
        uplink_rate = uplink.rate.bytes_per_s
        if uplink_rate is not None:
            uplink_rate *= line.gain
            uplink_room_bytes = uplink_rate * (allowed_s - uplink.bottleneck.queued_s(now_s))
            if self._last_bulk is link and uplink.bulk_links > 1:
                # Others' turn, if they can use it.
                uplink_room_bytes -= self._chunk_bytes(link)
            if uplink_room_bytes < room_bytes:
                room_bytes, grows_bytes_per_s = uplink_room_bytes, uplink_rate
        return room_bytes, grows_bytes_per_s
