"""Copies of this peer's sessions on their way to standbys: read while the engine is idle, or now and then between two
steps, and sent behind all else.

What standbys compute from is read from sessions' logs, and keys and values from their caches on the engine's thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from molink.dht.records.records import PeerFacts
from molink.dht.refusals import RefusalLog
from molink.peer.compute.backend import StageEngine
from molink.peer.engine.idle_engine import IdleEngine, IdleWork
from molink.peer.engine.sessions import ServedSession, SessionTable
from molink.peer.redundancy.copy_sending import PORTION_BYTES, CopyPortion, CopyRange, CopySending
from molink.peer.redundancy.pair_roles import is_worth_copying
from molink.peer.serving.neighbours import NeighbourLinks
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transmission.classes import TrafficClass
from molink.routing.routes.copy_forms import CopyForm, copied_bytes_per_token, may_be_copied_as

LOOK_EVERY_S = 0.1
"""A copy that lacks nothing is not looked at after every step."""
_log = logging.getLogger(__name__)


class LookTimes:
    """Owner of when copies are looked at: not after every step, and at the latest when something is due."""

    def __init__(self, idle: IdleEngine) -> None:
        self._idle = idle
        self._alarm: asyncio.TimerHandle | None = None
        self._look_s = 0.0
        """Until then (`time.perf_counter`) nothing goes of what steps alone have added."""

    def is_early(self, now_s: float) -> bool:
        """Whether nothing is looked at now; then it is later."""
        if now_s >= self._look_s:
            return False
        if self._alarm is None:
            self._wake_in(self._look_s - now_s)
        return True

    def record_look(self, now_s: float, due_s: float) -> None:
        """Nothing goes now; something is due then, infinite for never."""
        self._look_s = min(due_s, now_s + LOOK_EVERY_S)
        self._wake_in(due_s - now_s)

    def look_now(self) -> None:
        """Something else than a step has happened."""
        self._look_s = 0.0
        self._idle.wake()

    def stop(self) -> None:
        """Nothing is woken any more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake_in(self, wait_s: float) -> None:
        self.stop()
        if wait_s != float("inf"):
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._woken)

    def _woken(self) -> None:
        self._alarm = None
        self._idle.wake()


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
        *,
        between_steps: bool = False,
    ) -> None:
        """With `between_steps` copies are made of sessions that always step, too."""
        self._engine = engine
        self._sessions = sessions
        self._neighbours = neighbours
        self._links = links
        self._sending: CopySending[ServedSession] = CopySending(always_awaited=between_steps)
        self._linking: dict[ServedSession, asyncio.Task[None]] = {}
        self._looks = LookTimes(idle)
        self._refusals = RefusalLog(_log)
        self.told_kept: Callable[[str, pb.CopiesKept], None] = _nothing
        """Hears all that standbys say."""
        self.sent_bytes = 0
        """Of copies, so far."""
        self.sent_tokens: dict[CopyForm, int] = dict.fromkeys(CopyForm, 0)
        """Of copies, so far, in each form."""
        idle.add_source(self._next_work, lambda: self._sending.is_awaited, self._next_work)

    def __len__(self) -> int:
        """Sessions of which a copy is made."""
        return len(self._sending)

    @property
    def behind_tokens(self) -> Sequence[int]:
        """That standbys lack, of each session."""
        return [held - self._sending.kept_tokens(session) for session, held in self._held_tokens().items()]

    def assign(self, session: ServedSession, standby: PeerFacts | None, form: CopyForm) -> None:
        """From now on the session's copy is that peer's to keep, or nobody's; it goes in that form as far as can be.
        Where only the form is another one, it goes on when the standby says from where."""
        peer_id = "" if standby is None else standby.peer_id
        if (session.standby_peer_id, session.standby_form) == (peer_id, form):
            return
        session.standby_peer_id, session.standby_form = peer_id, form
        self._stop(session)
        self._stop_linking(session)
        if standby is not None:
            task = asyncio.create_task(self._link(session, standby), name=f"link to {peer_id}")
            self._linking[session] = task

    def hasten(self, session: ServedSession) -> None:
        """The session is about to go on at its standby: what that lacks goes before prefill, at once."""
        self._sending.hasten(session)
        self._looks.look_now()

    def end_session(self, session: ServedSession) -> None:
        """The session has ended here."""
        self._stop_linking(session)
        self._sending.end(session)

    def on_kept(self, link: Link, header: pb.CopiesKept) -> None:
        """A standby says how far its copies have come."""
        self.told_kept(link.peer_id, header)
        for one in header.copies:
            session = self._sessions.get(one.session, one.epoch)
            if session is None or session.ended or session.standby_peer_id != link.peer_id:
                continue
            if one.ended:
                self._stop(session)
            elif not self._follow(session, link, one.tokens):
                self._refusals.refused("what standbys say of copies and cannot be", link.peer_id)
                self._stop(session)
                session.standby_peer_id = ""
        self._looks.look_now()

    def link_closed(self, peer_id: str) -> None:
        """A standby is gone. It changes nothing else."""
        for session in self._sending.end_partner(peer_id):
            _kept_by_nobody(session)

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = tuple(self._linking.values())
        for task in tasks:
            task.cancel()
        self._looks.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self, session: ServedSession) -> None:
        self._sending.stop(session)
        _kept_by_nobody(session)

    def _follow(self, session: ServedSession, link: Link, kept_tokens: int) -> bool:
        """The standby has so many tokens. False: that cannot be."""
        if session in self._sending:
            followed = self._sending.record_kept(session, kept_tokens)
        else:
            is_possible = kept_tokens <= session.plan.capacity_tokens
            sizes = self._token_bytes(session)
            followed = is_possible and self._sending.open(
                session, link.peer_id, kept_tokens, sizes, on_demand=self._is_on_demand(session)
            )
        if followed and session.inputs is not None:
            session.inputs.kept_tokens = kept_tokens
        return followed

    def _is_on_demand(self, session: ServedSession) -> bool:
        """Between steps a line has better to do than the prompt of a session that ends before its copy is of use."""
        plan = session.plan
        return self._sending.always_awaited and not is_worth_copying(plan.prompt_tokens, plan.capacity_tokens)

    def _token_bytes(self, session: ServedSession) -> dict[CopyForm, int]:
        """Of the forms in which the session's copy may go: the one that its client wants, and keys and values where
        that is not here."""
        spec, span = self._engine.spec, session.span
        forms = {CopyForm.KEYS_AND_VALUES, session.standby_form}
        return {
            form: copied_bytes_per_token(spec, span, form, session.receives_in)
            for form in forms
            if may_be_copied_as(form, spec, span)
        }

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
        """What the sessions' caches hold now, as far as it can be read, is logged and no guess. A cache may be a step
        ahead of its log, whose rows are the guesses' of the step before then."""
        return {
            session: session.cache.certain_tokens
            if session.inputs is None
            else min(session.cache.certain_tokens, session.inputs.certain)
            for session in self._sessions
            if session in self._sending and session.cache is not None and session.cache.holds_blocks
        }

    def _next_work(self) -> IdleWork | None:
        """The next portions that are read on the engine's thread, of PORTION_BYTES together or a little more: beside
        the few tokens that sessions wait for, others' copies go on. What need not be read goes at once."""
        if self._looks.is_early(time.perf_counter()) and not self._sending.is_hastened:
            return None
        portions: list[CopyPortion[ServedSession]] = []
        while len(self._sending) and sum(one.size_bytes for one in portions) < PORTION_BYTES:
            held, now_s = self._held_tokens(), time.perf_counter()
            inputs_from = {one: one.inputs.start for one in held if one.inputs is not None}
            portion = self._sending.next_portion(held, now_s, inputs_from)
            if not isinstance(portion, CopyPortion):
                self._looks.record_look(now_s, portion)
                break
            if any(one.form is CopyForm.KEYS_AND_VALUES for one in portion.ranges):
                portions.append(portion)
            else:
                self._send(portion, [None] * len(portion.ranges))
        if not portions:
            return None
        return IdleWork(partial(_read, portions), partial(self._send_all, portions))

    def _send_all(
        self,
        portions: Sequence[CopyPortion[ServedSession]],
        read: "Sequence[Sequence[bytes | bytearray | None]] | Exception",
    ) -> None:
        """Posts what was read."""
        if isinstance(read, Exception):
            _log.error("copies could not be read", exc_info=read)
            read = [[None] * len(one.ranges) for one in portions]
        for portion, parts in zip(portions, read, strict=True):
            self._send(portion, parts)

    def _send(self, portion: CopyPortion[ServedSession], read: Sequence[bytes | bytearray | None]) -> None:
        """Posts what was read of a portion. A link without room is no error: the copy is behind."""
        header, payload, sessions = pb.CopyParts(), [], []
        for one, exported in zip(portion.ranges, read, strict=True):
            session = one.key
            content = exported if one.form is CopyForm.KEYS_AND_VALUES else _logged(one)
            if content is None:
                self._stop(session)
            elif session in self._sending and not session.ended:
                held = session.cache.certain_tokens if session.cache is not None else one.stop
                header.parts.add(
                    session=session.key.session,
                    epoch=session.key.epoch,
                    start=one.start,
                    tokens=one.stop - one.start,
                    payload_bytes=len(content),
                    form=int(one.form),
                    behind_tokens=max(0, held - one.stop),
                )
                payload.append(content)
                sessions.append(session.key.session)
        link = self._links.find(portion.partner)
        if not payload:
            return
        if link is None:
            self.link_closed(portion.partner)
            return
        content = b"".join(payload)
        traffic_class = TrafficClass.HANDOVER if portion.is_awaited else TrafficClass.REPLICATION
        if link.post(header, content, traffic_class, tuple(sessions)):
            self.sent_bytes += len(content)
            for part in header.parts:
                self.sent_tokens[CopyForm(part.form)] += part.tokens
        else:
            self._sending.record_refused(portion)
            link.when_room(lambda: self._room(portion.partner))

    def _room(self, partner: str) -> None:
        self._sending.record_room(partner)
        self._looks.look_now()


def _read(portions: Sequence[CopyPortion[ServedSession]]) -> list[list[bytes | bytearray | None]]:
    """On the engine's thread, of each portion its ranges."""
    return [_read_ranges(one.ranges) for one in portions]


def _read_ranges(ranges: Sequence[CopyRange[ServedSession]]) -> list[bytes | bytearray | None]:
    """None for what is not read there, or from a cache that cannot be read (any more)."""
    parts: list[bytes | bytearray | None] = []
    for one in ranges:
        cache = one.key.cache if one.form is CopyForm.KEYS_AND_VALUES else None
        try:
            parts.append(cache.export(one.start, one.stop) if cache is not None else None)
        except (ValueError, RuntimeError) as error:
            _log.debug("a copy ends: %s", error)
            parts.append(None)
    return parts


def _nothing(_: str, __: pb.CopiesKept) -> None:
    return None


def _kept_by_nobody(session: ServedSession) -> None:
    if session.inputs is not None:
        session.inputs.kept_tokens = None


def _logged(one: CopyRange[ServedSession]) -> bytes | None:
    """What the session's log has of these tokens; None: it has not all of them (any more)."""
    try:
        return None if one.key.inputs is None else one.key.inputs.read(one.start, one.stop)
    except ValueError as error:
        _log.debug("a copy ends: %s", error)
        return None
