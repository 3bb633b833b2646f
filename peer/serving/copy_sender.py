"""Copies of this peer's sessions on their way to standbys: read in the engine's idle moments, sent behind all else."""

import asyncio
import logging
import time
from collections.abc import Sequence

from molink.dht.records.records import PeerFacts
from molink.dht.refusals import RefusalLog
from molink.peer.compute.backend import StageEngine
from molink.peer.engine.idle_engine import IdleEngine, IdleWork
from molink.peer.engine.sessions import ServedSession, SessionTable
from molink.peer.redundancy.copy_sending import CopyPortion, CopyRange, CopySending
from molink.peer.serving.neighbours import NeighbourLinks
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass
from molink.routing.routes.partners import copied_bytes_per_token

_log = logging.getLogger(__name__)


class CopySender:
    """Owner of the copies that others keep of this peer's sessions. On the event loop.

    Who keeps one is said by the session's client; copying begins when that peer says that it is ready. Whatever it
    says or does, the session goes on.
    """

    def __init__(
        self,
        engine: StageEngine,
        idle: IdleEngine,
        sessions: SessionTable,
        neighbours: NeighbourLinks,
        links: Links,
    ) -> None:
        self._engine = engine
        self._idle = idle
        self._sessions = sessions
        self._neighbours = neighbours
        self._links = links
        self._sending: CopySending[ServedSession] = CopySending()
        self._linking: dict[ServedSession, asyncio.Task[None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._refusals = RefusalLog(_log)
        self.sent_bytes = 0
        """Of copies, so far."""
        idle.add_source(self._next_work, lambda: self._sending.is_hastened)

    def __len__(self) -> int:
        """Sessions of which a copy is made."""
        return len(self._sending)

    @property
    def behind_tokens(self) -> int:
        """That standbys lack, of all sessions together."""
        return sum(held - self._sending.kept_tokens(session) for session, held in self._held_tokens().items())

    def assign(self, session: ServedSession, standby: PeerFacts | None) -> None:
        """From now on the session's copy is that peer's to keep, or nobody's."""
        peer_id = "" if standby is None else standby.peer_id
        if session.standby_peer_id == peer_id:
            return
        session.standby_peer_id = peer_id
        self._sending.stop(session)
        self._stop_linking(session)
        if standby is not None:
            task = asyncio.create_task(self._link(session, standby), name=f"link to {peer_id}")
            self._linking[session] = task

    def hasten(self, session: ServedSession) -> None:
        """The session is about to go on at its standby: what that lacks goes before prefill, at once."""
        self._sending.hasten(session)
        self._idle.wake()

    def end_session(self, session: ServedSession) -> None:
        """The session has ended here."""
        self._stop_linking(session)
        self._sending.end(session)

    def on_kept(self, link: Link, header: pb.CopiesKept) -> None:
        """A standby says how far its copies have come."""
        for one in header.copies:
            session = self._sessions.get(one.session, one.epoch)
            if session is None or session.ended or session.standby_peer_id != link.peer_id:
                continue
            if one.ended:
                self._sending.stop(session)
            elif session in self._sending:
                if not self._sending.record_kept(session, one.tokens):
                    self._refuse(session, link)
            elif not self._open(session, link, one.tokens):
                self._refuse(session, link)
        self._idle.wake()

    def link_closed(self, peer_id: str) -> None:
        """A standby is gone. It changes nothing else."""
        self._sending.end_partner(peer_id)

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = tuple(self._linking.values())
        for task in tasks:
            task.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse(self, session: ServedSession, link: Link) -> None:
        self._refusals.refused("what standbys say of copies and cannot be", link.peer_id)
        self._sending.stop(session)
        session.standby_peer_id = ""

    def _open(self, session: ServedSession, link: Link, kept_tokens: int) -> bool:
        if kept_tokens > session.plan.capacity_tokens:
            return False
        spec = self._engine.spec
        token_bytes = copied_bytes_per_token(spec, session.span)
        whole = any(spec.state_bytes[session.span.start : session.span.stop])
        return self._sending.open(session, link.peer_id, kept_tokens, token_bytes, whole=whole)

    async def _link(self, session: ServedSession, standby: PeerFacts) -> None:
        """It may be this end alone that can dial."""
        try:
            await self._neighbours.link(standby, session.owner.remote)
        except LinkError as error:
            _log.debug("no copy of a session on %s: %s", standby.peer_id, error.reason)

    def _stop_linking(self, session: ServedSession) -> None:
        task = self._linking.pop(session, None)
        if task is not None:
            task.cancel()

    def _held_tokens(self) -> dict[ServedSession, int]:
        """What the sessions' caches hold now, as far as it can be read."""
        return {
            session: session.cache.length
            for session in self._sessions
            if session in self._sending and session.cache is not None and session.cache.holds_blocks
        }

    def _next_work(self) -> IdleWork | None:
        """The next portion, read on the engine's thread."""
        if not len(self._sending):
            return None
        held, now_s = self._held_tokens(), time.perf_counter()
        portion = self._sending.next_portion(held, now_s)
        if not isinstance(portion, CopyPortion):
            self._wake_in(portion - now_s)
            return None
        ranges = portion.ranges
        return IdleWork(lambda: self._read(ranges), lambda read: self._send(portion, read))

    def _wake_in(self, wait_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wait_s != float("inf"):
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._idle.wake)

    def _read(self, ranges: Sequence[CopyRange[ServedSession]]) -> list[bytes | bytearray | None]:
        """On the engine's thread. None for a session whose cache cannot be read (any more)."""
        parts: list[bytes | bytearray | None] = []
        for one in ranges:
            cache = one.key.cache
            try:
                parts.append(cache.export(one.start, one.stop) if cache is not None else None)
            except (ValueError, RuntimeError) as error:
                _log.debug("a copy ends: %s", error)
                parts.append(None)
        return parts

    def _send(
        self,
        portion: CopyPortion[ServedSession],
        read: "Sequence[bytes | bytearray | None] | Exception",
    ) -> None:
        """Posts what was read. A link without room is no error: the copy is behind."""
        if isinstance(read, Exception):
            _log.error("copies could not be read", exc_info=read)
            read = [None] * len(portion.ranges)
        header, payload, sessions = pb.CopyParts(), [], []
        for one, content in zip(portion.ranges, read, strict=True):
            session = one.key
            if content is None:
                self._sending.stop(session)
            elif session in self._sending and not session.ended:
                held = session.cache.length if session.cache is not None else one.stop
                header.parts.add(
                    session=session.key.session,
                    epoch=session.key.epoch,
                    start=one.start,
                    tokens=one.stop - one.start,
                    payload_bytes=len(content),
                    behind_tokens=max(0, held - one.stop),
                )
                payload.append(content)
                sessions.append(session.key.session)
        link = self._links.find(portion.partner)
        if not payload:
            return
        if link is None:
            self._sending.end_partner(portion.partner)
            return
        content = b"".join(payload)
        traffic_class = TrafficClass.HANDOVER if portion.is_awaited else TrafficClass.REPLICATION
        if link.post(header, content, traffic_class, tuple(sessions)):
            self.sent_bytes += len(content)
        else:
            self._sending.record_refused(portion)
            link.when_room(lambda: self._room(portion.partner))

    def _room(self, partner: str) -> None:
        self._sending.record_room(partner)
        self._idle.wake()
