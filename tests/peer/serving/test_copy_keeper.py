"""What is sent or not reached for one copy, or for one epoch of it, costs no other copy and no later epoch anything."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.circuits.counted_copies import PLAN, ROW_BYTES, CountingCache, CountingEngine
from support.links.data_plane import SPEC, asynchronous, until
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.engine.sessions import HopPlan, SessionPlan
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import MemoryPlan
from molink.peer.redundancy.input_log import InputLogs
from molink.peer.serving import copy_keeper
from molink.peer.serving.copy_keeper import CopyKeeper
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

    def __init__(self) -> None:
        leases = LeaseBook(SPEC, MemoryPlan(100_000, 0, 2_000))
        leases.preload(SPEC.whole, 0.0)
        leases.loaded(SPEC.whole)
        engine, idle, thread = CountingEngine(), Idle(), SimpleNamespace(call=called)
        engine.new_cache = lambda *_, **__: Cache()  # type: ignore[attr-defined]
        self.neighbours = Neighbours()
        given: tuple[Any, ...] = (engine, leases, thread, idle, InputLogs(10**6), self.neighbours)
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
