"""Which message leaves next, how much of it, and when: ours and its rivals, by name. Pure.

- `molink`: `just_in_time.JustInTime`.
- `paper`: Algorithm 1 of the MoLink transmission paper as printed.
- `fixed-chunk`: the MoLink system paper: decode first, the rest in chunks of a fixed size.
- `concurrent`: what vLLM's connections do: all sessions that wait share the link equally.
- `fifo`: one queue in order of push.
- `zeromq`: Helix's transport, a FIFO of whole messages. Given a socket for each link, as here, that is `fifo`; it has
  its name because benchmarks ask for it, and because over real sockets the rival is another program.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.just_in_time import JustInTime
from molink.peer.wire.transmission.round_robin import RoundRobin
from molink.peer.wire.transmission.send_queue import QueuedMessage
from molink.peer.wire.transmission.state import LinkState, UplinkState
from molink.peer.wire.transmission.values import MAX_CHUNK_BYTES, Send

TCP_QUEUE_S = 0.100
"""The queue that TCP keeps at a bottleneck whose buffer holds so much, as a home router's does."""
RIVAL_CHUNK_BYTES = 64 * 1024
FIXED_CHUNK_BYTES = 256 * 1024
LEAST_CHUNK_BYTES = 4 * 1024
MAX_WAITING_WEIGHT = 30
"""N of Algorithm 1."""
_CONTROL = TrafficClass.CONTROL
"""Asked for at every step; by its name, an enumeration finds a member by a call."""

Decided = tuple[QueuedMessage, int] | float
"""A message and how many bytes of it to send now, or until when to wait (infinite: until something changes)."""


class Policy(Protocol):
    """Transmission policy: decides for one link at a time, knowing all.

    `next` is asked only while something waits on the link.
    """

    USES_DEADLINES: ClassVar[bool]
    """Whether messages of a class leave as they are due (`Outgoing.deadline_s`), not in order of push."""
    USES_FORECASTS: ClassVar[bool]
    """Whether it matters when the next decode is expected (`Uplink.expect_decode`)."""

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None: ...

    def opened(self, link: LinkState, now_s: float) -> None:
        """There is a link more."""

    def closed(self, link: LinkState) -> None:
        """A link is gone: what was remembered of it goes too."""

    def pushed(self, link: LinkState, queued: QueuedMessage) -> None:
        """A message waits on a link."""

    def next(self, link: LinkState, now_s: float) -> Decided:
        """What a link does now."""

    def sent(self, link: LinkState, traffic_class: TrafficClass, part: Send, now_s: float) -> None:
        """What was decided is done."""

    def window_bytes(self, link: LinkState) -> int | None:
        """Bytes in flight up to which lower classes may send."""


class Fifo:
    """First in, first out, with as much in flight as TCP keeps."""

    USES_DEADLINES: ClassVar[bool] = False
    USES_FORECASTS: ClassVar[bool] = False

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None:
        """Nothing to remember."""

    def opened(self, link: LinkState, now_s: float) -> None:
        """Nothing to do."""

    def closed(self, link: LinkState) -> None:
        """Nothing to do."""

    def pushed(self, link: LinkState, queued: QueuedMessage) -> None:
        """Nothing to do."""

    def next(self, link: LinkState, now_s: float) -> Decided:  # noqa: ARG002
        heads = link.send_queue.heads.values()
        queued = min(heads, key=_order) if len(heads) > 1 else next(iter(heads))
        return _within_tcp_window(link, queued, RIVAL_CHUNK_BYTES)

    def sent(self, link: LinkState, traffic_class: TrafficClass, part: Send, now_s: float) -> None:
        """Nothing to do."""

    def window_bytes(self, link: LinkState) -> int | None:
        return _tcp_window_bytes(link)


class Concurrent(Fifo):
    """Concurrent streams: all sessions that wait share the link equally, a chunk each in turn."""

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None:
        super().__init__(uplink, shares)
        self._turns: dict[int, RoundRobin] = {}

    def opened(self, link: LinkState, now_s: float) -> None:  # noqa: ARG002
        self._turns[link.number] = RoundRobin()

    def closed(self, link: LinkState) -> None:
        del self._turns[link.number]

    def pushed(self, link: LinkState, queued: QueuedMessage) -> None:
        self._turns[link.number].push(queued)

    def next(self, link: LinkState, now_s: float) -> Decided:  # noqa: ARG002
        return _within_tcp_window(link, self._turns[link.number].first(), RIVAL_CHUNK_BYTES)

    def sent(self, link: LinkState, traffic_class: TrafficClass, part: Send, now_s: float) -> None:  # noqa: ARG002
        self._turns[link.number].advance()


class FixedChunk:
    """Decode first; the rest in chunks of one size. A transmission occupies the uplink until it has left it at the
    estimated rate, and nothing else begins before."""

    USES_DEADLINES: ClassVar[bool] = False
    USES_FORECASTS: ClassVar[bool] = False

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None:  # noqa: ARG002
        self._uplink = uplink
        self._busy_until_s = -math.inf
        """Until when the uplink is taken to be occupied."""
        self._begun: dict[int, tuple[QueuedMessage, int]] = {}
        """By link, a message and how many bytes more of it are sent before anything else."""

    def opened(self, link: LinkState, now_s: float) -> None:
        """Nothing to do."""

    def closed(self, link: LinkState) -> None:
        self._begun.pop(link.number, None)

    def pushed(self, link: LinkState, queued: QueuedMessage) -> None:
        """Nothing to do."""

    def next(self, link: LinkState, now_s: float) -> Decided:
        if now_s < self._busy_until_s:
            link.idle()
            return self._busy_until_s
        begun = self._begun.get(link.number)
        if begun is None or not begun[1] or not begun[0].left_bytes:
            begun = self._begun[link.number] = self._begin(link, now_s)
        queued, left_bytes = begun
        return _within_tcp_window(link, queued, min(left_bytes, MAX_CHUNK_BYTES))

    def sent(self, link: LinkState, traffic_class: TrafficClass, part: Send, now_s: float) -> None:  # noqa: ARG002
        queued, left_bytes = self._begun[link.number]
        self._begun[link.number] = (queued, left_bytes - part.size_bytes)
        rate = link.line.rate.bytes_per_s
        if rate is not None:
            self._busy_until_s = now_s + part.size_bytes / rate

    def window_bytes(self, link: LinkState) -> int | None:
        return _tcp_window_bytes(link)

    def _begin(self, link: LinkState, now_s: float) -> tuple[QueuedMessage, int]:  # noqa: ARG002
        """The next transmission: a message, and how much of it."""
        urgent, bulk = _two_queues(link)
        if bulk is None or urgent is not None:
            return _all_of(urgent)
        return bulk, FIXED_CHUNK_BYTES


class Paper(FixedChunk):
    """Algorithm 1: decode first until it has gone ahead of a waiting prefill N times, then the whole remainder of that
    prefill in one transmission; else as much of it as leaves before the next decode (section 4.2)."""

    USES_FORECASTS: ClassVar[bool] = True

    def __init__(self, uplink: UplinkState, shares: Mapping[TrafficClass, float]) -> None:
        super().__init__(uplink, shares)
        self._waiting_weight = 0

    def _begin(self, link: LinkState, now_s: float) -> tuple[QueuedMessage, int]:
        decode, prefill = _two_queues(link)
        # As printed, nothing is sent when the weight is reached and the prefill is gone: it was cancelled.
        if prefill is None or (decode is not None and self._waiting_weight < MAX_WAITING_WEIGHT):
            self._waiting_weight += prefill is not None
            return _all_of(decode)
        size_bytes = prefill.left_bytes
        if self._waiting_weight < MAX_WAITING_WEIGHT:
            size_bytes = min(size_bytes, self._just_in_time_bytes(link, now_s))
        self._waiting_weight = 0
        return prefill, size_bytes

    def _just_in_time_bytes(self, link: LinkState, now_s: float) -> int:
        """T_a times the bandwidth; everything when no decode is predicted."""
        available_s = self._uplink.decodes.next_s(now_s) - now_s
        rate = link.line.rate.bytes_per_s
        if rate is None:
            return RIVAL_CHUNK_BYTES
        if available_s == math.inf:
            return 1 << 62
        return max(LEAST_CHUNK_BYTES, int(available_s * rate))


def _all_of(queued: QueuedMessage | None) -> tuple[QueuedMessage, int]:
    if queued is None:
        raise AssertionError("asked while nothing waits")
    return queued, queued.left_bytes


def _order(queued: QueuedMessage) -> int:
    return queued.order


def _two_queues(link: LinkState) -> tuple[QueuedMessage | None, QueuedMessage | None]:
    """The first message of decode or control, and the first of all others."""
    heads = link.send_queue.heads
    if len(heads) == 1:
        [(only, queued)] = heads.items()
        return (queued, None) if only <= _CONTROL else (None, queued)
    urgent = bulk = None
    for one, queued in heads.items():
        if one <= _CONTROL:
            urgent = queued if urgent is None else min(urgent, queued, key=_order)
        else:
            bulk = queued if bulk is None else min(bulk, queued, key=_order)
    return urgent, bulk


def _tcp_window_bytes(link: LinkState) -> int | None:
    """What TCP keeps in flight: what the way holds, and the queue at the bottleneck."""
    rate = link.line.rate.bytes_per_s
    return None if rate is None else int(rate * (link.line.delay.base_rtt_s + TCP_QUEUE_S))


def _within_tcp_window(link: LinkState, queued: QueuedMessage, chunk_bytes: int) -> Decided:
    left_bytes, in_flight_bytes = queued.left_bytes, link.flight.size_bytes
    size_bytes = left_bytes if left_bytes < chunk_bytes else chunk_bytes
    if in_flight_bytes:
        rate = link.line.rate.bytes_per_s
        window_bytes = 0 if rate is None else int(rate * (link.line.delay.base_rtt_s + TCP_QUEUE_S))
        if in_flight_bytes + size_bytes > (window_bytes or link.acked_bytes):
            return math.inf
    return queued, size_bytes


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "molink": JustInTime,
        "paper": Paper,
        "fixed-chunk": FixedChunk,
        "concurrent": Concurrent,
        "fifo": Fifo,
        "zeromq": Fifo,
    }
)
