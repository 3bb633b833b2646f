"""Packet scheduler of a process: decides what leaves next, over all of its links. Pure: no clock, no socket.

All links of a process share one uplink, so one scheduler decides for all of them; how is the policy's
(`policies.POLICIES`). Decides and charges: what `next` answers is taken as sent.
"""

import math
from collections.abc import Mapping, Sequence

from molink.peer.wire.transmission.classes import DEFAULT_SHARES, TrafficClass
from molink.peer.wire.transmission.policies import POLICIES
from molink.peer.wire.transmission.send_queue import QueuedMessage, SendQueue
from molink.peer.wire.transmission.state import LinkState, UplinkState
from molink.peer.wire.transmission.values import AckArrival, AckError, LinkEstimate, Outgoing, Send, Wait

FOREVER = Wait(math.inf)
_SOONEST_S = 0.0002
"""Nobody is asked to come back sooner: timers are not finer, and a writer must not spin."""
_DECODE, _CONTROL = TrafficClass.DECODE, TrafficClass.CONTROL
"""Asked for with every message; by its name, an enumeration finds a member by a call."""


class Uplink:
    """Packet scheduler of one process. Calls come in order of time, from one thread.

    A link is known by a number of the caller's choice. Methods that are given one raise KeyError for a link that is
    not open.
    """

    def __init__(
        self,
        policy: str = "molink",
        shares: Mapping[TrafficClass, float] = DEFAULT_SHARES,
        limit_bytes: int = 64 * 1024 * 1024,
        limit_messages: int = 4096,
    ) -> None:
        """The limits are of what waits on one link.

        Raises:
            ValueError: no such policy, or shares that cannot be kept.
        """
        if policy not in POLICIES:
            raise ValueError(f"no transmission policy {policy!r}; there are {', '.join(POLICIES)}")
        self._state = UplinkState()
        self._policy = POLICIES[policy](self._state, shares)
        self.uses_deadlines = self._policy.USES_DEADLINES
        """Whether messages of a class leave as they are due, not in order of push."""
        self.uses_forecasts = self._policy.USES_FORECASTS
        """Whether it matters when the next decode is expected (`expect_decode`)."""
        self._limits = (limit_bytes, limit_messages)
        self._told_to_wait: set[int] = set()
        self._awake: set[int] = set()

    @property
    def uplink_bytes_per_s(self) -> float | None:
        """The rate of the uplink, measured over all links; None until bulk was sent."""
        return self._state.rate.bytes_per_s

    def links_waiting(self, traffic_class: TrafficClass | None = None) -> int:
        """On how many links, but for those that stall, messages of the class wait, or bulk of any class."""
        return self._state.bulk_links if traffic_class is None else self._state.waiting[traffic_class]

    def waiting(self, link: int) -> tuple[int, int]:
        """Messages that wait on a link, and what of them has not left in bytes."""
        queue = self._state.links[link].send_queue
        return len(queue), queue.queued_bytes

    def open(self, link: int, now_s: float) -> None:
        """Adds a link.

        Raises:
            ValueError: it is open already.
        """
        if link in self._state.links:
            raise ValueError(f"link {link} is open already")
        state = self._state.links[link] = LinkState(link, SendQueue(*self._limits))
        self._policy.opened(state, now_s)

    def close(self, link: int) -> None:
        """Forgets a link and all that waits on it."""
        state = self._state.links[link]
        for queued in state.send_queue.all_messages():
            self._drop(state, queued)
        self._state.forget_link(state)
        self._policy.closed(state)
        self._told_to_wait.discard(link)
        self._awake.discard(link)
        self._wake_bulk()

    def push(self, link: int, outgoing: Outgoing, now_s: float) -> bool:
        """Queues a message. False, and nothing queued, when there is no room for it.

        Raises:
            ValueError: the message is empty.
        """
        state = self._state.links[link]
        traffic_class = outgoing.traffic_class
        queued = self._queue(state, outgoing, now_s)
        if queued is None:
            return False
        if traffic_class is _DECODE:
            self._state.decodes.record_push(state, outgoing.sessions, now_s)
        self._policy.pushed(state, queued)
        self._wake(link)
        return True

    def next(self, link: int, now_s: float) -> Send | Wait:
        """Returns what a link sends now, or until when it waits.

        A Send is charged: the caller writes exactly that, as one chunk under the link's next sequence number (from 1).
        """
        uplink = self._state
        state = uplink.links[link]
        if state.suspended or not state.send_queue.heads:
            self._told_to_wait.add(link)
            return FOREVER
        decided = self._policy.next(state, now_s)
        if isinstance(decided, float):
            self._told_to_wait.add(link)
            if decided == math.inf:
                return FOREVER
            soonest_s = now_s + _SOONEST_S
            return Wait(decided if decided > soonest_s else soonest_s)
        queued, size_bytes = decided
        part = state.send_queue.take_chunk(queued, size_bytes)
        if part.last:
            self._forget(state, queued)
        uplink.sent(state, part, now_s)
        self._policy.sent(state, queued.outgoing.traffic_class, part, now_s)
        return part

    def acked(self, link: int, sequence: int, arrivals: Sequence[AckArrival], now_s: float) -> None:
        """Acknowledges all chunks up to `sequence`; `arrivals` says when, for as many as it names.

        Raises:
            AckError: a chunk that was never sent.
        """
        state = self._state.links[link]
        flight, acked = state.flight, self._state.acked
        if sequence > flight.sequence:
            raise AckError(f"chunk {sequence} is acknowledged, {flight.sequence} was the last sent")
        stamps = {arrived: at_s for arrived, at_s in arrivals if math.isfinite(at_s)}
        if state.stalled:
            self._state.stalls(state, False)
        chunks = flight.chunks
        while chunks and chunks[0].sequence <= sequence:
            chunk = flight.take_first()
            acked(state, chunk, stamps.get(chunk.sequence), now_s)
        if state.send_queue.heads:
            self._wake(link)

    def cancel(self, session: bytes, now_s: float) -> tuple[tuple[int, int], ...]:  # noqa: ARG002
        """Drops what waits for a session, where no other session waits for it too.

        Returns (link, message) of those dropped, whether they were sent in part or not at all.
        """
        dropped = []
        for state in self._state.links.values():
            for queued in state.send_queue.cancel_session(session):
                dropped.append((state.number, queued.outgoing.number))
                self._drop(state, queued)
                self._wake(state.number)
        return tuple(dropped)

    def suspend(self, link: int, now_s: float) -> None:  # noqa: ARG002
        """Suspends a link whose connection broke: nothing is sent until `resume`."""
        self._state.links[link].suspended = True
        self._wake_bulk()

    def resume(self, link: int, received: int, now_s: float) -> None:
        """Resumes a link over a new connection, of whose chunks those up to `received` had arrived. The caller sends
        the others again before it asks for more; they are in flight from now.

        Raises:
            AckError: `received` was never sent.
        """
        state = self._state.links[link]
        self.acked(link, received, (), now_s)
        state.flight.resend(now_s)
        state.line.rate.forget_start()
        state.suspended = False
        self._wake(link)

    def expect_decode(self, link: int, at_s: float | None) -> None:
        """Sets when the next decode is predicted on a link; holds until the next one is pushed. None: not known."""
        state = self._state.links[link]
        self._state.decodes.expect(state, math.inf if at_s is None else at_s)
        if self._state.bulk_links:
            self._wake_bulk()

    def estimate(self, link: int) -> LinkEstimate:
        """Returns the estimate of a link's bandwidth, delay and window."""
        state = self._state.links[link]
        return LinkEstimate(
            bandwidth_bytes_per_s=state.line.rate.bytes_per_s,
            min_rtt_s=state.line.delay.min_rtt_s,
            queueing_s=state.line.delay.queueing_s,
            in_flight_bytes=state.flight.size_bytes,
            window_bytes=self._policy.window_bytes(state),
        )

    def wake(self) -> tuple[int, ...]:
        """Links that were told to wait and whose answer may have changed since. Names each once."""
        if not self._awake:
            return ()
        awake = tuple(self._awake)
        self._awake.clear()
        return awake

    def _wake(self, link: int) -> None:
        if link in self._told_to_wait:
            self._told_to_wait.discard(link)
            self._awake.add(link)

    def _wake_bulk(self) -> None:
        """Wakes the links with bulk: what held it back on the uplink may have gone."""
        for link in tuple(self._told_to_wait):
            if self._state.links[link].send_queue.heads:
                self._wake(link)

    def _queue(self, state: LinkState, outgoing: Outgoing, now_s: float) -> QueuedMessage | None:
        traffic_class = outgoing.traffic_class
        is_new = traffic_class not in state.send_queue.heads
        is_first_bulk = is_new and traffic_class > _CONTROL and not state.has_bulk
        queued = state.send_queue.push(outgoing)
        if queued is not None and is_new:
            if not state.stalled:
                self._state.waiting[traffic_class] += 1
            if is_first_bulk:
                self._state.count_bulk(state, 1)
                self._state.rate.bulk_begins(state.evidence, now_s)
        return queued

    def _drop(self, state: LinkState, queued: QueuedMessage) -> None:
        state.send_queue.drop_message(queued)
        self._forget(state, queued)

    def _forget(self, state: LinkState, queued: QueuedMessage) -> None:
        """Forgets a message of which nothing waits any more."""
        traffic_class = queued.outgoing.traffic_class
        if traffic_class not in state.send_queue.heads:
            if not state.stalled:
                self._state.waiting[traffic_class] -= 1
            if traffic_class > _CONTROL and not state.has_bulk:
                self._state.count_bulk(state, -1)
                state.evidence.is_busy = False
