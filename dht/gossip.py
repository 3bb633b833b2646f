"""Announcements flood over links: a stream to each of a few neighbours, each new record passed on once.

libp2p's gossipsub is not used. Its implementation in py-libp2p 0.8.1 adds a signed record of some 200 bytes
to every message, more than the state itself, and one message that does not parse, from anybody, ends the
whole host. Records carry their own signatures here, and the directory, which takes each once, ends the flood.
"""

import logging
from collections import deque
from collections.abc import Callable

import trio

from molink.dht.announcement import MAX_FACTS_BYTES, AnnouncementError, Reason, is_facts, state_tag
from molink.dht.directory import Accepted
from molink.dht.framing import FrameStream, StreamEndedError
from molink.dht.membership import Membership
from molink.dht.timing import DiscoveryTiming
from molink.dht.traffic import Traffic

logger = logging.getLogger(__name__)

PROTOCOL = "/molink/gossip/1"
MAX_LINKS = 12
_QUEUE = 256
_BATCH = 64
_MAX_RECORDS_PER_S = 100
_MAX_STRIKES = 32
_STRIKES = frozenset((Reason.MALFORMED, Reason.FORGED, Reason.OVERSIZED))


class GossipLink:
    """One neighbour, and what waits to be sent to it. A full queue loses its oldest."""

    def __init__(self, stream: FrameStream, *, dialled: bool) -> None:
        self.stream = stream
        self.dialled = dialled
        self.scope = trio.CancelScope()
        self._queue: deque[bytes] = deque(maxlen=_QUEUE)
        self._ready = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def put(self, record: bytes) -> None:
        self._queue.append(record)
        if self._idle.is_set():
            self._idle = trio.Event()
        self._ready.set()

    async def take(self, keepalive_s: float) -> list[bytes]:
        """What waits, at most 64 records; an empty frame if nothing does for so long."""
        with trio.move_on_after(keepalive_s):
            await self._ready.wait()
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        if not self._queue:
            self._ready = trio.Event()
        return batch or [b""]

    def sent(self) -> None:
        if not self._queue:
            self._idle.set()

    async def drained(self) -> None:
        """Waits until everything put so far has been written."""
        await self._idle.wait()


class Gossip:
    """The links of one peer.

    `facts_wanted(peer_id, tag)`: that neighbour has spoken of a peer without known facts. `link_opened()`:
    there is a new link, and beyond it maybe a part of the swarm that was cut off.
    """

    def __init__(
        self,
        own_peer_id: str,
        membership: Membership,
        timing: DiscoveryTiming,
        traffic: Traffic,
        facts_wanted: Callable[[str, int], None],
        link_opened: Callable[[], None],
    ) -> None:
        self._own_peer_id = own_peer_id
        self._membership = membership
        self._timing = timing
        self._traffic = traffic
        self._facts_wanted = facts_wanted
        self._link_opened = link_opened
        self._links: dict[str, GossipLink] = {}

    @property
    def neighbours(self) -> tuple[str, ...]:
        return tuple(self._links)

    def broadcast(self, record: bytes, *, but: str | None = None) -> None:
        """Sends to every neighbour but one."""
        for peer_id, link in self._links.items():
            if peer_id != but:
                link.put(record)

    async def drained(self) -> None:
        """Waits until everything broadcast so far has been written to every link."""
        for link in tuple(self._links.values()):
            await link.drained()

    async def run_link(self, stream: FrameStream, *, dialled: bool) -> None:
        """Keeps a link to the stream's peer until it ends, and resets the stream then."""
        link = GossipLink(stream, dialled=dialled)
        if not self._admit(link):
            await stream.reset()
            return
        for record in self._membership.own_records():
            link.put(record)
        self._link_opened()
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, link, nursery.cancel_scope)
                    await self._receive(link)
                    nursery.cancel_scope.cancel()
        finally:
            if self._links.get(stream.peer_id) is link:
                del self._links[stream.peer_id]
            await stream.reset()

    def _admit(self, link: GossipLink) -> bool:
        """Both ends keep the same one of two links: the smaller id's, or one dialler's newer one."""
        peer_id = link.stream.peer_id
        old = self._links.get(peer_id)
        if peer_id == self._own_peer_id or (
            old is None and not link.dialled and len(self._links) >= MAX_LINKS
        ):
            return False
        if old is not None:
            dialler = self._own_peer_id if link.dialled else peer_id
            if old.dialled != link.dialled and dialler != min(peer_id, self._own_peer_id):
                return False
            old.scope.cancel()
        self._links[peer_id] = link
        return True

    async def _send(self, link: GossipLink, scope: trio.CancelScope) -> None:
        try:
            while True:
                batch = await link.take(self._timing.keepalive_s)
                with trio.fail_after(self._timing.silence_s):
                    await link.stream.send(batch)
                link.sent()
                self._traffic.sent("gossip", sum(map(len, batch)) + 2 * len(batch), len(batch))
        except (StreamEndedError, trio.TooSlowError) as error:
            logger.debug("the link to %s ended: %s", link.stream.peer_id, error)
            scope.cancel()

    async def _receive(self, link: GossipLink) -> None:
        strikes = received = 0
        since = trio.current_time()
        try:
            while strikes < _MAX_STRIKES:
                with trio.fail_after(self._timing.silence_s):
                    record = await link.stream.receive(MAX_FACTS_BYTES)
                self._traffic.received("gossip", len(record) + 2)
                if not record:
                    continue
                strikes += self._take_in(record, link.stream.peer_id)
                received += 1
                if received == _MAX_RECORDS_PER_S:  # who floods is read at this rate, and blocks itself
                    await trio.sleep_until(since + 1.0)
                    received, since = 0, trio.current_time()
            logger.info(
                "%s sends what is not true or not an announcement: not listened to", link.stream.peer_id
            )
        except (StreamEndedError, trio.TooSlowError) as error:
            logger.debug("the link to %s ended: %s", link.stream.peer_id, error)

    def _take_in(self, record: bytes, peer_id: str) -> bool:
        """Returns whether the record should not have been sent by an honest neighbour."""
        outcome = self._membership.receive(record)
        if isinstance(outcome, Accepted):
            self.broadcast(record, but=peer_id)
        wanted = outcome.facts_wanted if isinstance(outcome, Accepted) else outcome is Reason.UNKNOWN_PEER
        if wanted and not is_facts(record):
            try:
                self._facts_wanted(peer_id, state_tag(record))
            except AnnouncementError:
                return True
        return outcome in _STRIKES
