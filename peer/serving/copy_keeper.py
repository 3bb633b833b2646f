"""Second copies that this peer keeps of others' hops: granted, written in the engine's idle moments, handed over."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from molink.dht.refusals import RefusalLog
from molink.peer.compute.backend import StageEngine
from molink.peer.engine.copy_writer import CopyWriter
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.idle_engine import IdleEngine
from molink.peer.engine.kept_copy import KeptCopy, input_rows
from molink.peer.engine.sessions import SessionPlan
from molink.peer.memory.leases import Lease, LeaseBook, LeaseKey, Refused
from molink.peer.redundancy.copy_intake import TOO_MUCH, CopyIntake
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.redundancy.pair_roles import HolderLoad
from molink.peer.serving.neighbours import NeighbourLinks
from molink.peer.serving.request_limits import RequestRefused
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

MOST_WAITING_BYTES = 32 * 1024 * 1024
"""Of parts of all copies that wait to be written."""
SETTLED_WITHIN_S = 5.0
"""A piece that is being written is known to be within that."""
LOOK_EVERY_S = 0.002
_log = logging.getLogger(__name__)
T = TypeVar("T")


class CopyKeeper:
    """Owner of the copies that this peer keeps. On the event loop.

    A copy goes whenever something else needs its place, and its hop and its client are told; who sends what is no copy
    loses it.
    """

    def __init__(
        self,
        peer_id: str,
        engine: StageEngine,
        leases: LeaseBook,
        engine_thread: EngineThread,
        idle: IdleEngine,
        logs: InputLogs,
        neighbours: NeighbourLinks,
    ) -> None:
        self._peer_id = peer_id
        self._engine = engine
        self._leases = leases
        self._engine_thread = engine_thread
        self._logs = logs
        self._neighbours = neighbours
        self._copies: dict[bytes, KeptCopy] = {}
        self.writer = CopyWriter(engine, engine_thread, idle, self._copies, self._written)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusals = RefusalLog(_log)
        self.own_load: Callable[[], HolderLoad] = HolderLoad
        """What this peer does for sessions of its own: hops hear it with what is kept."""
        self.taken_over = 0
        """Copies that have become sessions here."""
        leases.copies.tell_ended(self._ended)

    @property
    def copies(self) -> tuple[KeptCopy, ...]:
        """All that are kept here now."""
        return tuple(self._copies.values())

    @property
    def kv_bytes(self) -> int:
        """Memory of all copies."""
        return self._leases.copies.kv_bytes

    def find(self, session: bytes) -> KeptCopy | None:
        """The copy of that session, of whatever epoch."""
        return self._copies.get(session)

    async def keep(self, link: Link, plan: SessionPlan, hop: int) -> None:
        """Grants a copy of that hop's KV cache, and tells the hop how much of it is here already.

        Raises:
            RequestRefused: the lease book's reason, or this peer is not the hop's standby.
        """
        standby = plan.hops[hop].standby if 0 <= hop < len(plan.hops) else None
        if standby is None or standby.peer_id != self._peer_id:
            raise RequestRefused("request", f"this peer is not the standby of hop {hop}")
        now, span = asyncio.get_running_loop().time(), plan.span_of(hop)
        answer = self._leases.copies.request(
            plan.key, span, plan.capacity_tokens, link.peer_id, now, link.remote.network
        )
        if isinstance(answer, Refused):
            raise RequestRefused(answer.code, answer.detail, answer.retry_after_s)
        encoding, row_bytes = input_rows(plan, hop, self._engine.spec)
        kept = self._copies.get(plan.key.session)
        if kept is None:
            intake = CopyIntake(plan.capacity_tokens)
            kept = KeptCopy(plan, hop, link, intake, self._logs.open(encoding, row_bytes))
            self._copies[plan.key.session] = kept
            kept.allocating = self._begin(self._allocate(kept), f"memory for a copy of {span}")
        else:
            self._tell_hop((kept,), ended=True)  # what it has of this copy's progress is over
            kept.plan, kept.hop, kept.owner = plan, hop, link
            kept.restart()
            if kept.inputs.encoding != encoding:
                kept.inputs.close()
                kept.inputs = self._logs.open(encoding, row_bytes)
        if kept.allocating is not None and (fault := await asyncio.shield(kept.allocating)):
            raise RequestRefused("memory", fault)
        self._begin(self._link(kept, plan, hop), f"copy of {span}")

    def renew(self, key: LeaseKey, asker: str) -> int | None:
        """The copy lasts longer; returns how many tokens it covers, None if there is none."""
        kept = self._copies.get(key.session)
        if kept is None or kept.plan.key != key or kept.owner.peer_id != asker:
            return None
        self._leases.copies.renew(key, asyncio.get_running_loop().time())
        return kept.intake.kept_tokens

    def release(self, key: LeaseKey, asker: str) -> bool:
        """The client needs the copy no longer; whether there was one."""
        kept = self._copies.get(key.session)
        if kept is None or kept.plan.key != key or kept.owner.peer_id != asker:
            return False
        self._let_go(self._copies.pop(key.session))
        self._leases.copies.release(key)
        return True

    def take(self, session: bytes) -> KeptCopy | None:
        """The copy has become the session's lease: it is the caller's."""
        kept = self._copies.pop(session, None)
        self.taken_over += kept is not None
        return kept

    def on_parts(self, link: Link, header: pb.CopyParts, payload: memoryview) -> None:
        """The next tokens of some copies. Where more would wait than may, that copy ends of which most waits: who sends
        little loses nothing by what others send.

        Raises:
            ProtocolError: the payload is not what the header says.
        """
        if sum(part.payload_bytes for part in header.parts) != payload.nbytes:
            raise ProtocolError("parts of copies are not as long as they are said to be")
        offset, waiting_bytes = 0, sum(map(_waiting_bytes, self._copies.values()))
        now_s = asyncio.get_running_loop().time()
        for part in header.parts:
            content = payload[offset : offset + part.payload_bytes]
            offset += part.payload_bytes
            kept = self._copies.get(part.session)
            if kept is None or kept.plan.key.epoch != part.epoch or kept.source != link.peer_id:
                continue  # of a copy that has ended, or that was never this peer's to send
            if kept.intake.is_late(part.start):
                continue
            fault = kept.fault_of(part, self._engine.spec)
            if fault is not None:
                waiting_bytes -= _waiting_bytes(kept)
                self._drop(kept, fault)
                continue
            waiting_bytes += part.payload_bytes
            if waiting_bytes > MOST_WAITING_BYTES:
                largest = max(self._copies.values(), key=_waiting_bytes)
                waiting_bytes -= _waiting_bytes(largest)
                self._drop(largest, TOO_MUCH)
                if largest is kept:
                    continue
            kept.add(part, bytes(content), now_s)
            kept.intake.record_lag(part.behind_tokens)
            self._leases.copies.record_lag(part.session, kept.intake.lacking_tokens)
        self.writer.wake()

    def owner_gone(self, link: Link) -> None:
        """The link of a client has closed: its copies end."""
        self._leases.copies.end(
            copy
            for copy in self._leases.copies
            if (kept := self._copies.get(copy.key.session)) is not None and kept.owner is link
        )

    async def close(self) -> None:
        """Ends what is under way."""
        self.writer.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Has that done beside the request, whose client may be gone before, or come back over another link."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _allocate(self, kept: KeptCopy) -> str:
        """Takes all blocks of the copy, so that it can become a lease without asking for any; returns why it could not.

        A copy that makes way has given its blocks back before the engine's thread comes to what it makes way for: one
        that ends while it waits for the thread takes none.
        """
        session, capacity = kept.plan.key.session, kept.plan.capacity_tokens

        def allocate() -> None:
            if self._copies.get(session) is not kept:
                return
            kept.cache = self._engine.new_cache(kept.span, capacity, (), reserve=True)
            # whoever ended it meanwhile may not have seen that there is something to close
            if self._copies.get(session) is not kept:
                kept.cache.close()

        try:
            await self._engine_thread.call(allocate)
        except (ValueError, MemoryError, RuntimeError) as error:
            if self._copies.get(session) is kept:
                self._leases.copies.release(kept.plan.key)  # which may be that of a later epoch by now
            return f"no memory for a copy of {kept.span}: {error}"
        if self._copies.get(session) is not kept:
            return "the copy had to make way before it had begun"
        return ""

    async def _link(self, kept: KeptCopy, plan: SessionPlan, hop: int) -> None:
        """Tells the hop that its copy is kept here, in the epoch of that plan: what comes of an older one's dial is
        nothing to the copy as it is now. The hop's neighbours are dialled as well: if this peer takes its place they
        need no time for that."""
        client, clock = kept.owner.remote, asyncio.get_running_loop().time
        try:
            await self._neighbours.link(plan.hops[hop].facts, client)
        except LinkError as error:
            if self._is_current(kept, plan):
                self._drop(kept, f"its hop could not be reached: {error.reason}")
            return
        until_s = clock() + SETTLED_WITHIN_S
        # the hop goes on behind what is being written
        while clock() < until_s and self._is_current(kept, plan):
            if not kept.written_parts:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if not self._is_current(kept, plan):
            return
        self._tell_hop((kept,))
        for facts in plan.neighbours_of(hop):
            if not self._is_current(kept, plan):
                return
            try:
                await self._neighbours.link(facts, client)
            except LinkError as error:
                _log.debug("a standby has no link to a neighbour: %s", error.reason)

    def _is_current(self, kept: KeptCopy, plan: SessionPlan) -> bool:
        """Whether the copy is kept, and in the epoch of that plan."""
        return kept.plan is plan and self._copies.get(plan.key.session) is kept

    def _tell_hop(self, copies: Iterable[KeptCopy], *, ended: bool = False) -> None:
        for kept in copies:
            link = self._neighbours.find(kept.source)
            if link is not None:
                key, tokens = kept.plan.key, kept.intake.kept_tokens
                one = pb.CopyKept(session=key.session, epoch=key.epoch, tokens=tokens, ended=ended)
                load = self.own_load()
                told = pb.CopiesKept(
                    copies=[one], decoding_tokens=load.decoding_tokens, prompt_tokens=load.prompt_tokens
                )
                link.post(told)

    def _drop(self, kept: KeptCopy, fault: str) -> None:
        """Ends a copy for what came of it, or did not come."""
        self._refusals.refused("copies that cannot be kept", kept.source)
        _log.info("a copy of %s ends: %s", kept.source, fault)
        self._leases.copies.release(kept.plan.key)

    def _ended(self, lease: Lease) -> None:
        """The lease book has ended a copy."""
        kept = self._copies.pop(lease.key.session, None)
        if kept is None:
            return
        self._let_go(kept)
        key, span = kept.plan.key, kept.span
        kept.owner.post(
            pb.Failed(
                session=key.session,
                epoch=key.epoch,
                peer_id=self._peer_id,
                start=span.start,
                stop=span.stop,
                code="copy",
                detail="its copy is kept no longer",
            )
        )

    def _let_go(self, kept: KeptCopy) -> None:
        if kept.cache is not None:
            kept.cache.close()
        kept.inputs.close()
        self._tell_hop((kept,), ended=True)

    def _written(self, kept: KeptCopy, error: Exception | None) -> None:
        if error is not None:
            self._drop(kept, str(error))
            return
        self._leases.copies.record_lag(kept.plan.key.session, kept.intake.lacking_tokens)
        self._tell_hop((kept,))


def _waiting_bytes(kept: KeptCopy) -> int:
    return kept.intake.waiting_bytes
