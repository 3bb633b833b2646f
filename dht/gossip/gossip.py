"""Gossip of announcements: a stream to each of a few neighbours, each new record forwarded once.

Where there is little to say, records are pushed over every link; otherwise their ids are announced, and they are
sent to the neighbour that asks (`spreading.py`). A frame is a record, or `IHAVE` or `IWANT` and ids, or empty: a sign
of life.

libp2p's gossipsub is not used. Its implementation in py-libp2p 0.8.1 adds a signed record of some 200 bytes
to every message, more than the state itself, and one message that does not parse, from anybody, ends the
whole host. Records carry their own signatures here, and the directory, which takes each once, ends the flood.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from molink.dht.gossip.spreading import MAX_RECORD_IDS, LazyPush, parse_record_ids
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import StreamEndedError
from molink.dht.membership.directory import Accepted
from molink.dht.membership.membership import Membership
from molink.dht.membership.neighbours import MAX_INCOMING, Neighbour, to_make_room
from molink.dht.membership.timing import (
    FACTS_COST_BITS,
    LOSS_COST_BITS,
    NEWS_BUDGET_BITS_PER_S,
    STATE_COST_BITS,
    DiscoveryTiming,
    NewsRate,
    ihave_interval_s,
    ihave_slowdown,
)
from molink.dht.records.announcement import (
    MAX_FACTS_BYTES,
    AnnouncementError,
    Reason,
    is_facts,
    is_loss,
    is_state,
    state_tag,
)
from molink.dht.refusals import RefusalLog

logger = logging.getLogger(__name__)

PROTOCOL = "/molink/gossip/2"
IHAVE, IWANT = b"\x0f", b"\xa5"
HEAR_OUT_S = 2.0
"""Within which a peer that gets no link may say what it is."""
CROSSING_DIALS = 2
"""Two links that both ends have dialled cross if no more than so many times the longest dial lies between them. Later
nobody dials a neighbour, unless it has no link any more: it has been started again, or its end has noticed a loss."""
_QUEUE = 256
_BATCH = 64
_MAX_RECORDS_PER_S = 100
_MAX_STRIKES = 32
_MOST_ROUNDS = 2
"""Of announcements, that what can wait takes part in one of, where this peer has sent much of late."""
_STRIKES = frozenset((Reason.MALFORMED, Reason.FORGED, Reason.OVERSIZED))


class GossipLink:
    """Gossip link to one neighbour, and its bounded queue: a full one loses its oldest record."""

    def __init__(self, stream: CompressedStream, network: str, now: float, *, dialled: bool) -> None:
        self.stream = stream
        self.dialled = dialled
        self.neighbour = Neighbour(stream.peer_id, network, now, now)
        self.turn_at = self.announced_at = now
        """When it had its last turn to be told ids, and the last in which it was told all that waited."""
        self.scope = trio.CancelScope()
        self._queue: deque[bytes] = deque(maxlen=_QUEUE)
        self._ready = trio.Event()
        self._idle = trio.Event()
        self._idle.set()

    def mark_useful(self, now: float) -> None:
        """Marks the link as useful: something true and new has come over it."""
        self.neighbour = replace(self.neighbour, useful_at=now)

    def take_turn(self, now: float, spacing_s: float) -> bool:
        """Takes a turn to be told ids. Returns whether these are all that wait, as they are once in so many seconds."""
        self.turn_at = now
        if now < self.announced_at + spacing_s:
            return False
        self.announced_at = now
        return True

    def enqueue(self, record: bytes) -> None:
        self._queue.append(record)
        if self._idle.is_set():
            self._idle = trio.Event()
        self._ready.set()

    async def next_batch(self, keepalive_s: float) -> list[bytes]:
        """Takes the next batch, at most 64 records; an empty frame if nothing waits for `keepalive_s`."""
        with trio.move_on_after(keepalive_s):
            await self._ready.wait()
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        if not self._queue:
            self._ready = trio.Event()
        return batch or [b""]

    def mark_sent(self) -> None:
        if not self._queue:
            self._idle.set()

    async def drained(self) -> None:
        """Waits until everything put so far has been written."""
        await self._idle.wait()


@dataclass(frozen=True, slots=True)
class GossipObserver:
    """Observer of a peer's gossip: what is called when something happens that others act on."""

    facts_wanted: Callable[[str, int], None]
    """With peer id and tag: that neighbour has spoken of a peer without known facts."""
    link_opened: Callable[[], None]
    """There is a new link, and beyond it maybe a part of the swarm that was cut off."""
    link_lost: Callable[[str], None]
    """With peer id: there is no link any more to that peer."""


class Gossip:
    """Gossip of one peer over its links."""

    def __init__(
        self,
        own_peer_id: str,
        membership: Membership,
        timing: DiscoveryTiming,
        traffic: TrafficCounters,
        refusals: RefusalLog,
        observer: GossipObserver,
    ) -> None:
        self._own_peer_id = own_peer_id
        self._membership = membership
        self._timing = timing
        self._traffic = traffic
        self._refusals = refusals
        self._observer = observer
        self._lazy_push = LazyPush()
        self._news = NewsRate(NEWS_BUDGET_BITS_PER_S / 4, 0.0)
        self._links: dict[str, GossipLink] = {}
        self.after_loss: Callable[[], None] = lambda: None
        self.most_incoming = MAX_INCOMING
        """Links of others that are admitted."""
        self.copies = 1.0
        """Of each record, that a peer sends which can be dialled."""

    @property
    def neighbours(self) -> tuple[str, ...]:
        return tuple(self._links)

    @property
    def incoming(self) -> tuple[Neighbour, ...]:
        """The neighbours that have chosen this peer."""
        return tuple(link.neighbour for link in self._links.values() if not link.dialled)

    @property
    def dialled(self) -> tuple[Neighbour, ...]:
        """The neighbours that this peer has chosen itself."""
        return tuple(link.neighbour for link in self._links.values() if link.dialled)

    def news_bits_per_s(self) -> float:
        """Returns the recent rate of all peers' records, in bits per second."""
        return self._news.after(trio.current_time()).bits_per_s

    def broadcast(self, record: bytes) -> None:
        """Sends this peer's own record to every neighbour."""
        for link in self._lazy_push.forward(record, None, push=True, gone=is_loss(record)):
            self._links[link].enqueue(record)

    def announce_pulled(self, source: str, pulled: tuple[tuple[bytes, Accepted], ...]) -> None:
        """Announces records that came in a table of `source` before their ids did: as stale ones they would go no
        further from here when these come (Demers et al. 1987, section 1.5: redistribution of what anti-entropy
        brings)."""
        for record, accepted in pulled:
            self._news = self._news.after(trio.current_time(), _cost_bits(record, accepted))
            self._lazy_push.forward(record, source, push=False, gone=accepted.gone, urgent=accepted.urgent)

    def announce_judged(self, judged: tuple[tuple[bytes, Accepted], ...]) -> None:
        """Announces accusations that could not be judged when they came."""
        for record, _ in judged:
            self._lazy_push.forward(record, None, push=False, gone=True)
        if judged:
            self.after_loss()

    async def run(self) -> None:
        """Announces the ids that wait, and asks again for what has not come, until cancelled."""
        while True:
            usual_s = ihave_interval_s(self.news_bits_per_s() * self.copies)
            round_s = min(usual_s, self._timing.ihave_interval_s) * ihave_slowdown(len(self._links))
            await trio.sleep(round_s / max(1, len(self._links)))
            now = trio.current_time()
            # one after the other, so that what they ask for comes so, too, and a new link waits no longer than all
            if (link := min(self._links.values(), key=lambda link: link.turn_at, default=None)) is not None:
                behind = self._traffic.pace.wait_s(now) > 0.0
                urgent = not link.take_turn(now, _MOST_ROUNDS * round_s if behind else 0.0)
                for names in self._lazy_push.take_ihaves(link.stream.peer_id, urgent=urgent):
                    link.enqueue(IHAVE + b"".join(names))
            for peer_id, late in self._lazy_push.retry_iwants(now).items():
                for at in range(0, len(late), MAX_RECORD_IDS):
                    self._links[peer_id].enqueue(IWANT + b"".join(late[at : at + MAX_RECORD_IDS]))

    async def drained(self) -> None:
        """Waits until everything broadcast so far has been written to every link."""
        for link in tuple(self._links.values()):
            await link.drained()

    async def run_link(self, stream: CompressedStream, network: str, *, dialled: bool) -> None:
        """Keeps a link to the stream's peer, in that network, until it ends, and resets the stream then."""
        link = GossipLink(stream, network, trio.current_time(), dialled=dialled)
        self._traffic.count_connection()
        if not self._admit(link):
            if not dialled:
                await self._hear_out(stream)
            await stream.reset()
            return
        self._lazy_push.open_link(stream.peer_id)
        self._membership.mark(stream.peer_id, answers=True)
        own = self._membership.own.records()
        for record in own if dialled else own[1:]:  # who has dialled knows these facts, or asks for them
            link.enqueue(record)
        self._observer.link_opened()
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send, link, nursery.cancel_scope)
                    await self._receive(link)
                    nursery.cancel_scope.cancel()
        finally:
            if self._links.get(stream.peer_id) is link:
                self._forget(link)
                self._observer.link_lost(stream.peer_id)
            await stream.reset()

    def _admit(self, link: GossipLink) -> bool:
        """Both ends keep the same one of two links: of those that cross the smaller id's, of others the newer one."""
        peer_id = link.stream.peer_id
        old = self._links.get(peer_id)
        if peer_id == self._own_peer_id or (
            old is None and not link.dialled and not self._make_room(link.neighbour)
        ):
            return False
        if old is not None:
            dialler = self._own_peer_id if link.dialled else peer_id
            apart_s = link.neighbour.since - old.neighbour.since
            crosses = old.dialled != link.dialled and apart_s <= CROSSING_DIALS * self._timing.dial_timeout_s
            if crosses and dialler != min(peer_id, self._own_peer_id):
                return False
            old.scope.cancel()
        self._links[peer_id] = link
        return True

    def _make_room(self, newcomer: Neighbour) -> bool:
        """Whether there is room for one more incoming link, if need be in the place of another."""
        incoming = self.incoming
        if len(incoming) < self.most_incoming:
            return True
        leaves = to_make_room(incoming, newcomer.network, newcomer.since)
        if leaves is None:
            return False
        logger.debug("%s makes room for %s", leaves.peer_id, newcomer.peer_id)
        self.end_link(leaves.peer_id)
        return True

    def end_link(self, peer_id: str) -> None:
        """Ends a link that there is, for want of room."""
        link = self._links[peer_id]
        self._forget(link)
        link.scope.cancel()

    def _forget(self, link: GossipLink) -> None:
        del self._links[link.stream.peer_id]
        self._lazy_push.close_link(link.stream.peer_id)

    async def _hear_out(self, stream: CompressedStream) -> None:
        """Receives what a peer that gets no link says first, which is what it is: so nobody who takes all links can
        keep a newcomer from being heard, nor its own old link a peer that has been started again."""
        if stream.peer_id == self._own_peer_id:
            return
        try:
            with trio.move_on_after(HEAR_OUT_S):
                for _ in ("facts", "state"):
                    record = await stream.receive(MAX_FACTS_BYTES)
                    if is_facts(record) or is_state(record):
                        self._take_in_record(record, stream.peer_id)
        except StreamEndedError as error:
            logger.debug("%s, which got no link, said nothing: %s", stream.peer_id, error)

    async def _send(self, link: GossipLink, scope: trio.CancelScope) -> None:
        try:
            while True:
                batch = await link.next_batch(self._timing.keepalive_s)
                before = link.stream.bytes_out
                with trio.fail_after(self._timing.silence_s):
                    await link.stream.send(batch)
                link.mark_sent()
                self._traffic.count_sent("gossip", link.stream.bytes_out - before, len(batch))
        except (StreamEndedError, trio.TooSlowError) as error:
            logger.debug("the link to %s ended: %s", link.stream.peer_id, error)
            scope.cancel()

    async def _receive(self, link: GossipLink) -> None:
        strikes = received = counted = 0
        since = trio.current_time()
        try:
            while strikes < _MAX_STRIKES:
                with trio.fail_after(self._timing.silence_s):
                    record = await link.stream.receive(MAX_FACTS_BYTES)
                self._traffic.count_received("gossip", link.stream.bytes_in - counted)
                counted = link.stream.bytes_in
                strikes += bool(record) and self._take_in(record, link)
                received += 1
                if received == _MAX_RECORDS_PER_S:  # who floods is read at this rate, and blocks itself
                    await trio.sleep_until(since + 1.0)
                    received, since = 0, trio.current_time()
            self._refusals.refused("links on which too much was untrue", link.stream.peer_id)
        except (StreamEndedError, trio.TooSlowError) as error:
            logger.debug("the link to %s ended: %s", link.stream.peer_id, error)

    def _take_in(self, frame: bytes, link: GossipLink) -> bool:
        """Returns whether the frame should not have been sent by an honest neighbour."""
        if frame[:1] not in (IHAVE, IWANT):
            return self._take_in_record(frame, link.stream.peer_id)
        try:
            names = parse_record_ids(frame[1:])
        except ValueError:
            return True
        if frame[:1] == IWANT:
            for record in self._lazy_push.receive_iwant(link.stream.peer_id, names):
                link.enqueue(record)
        elif ask := self._lazy_push.receive_ihave(link.stream.peer_id, names, trio.current_time()):
            link.enqueue(IWANT + b"".join(ask))
        return False

    def _take_in_record(self, record: bytes, peer_id: str) -> bool:
        self._lazy_push.record_seen(record, peer_id)
        outcome = self._membership.receive(record, source=peer_id)
        if isinstance(outcome, Accepted):
            pushes = self._news.after(trio.current_time()).times(self.copies).pushes
            self._news = self._news.after(trio.current_time(), _cost_bits(record, outcome))
            for to in self._lazy_push.forward(
                record, peer_id, push=pushes, gone=outcome.gone, urgent=outcome.urgent
            ):
                self._links[to].enqueue(record)
            if peer_id in self._links:
                self._links[peer_id].mark_useful(trio.current_time())
            if is_loss(record):
                self.after_loss()
        wanted = outcome.facts_wanted if isinstance(outcome, Accepted) else outcome is Reason.UNKNOWN_PEER
        # of strangers, who get no link and are heard out, there are many
        if wanted and is_state(record) and peer_id in self._links:
            try:
                self._observer.facts_wanted(peer_id, state_tag(record))
            except AnnouncementError:
                return True
        return outcome in _STRIKES


def _cost_bits(record: bytes, accepted: Accepted) -> float:
    """Returns what a record costs this peer; if it brings a newcomer, with this peer's share in handing out the
    table."""
    if is_loss(record):
        return LOSS_COST_BITS
    if is_facts(record):
        return FACTS_COST_BITS if accepted.newcomer else FACTS_COST_BITS / 2
    return STATE_COST_BITS
