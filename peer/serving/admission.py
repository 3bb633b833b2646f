"""Letting sessions in: leases, the layers and links that a circuit asks for, and letting go again."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from molink.peer.engine.kept_copy import KeptCopy
from molink.peer.engine.sessions import (
    ServedSession,
    SessionPlan,
    SessionTable,
    read_further_blocks,
    report_failure,
)
from molink.peer.engine.stepping import Stepper
from molink.peer.hop.head import MOST_WAIT_S
from molink.peer.memory.leases import LeaseKey, Refused
from molink.peer.memory.memory import common_spans
from molink.peer.serving.copying import Copying
from molink.peer.serving.layer_loader import LayerLoader, LeasedCompute
from molink.peer.serving.leased_caches import LeasedCaches
from molink.peer.serving.neighbours import NeighbourLinks
from molink.peer.serving.request_limits import RequestRefused
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.errors import LoadAbandoned, WeightsError
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.prefix import names_at

MOVED_ANNOUNCED_S = 1.0
"""A session that has gone over here is announced so much later: its first step would wait for the announcing."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingLease:
    """A lease that is being made ready."""

    ready: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    copy: KeptCopy | None = None
    """What this peer has kept of the hop whose place it takes."""

    @property
    def is_under_way(self) -> bool:
        """Whether the client waits for this peer."""
        return self.task is not None and not self.ready.done()


class Admission:
    """Owner of the lease book's consequences: sessions, and their neighbours' links."""

    def __init__(
        self,
        peer_id: str,
        compute: LeasedCompute,
        sessions: SessionTable,
        loader: LayerLoader,
        neighbours: NeighbourLinks,
        stepper: Stepper,
        copying: Copying | None = None,
    ) -> None:
        """Without `copying` no copies are made of sessions, and none are taken over."""
        self._peer_id = peer_id
        self.timeouts = compute.timeouts
        self._spec = compute.spec
        self._leases = compute.leases
        self._sessions = sessions
        self._caches = LeasedCaches(compute.backend.engine, reserve=not compute.leases.memory.swap_bytes)
        self._engine_thread = compute.engine_thread
        self._loader = loader
        self._neighbours = neighbours
        self._stepper = stepper
        self._copying = copying
        self._on_change = compute.on_change
        self._forming: dict[LeaseKey, _PendingLease] = {}

    def reserve(self, link: Link, plan: SessionPlan, hop: int, *, advances: bool = False) -> int:
        """Grants a lease; returns the bytes that have to be loaded for it. With `advances` the session goes on here in
        an epoch that was prepared.

        Nothing is loaded before the client asks `await_ready`, which it does when every hop has granted: clients that
        race for the same memory would otherwise fill it with halves of circuits that fit nobody.

        Raises:
            RequestRefused: the lease book's reason, or this is to be the head and prompts wait too long already.
        """
        if not 0 <= hop < len(plan.hops) or plan.hops[hop].peer_id != self._peer_id:
            raise RequestRefused("request", f"hop {hop} of this circuit is not this peer's")
        wait_s = self._stepper.prompt_wait_s if hop == 0 and len(plan.hops) > 1 and not advances else 0.0
        if wait_s > MOST_WAIT_S and plan.key not in self._forming:
            detail = f"the prompts that wait here need its line for {wait_s:.0f} s"
            raise RequestRefused("busy", detail, retry_after_s=wait_s - MOST_WAIT_S)
        now = asyncio.get_running_loop().time()
        span = plan.span_of(hop)
        self._note_uses(now)
        ask = self._leases.advance if advances else self._leases.request
        answer = ask(plan.key, span, plan.capacity_tokens, link.peer_id, now, link.remote.network)
        if isinstance(answer, Refused):
            raise RequestRefused(answer.code, answer.detail, answer.retry_after_s)
        for idle in answer.evicted:
            self._take_back(idle.key)
        if plan.key not in self._forming:
            session = ServedSession(plan, hop, link)
            self._replace(session)
            self._sessions.add(session)
            forming = _PendingLease(asyncio.get_running_loop().create_future())
            if answer.promoted is not None:
                self._take_over(session, forming)
            if self._copying is not None and session.inputs is None:
                self._copying.log_inputs(session)
            forming.ready.add_done_callback(_retrieve)
            self._forming[plan.key] = forming
            self._stepper.open_session(session)
            if advances:
                asyncio.get_running_loop().call_later(MOVED_ANNOUNCED_S, self._on_change)
            else:
                self._on_change()
        self._assign_standby(plan, hop)
        return sum(map(self._spec.weight_bytes, common_spans(self._leases.loading, span)))

    async def await_ready(self, key: LeaseKey, asker: str, wait_s: float) -> pb.Readiness:
        """Whether the lease is ready, waiting up to `wait_s` for it.

        Raises:
            RequestRefused: there is no such lease, it has failed, or it is not that of `asker` (a peer id).
        """
        self._require_owner(key, asker)
        forming = self._forming.get(key)
        session = self._sessions.get(key.session, key.epoch)
        if forming is None or session is None:
            raise RequestRefused("epoch", "there is no such lease here (it expired, or was replaced)")
        standing = self._leases.renew(key, asyncio.get_running_loop().time())
        if forming.task is None:
            if not standing:  # a load that it shared has failed
                raise RequestRefused("epoch", "there is no such lease here any more")
            forming.task = asyncio.create_task(self._form(session, forming), name=f"form {session.span}")
        await asyncio.wait((forming.ready,), timeout=wait_s)
        engine = self._engine_thread
        readiness = pb.Readiness(
            ready=forming.ready.done(),
            computing_ms=round(engine.busy_s * 1000),
            expected_ms=math.ceil(engine.expected_ms or 0.0),
            waits=session.waits,
        )
        if not readiness.ready:
            readiness.loaded_bytes, readiness.total_bytes = (
                self._loader.loaded_bytes,
                self._loader.total_bytes,
            )
            return readiness
        forming.ready.result()
        readiness.held_tokens, readiness.least_held_tokens = session.held_tokens, session.least_tokens
        return readiness

    def release(self, asked: pb.Release, asker: str) -> None:
        """Frees what the session has here, at whatever stage it is. What it generated can be shared as its prompt can,
        if its blocks have got names, and as far as the client calls its tokens valid.

        Raises:
            RequestRefused: it is not that of `asker` (a peer id).
            ProtocolError: these are no such names. Then the session stays.
        """
        key = LeaseKey(bytes(asked.session), asked.epoch)
        self._require_owner(key, asker)
        session = self._sessions.get(key.session, key.epoch)
        if session is not None and session.cache is not None:
            further = read_further_blocks(asked, session.plan)
            if further and session.shares:
                names = names_at((*session.plan.prefix, *further), asker, session.before)
                session.cache.close(names, asked.valid_tokens)
        self._leases.release(key)
        self._let_go(key)
        self._on_change()

    def knows(self, peer_id: str) -> bool:
        """Whether sessions of that client have stepped here."""
        return self._leases.knows(peer_id)

    def abandon(self, link: Link) -> None:
        """The client is gone, or has come with another link: nothing is done any more for its sessions of this one.
        Their KV caches stay for a moment, in which it may go on in another epoch."""
        keys = [session.key for session in self._sessions if session.owner is link]
        for lease in self._leases.abandon(keys, asyncio.get_running_loop().time()):
            session = self._sessions.get(*lease.key)
            if session is None or session.cache is None:
                self._leases.release(lease.key)
                self._let_go(lease.key)
            else:
                self._stepper.end_session(session)
        self._on_change()

    def hand_back(self, detail: str) -> None:
        """Ends every session: their clients hear why, and go on elsewhere."""
        for session in self._sessions:
            report_failure(session, self._peer_id, "paused", detail)
        for forming in self._forming.values():
            if not forming.ready.done():
                forming.ready.set_exception(RequestRefused("busy", detail))
        for key in list(self._forming):
            self._leases.release(key)
            self._let_go(key)
        self._loader.forget_promises()
        self._on_change()

    async def run(self, each_round: Callable[[], None] | None = None) -> None:
        """Lets leases expire that their clients have not renewed or do not use, until cancelled. `each_round` ends what
        goes by times of its own."""
        while True:
            await asyncio.sleep(self.timeouts.expiry_check_s)
            now = asyncio.get_running_loop().time()
            self._note_uses(now)
            expired = self._leases.expire(now)
            self._leases.copies.expire(now)
            for unused in expired:
                if unused.expires_s > now:
                    self._take_back(unused.key)
            standing = {lease.key for lease in self._leases.leases}
            for key in [
                *(lease.key for lease in expired),
                *(key for key in self._forming if key not in standing),
            ]:
                _log.info("the lease of a session's epoch %d ended", key.epoch)
                self._let_go(key)
            if expired:
                self._on_change()
            if each_round is not None:
                each_round()

    async def close(self) -> None:
        """Ends every lease in progress."""
        tasks = [forming.task for forming in self._forming.values() if forming.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_uses(self, now: float) -> None:
        """Tells the lease book who has stepped, or waits for this peer."""
        for session in self._sessions:
            key, next_step = session.key, session.progress.next_step
            if next_step != session.counted_step:
                session.counted_step = next_step
                self._leases.used(key, now)
            elif session.waits or ((forming := self._forming.get(key)) is not None and forming.is_under_way):
                self._leases.used(key, now, stepped=False)

    def _take_back(self, key: LeaseKey) -> None:
        """The lease has ended for want of use, though its client has renewed it."""
        session = self._sessions.get(key.session, key.epoch)
        if session is not None:
            self._stepper.fail_session(session, self._peer_id, "expired", "nobody has used its lease here")
        self._let_go(key)

    def _require_owner(self, key: LeaseKey, asker: str) -> None:
        session = self._sessions.get(key.session, key.epoch)
        if session is not None and session.owner.peer_id != asker:
            raise RequestRefused("epoch", "this lease is another client's: only who reserved it may use it")

    def _assign_standby(self, plan: SessionPlan, hop: int) -> None:
        """Who keeps a copy may change while the circuit stands."""
        session = self._sessions.get(plan.key.session, plan.key.epoch)
        if self._copying is not None and session is not None and session.plan.circuit == plan.circuit:
            self._copying.sender.assign(session, plan.hops[hop].standby, plan.hops[hop].standby_form)

    def _take_over(self, session: ServedSession, forming: _PendingLease) -> None:
        """This peer was the hop's standby: what it keeps of it is the session's from now on, and nobody else's."""
        copy = None if self._copying is None else self._copying.keeper.take(session.key.session)
        if self._copying is not None and copy is not None:
            self._copying.log_inputs(session, copy.inputs)
        if copy is not None and copy.cache is not None:
            forming.copy, session.kept_cache, session.shares = copy, copy.cache, False

    def _replace(self, session: ServedSession) -> None:
        """A new epoch takes the place of the old one, whose lease the book has replaced already: what waits of that is
        dropped, and its cache stays for the new one."""
        older = [key for key in self._forming if key.session == session.key.session and key != session.key]
        for key in older:
            if (left := self._end(key)) is not None:
                self._caches.keep(left, session)
                session.shares = session.shares and left.shares and session.before == left.before
                self._stepper.guessing.keep(left, session)
                if self._copying is not None:
                    self._copying.log_inputs(session, left.inputs)

    async def _form(self, session: ServedSession, forming: _PendingLease) -> None:
        """Loads, links, allocates; then the lease is ready."""
        span, tokens = session.span, session.plan.capacity_tokens
        loads = self._loader.begin(span)
        neighbours = [
            asyncio.create_task(self._neighbours.link(facts, session.owner.remote))
            for facts in session.plan.neighbours_of(session.place.hop)
        ]
        # of an end that nobody has foreseen, or when it is cancelled: who waits hears in any case
        refusal = RequestRefused("load", f"the lease of layers {span} was not made ready")
        try:
            for load in loads:
                await asyncio.shield(load.done)
            await asyncio.gather(*neighbours)
            if forming.copy is not None and self._copying is not None:
                await self._copying.keeper.writer.finish(forming.copy)
            await self._engine_thread.call(self._caches.open, session)
        except LinkError as error:
            refusal = RequestRefused("link", error.reason, peer_id=error.peer_id)
        except PoolFull as error:
            refusal = RequestRefused("memory", f"no memory for {span} and {tokens} tokens: {error}")
        except (WeightsError, LoadAbandoned, OSError, ValueError) as error:
            refusal = RequestRefused("load", f"layers {span} could not be loaded: {error}")
        except (MemoryError, RuntimeError) as error:
            _log.exception("a lease for %s failed", span)
            refusal = RequestRefused("memory", f"no memory for {span} and {tokens} tokens: {error}")
        else:
            forming.ready.set_result(None)
            self._stepper.begin_session(session)
            return
        finally:
            if not forming.ready.done():
                forming.ready.set_exception(refusal)  # the client hears it, and releases the lease
            for neighbour in neighbours:
                neighbour.cancel()
            await asyncio.gather(*neighbours, return_exceptions=True)

    def _let_go(self, key: LeaseKey) -> None:
        if (session := self._end(key)) is not None:
            self._caches.close(session)
            if session.inputs is not None:
                session.inputs.close()

    def _end(self, key: LeaseKey) -> ServedSession | None:
        """Nothing is done for the session any more; only its cache is still there."""
        forming = self._forming.pop(key, None)
        if forming is not None and forming.task is not None:
            forming.task.cancel()
        session = self._sessions.remove(key)
        if session is not None:
            self._stepper.end_session(session)
            if self._copying is not None:
                self._copying.sender.end_session(session)
        self._loader.forget_promises()
        return session


def _retrieve(ended: "asyncio.Future[None]") -> None:
    """Marks an error as seen: nobody may be waiting for it any more."""
    if not ended.cancelled():
        ended.exception()
