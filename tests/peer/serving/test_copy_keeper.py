"""What is sent or not reached for one copy, or for one epoch of it, costs no other copy and no later epoch anything."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.circuits.counted_copies import PLAN, ROW_BYTES, CountingCache, CountingEngine
from support.links.data_plane import DEADLINE_S, SPEC, asynchronous, soon, until
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.sessions import HopPlan, SessionPlan
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import MemoryPlan
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.serving import copy_keeper
from molink.peer.serving.copy_keeper import CopyKeeper
from molink.peer.serving.request_limits import RequestRefused
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

HOP = 1
STANDBY = facts_of(Identity.generate())
OTHER_HOP = facts_of(Identity.generate())
UNREACHED = LinkError("hop", "nobody is there")


class Cache(CountingCache):
    """One that may be closed."""

    def close(self) -> None:
        self.closed = True


class Neighbours:
    """As links to hops, each of which is reached, or given up, when the test says so."""

    def __init__(self) -> None:
        self.dials: dict[str, asyncio.Future[None]] = {}
        self.told: list[tuple[int, bool]] = []
        """Of what hops heard of copies: the epoch, and whether that had ended."""

    async def link(self, facts: PeerFacts, _: object) -> None:
        await self.dial(facts.peer_id)

    def dial(self, peer_id: str) -> asyncio.Future[None]:
        return self.dials.setdefault(peer_id, asyncio.get_running_loop().create_future())

    def find(self, _: str) -> "Neighbours":
        return self

    def post(self, header: pb.CopiesKept) -> None:
        self.told += [(one.epoch, one.ended) for one in header.copies]


class Standby:
    """A peer that keeps copies of second hops, whose engine is never idle, and their client."""

    def __init__(self, memory: "Memory | None" = None, thread: EngineThread | None = None) -> None:
        self.leases = leases = LeaseBook(SPEC, MemoryPlan(100_000, 0, 2_000))
        leases.preload(SPEC.whole, 0.0)
        leases.loaded(SPEC.whole)
        counting, idle = CountingEngine(), Idle()
        counting.new_cache = lambda *_, **__: Cache() if memory is None else memory.new_cache()  # type: ignore[attr-defined]
        self.thread: Any = thread or SimpleNamespace(call=called)
        self.neighbours = Neighbours()
        given: tuple[Any, ...] = (counting, leases, self.thread, idle, InputLogs(10**6), self.neighbours)
        self.keeper = CopyKeeper(STANDBY.peer_id, *given)
        self.failed: list[int] = []
        """Epochs whose copies the client has heard to have ended."""
        self.client: Any = SimpleNamespace(
            peer_id="client",
            remote=SimpleNamespace(network=""),
            post=lambda one: self.failed.append(one.epoch),
        )

    async def keep(self, plan: SessionPlan) -> asyncio.Task[None]:
        """Asks for a copy; what tells its hop of that, and is dialling it."""
        before = asyncio.all_tasks()
        await self.keeper.keep(self.client, plan, HOP)
        (task,) = asyncio.all_tasks() - before
        await until(lambda: plan.hops[HOP].peer_id in self.neighbours.dials)
        return task

    def send(self, plan: SessionPlan, tokens: int) -> None:
        """The hop sends so many further tokens of its copy, as what it computes from."""
        kept, size = self.keeper.find(plan.key.session), tokens * ROW_BYTES
        assert kept is not None
        part = pb.CopyPart(
            session=plan.key.session, epoch=plan.key.epoch, start=kept.intake.awaited_tokens, tokens=tokens,
            payload_bytes=size, form=pb.INPUTS,
        )  # fmt: skip
        link: Any = SimpleNamespace(peer_id=plan.hops[HOP].peer_id)
        self.keeper.on_parts(link, pb.CopyParts(parts=[part]), memoryview(bytes(size)))

    def waiting(self, *plans: SessionPlan) -> list[int | None]:
        """How many tokens of these copies wait; None of one that has ended."""
        found = [self.keeper.find(plan.key.session) for plan in plans]
        return [None if kept is None else kept.intake.awaited_tokens for kept in found]


class Idle:
    """As the idle moments of an engine that has none."""

    def add_source(self, *_: object) -> None:
        return None

    def wake(self) -> None:
        return None


async def called(function: Callable[[], object]) -> object:
    return function()


def plan_of(session: int, epoch: int = 1, hop: PeerFacts | None = None) -> SessionPlan:
    """A circuit whose second hop has this standby."""
    first, second = PLAN.hops
    facts = hop or second.facts
    last = HopPlan(facts.peer_id, second.span, facts, STANDBY)
    return replace(
        PLAN, key=PLAN.key._replace(session=bytes([session]) * 16, epoch=epoch), hops=(first, last)
    )


# -- what waits


@asynchronous
async def test_where_more_would_wait_than_may_that_copy_ends_of_which_most_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_keeper, "MOST_WAITING_BYTES", 12 * ROW_BYTES)
    standby, plans = Standby(), [plan_of(number) for number in range(3)]
    for plan in plans:
        (await standby.keep(plan)).cancel()
    for plan, tokens in zip(plans, (1, 9, 2), strict=True):
        standby.send(plan, tokens)
    assert standby.waiting(*plans) == [1, 9, 2]
    standby.send(plans[0], 1)
    assert standby.waiting(*plans) == [2, None, 2]
    standby.send(plans[2], 7)
    assert standby.waiting(*plans) == [2, None, 9]
    standby.send(plans[2], 2)
    assert standby.waiting(*plans) == [2, None, None]


# -- dials


@asynchronous
async def test_a_hop_of_an_older_epoch_that_is_not_reached_costs_the_copy_of_the_newer_one_nothing() -> None:
    standby, first, second = Standby(), plan_of(1), plan_of(1, 2, OTHER_HOP)
    older, newer = await standby.keep(first), await standby.keep(second)
    standby.neighbours.dial(first.hops[HOP].peer_id).set_exception(UNREACHED)
    await older
    assert standby.waiting(second) == [0]
    standby.neighbours.dial(OTHER_HOP.peer_id).set_result(None)
    standby.neighbours.dial(first.hops[0].peer_id).set_result(None)
    await newer
    assert standby.neighbours.told == [(1, True), (2, False)]
    assert standby.failed == []


@asynchronous
async def test_a_hop_that_is_not_reached_has_no_copy_and_its_client_hears_of_it() -> None:
    standby, plan = Standby(), plan_of(1)
    task = await standby.keep(plan)
    standby.neighbours.dial(plan.hops[HOP].peer_id).set_exception(UNREACHED)
    await task
    assert standby.waiting(plan) == [None]
    assert standby.failed == [1]


@pytest.mark.parametrize("is_written", [False, True])
@asynchronous
async def test_a_hop_that_is_reached_after_its_copy_has_ended_hears_of_none(*, is_written: bool) -> None:
    """Wherever that comes, be it that a part is being written then."""
    standby, plan = Standby(), plan_of(1)
    task = await standby.keep(plan)
    kept = standby.keeper.find(plan.key.session)
    assert kept is not None
    kept.written_parts = int(is_written)
    assert standby.keeper.release(plan.key, "client")
    for one in plan.hops:
        standby.neighbours.dial(one.peer_id).set_result(None)
    await task
    assert standby.neighbours.told == [(1, True)]


# -- memory


class Counted(Cache):
    """One whose memory is counted until it is closed."""

    def __init__(self, memory: "Memory") -> None:
        self.memory = memory
        memory.caches.append(self)

    def close(self) -> None:
        self.closed = True


class Memory:
    """The memory of an engine, which has room for one cache."""

    def __init__(self) -> None:
        self.caches: list[Counted] = []

    @property
    def taken(self) -> int:
        return sum(not one.closed for one in self.caches)

    def new_cache(self, *_: object, **__: object) -> Counted:
        if self.taken:
            raise MemoryError("all of it is taken")
        return Counted(self)


@asynccontextmanager
async def standby_with(memory: Memory) -> AsyncGenerator[tuple[Standby, threading.Event]]:
    """A standby whose engine is at a long step until the event is set."""
    ends = threading.Event()
    async with EngineThread() as thread:
        thread.begin(lambda: ends.wait(DEADLINE_S), lambda _: None)
        standby = Standby(memory, thread)
        try:
            yield standby, ends
        finally:
            ends.set()
            await soon(asyncio.ensure_future(standby.keeper.close()))


@asynchronous
async def test_a_copy_that_makes_way_while_it_waits_for_the_engine_takes_none_of_the_memory() -> None:
    """Or a lease that it has made way for, and whose cache is made next, would find none."""
    memory = Memory()
    async with standby_with(memory) as (standby, ends):
        asked = asyncio.create_task(standby.keeper.keep(standby.client, plan_of(1), HOP))
        await until(lambda: standby.waiting(plan_of(1)) == [0])
        standby.leases.copies.end_all()
        leased = asyncio.create_task(standby.thread.call(memory.new_cache))
        await asyncio.sleep(0)
        ends.set()
        assert not (await soon(leased)).closed
        with pytest.raises(RequestRefused, match="had to make way"):
            await soon(asked)
        assert memory.taken == 1


@asynchronous
async def test_a_client_that_comes_back_while_its_copy_waits_for_the_engine_has_one_with_memory() -> None:
    """Its first link, and what was asked for over that, has ended by then."""
    memory, first, second = Memory(), plan_of(1), plan_of(1, 2)
    async with standby_with(memory) as (standby, ends):
        asked = asyncio.create_task(standby.keeper.keep(standby.client, first, HOP))
        await until(lambda: standby.waiting(first) == [0])
        again = asyncio.create_task(standby.keeper.keep(standby.client, second, HOP))
        await until(lambda: standby.keeper.renew(second.key, "client") == 0)
        asked.cancel()
        await asyncio.wait((asked,), timeout=DEADLINE_S)
        assert not again.done(), "there is no memory yet"
        ends.set()
        await soon(again)
        kept = standby.keeper.find(second.key.session)
        assert kept is not None
        assert kept.cache is not None
        assert not kept.cache.closed
        assert memory.taken == 1


@asynchronous
async def test_a_copy_without_memory_is_booked_no_longer_in_whatever_epoch_it_is_by_then() -> None:
    memory, first, second = Memory(), plan_of(1), plan_of(1, 2)
    memory.new_cache()
    async with standby_with(memory) as (standby, ends):
        asked = [asyncio.create_task(standby.keeper.keep(standby.client, first, HOP))]
        await until(lambda: standby.waiting(first) == [0])
        asked.append(asyncio.create_task(standby.keeper.keep(standby.client, second, HOP)))
        await until(lambda: standby.keeper.renew(second.key, "client") == 0)
        ends.set()
        for one in asked:
            with pytest.raises(RequestRefused, match="no memory for a copy"):
                await soon(one)
        assert standby.keeper.find(second.key.session) is None
        assert (len(standby.leases.copies), standby.keeper.kv_bytes) == (0, 0)
        assert standby.failed == [2]
