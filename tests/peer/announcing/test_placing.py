"""Peers that place themselves: they do not choose the same, mend a stuck swarm, and let go of nothing that is needed.

Discovery is a board that all see at once, loading a change of the lease book; the decisions and the book are real.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from support.links.data_plane import asynchronous, soon, until
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerFacts, PeerState, PeerView
from molink.peer.announcing import placement_core, placing
from molink.peer.announcing.announcer import Announcer, Measurements, joining_machine
from molink.peer.announcing.placing import PlacementDriver
from molink.peer.announcing.prober import Prober
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import Granted, LeaseBook, LeaseKey
from molink.peer.memory.memory import MemoryPlan
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.serving.layer_loader import LayerLoader
from molink.peer.wire.transport.line_quality import LineQuality
from molink.routing.latency.coordinates import START
from molink.routing.placement import rebalancing
from molink.shards.spec import ModelSpec, Span

SPEC = ModelSpec(
    model_hash="ab" * 32, content_hash="cd" * 32, name="test/model", architecture="llama", layers=12, hidden_size=8,
    vocabulary_size=16, context_length=64, dtype="float32", quantization="none", layer_bytes=(1000,) * 12,
    embed_bytes=0, head_bytes=0, kv_bytes_per_token=(1,) * 12, stop_token_ids=(0,),
)  # fmt: skip
IDENTITIES = sorted((Identity.generate() for _ in range(4)), key=lambda one: one.peer_id)
FIRST, SECOND = Span(0, 9), Span(3, 12)
LEASE = LeaseKey(b"s" * 16, 1)


class Board:
    """What everybody has announced, as everybody sees it."""

    def __init__(self) -> None:
        self.views: dict[str, PeerView] = {}
        self.told: list[PeerState] = []
        self.is_busy: Callable[[PeerState], bool] = lambda _: False
        """Whether the network is too busy to hear what is said."""

    async def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        if self.is_busy(state):
            raise TimeoutError
        known = facts or self.views[state.peer_id].facts
        self.views[state.peer_id] = PeerView(replace(known, ttl_s=9), replace(state, ttl_s=9), 0.0)
        self.told.append(state)

    def snapshot(self, model_hash: str) -> tuple[PeerView, ...]:
        return tuple(view for view in self.views.values() if view.facts.model.model_hash == model_hash)

    async def refresh(self) -> None:
        """Everybody knows everything."""


class Loader:
    """What placing uses of LayerLoader. It fails to load or to fetch as often as that is above 0."""

    def __init__(self, leases: LeaseBook) -> None:
        self.leases = leases
        self.fails = 0
        self.unfetched = 0
        self.dropped: list[Span] = []

    async def fetch(self, _: Span) -> None:
        if self.unfetched > 0:
            self.unfetched -= 1
            raise OSError("the hub is away")

    async def load(self, span: Span) -> None:
        if self.fails > 0:
            self.fails -= 1
            self.leases.load_failed(span)
            raise OSError("the disk is gone")
        self.leases.loaded(span)

    async def drop(self, spans: tuple[Span, ...]) -> None:
        self.leases.drop(*spans)
        self.dropped += spans


class NoLinks:
    """What an announcer uses of Prober."""

    coordinate = START

    def measurements(self) -> tuple[()]:
        return ()


class NoSteps:
    """What an announcer uses of Stepper."""

    queued = 0


class Member:
    """A peer with room for nine layers of twelve."""

    def __init__(self, board: Board, identity: Identity) -> None:
        facts = facts_of(identity)
        self.peer_id = identity.peer_id
        self.leases = LeaseBook(SPEC, MemoryPlan(20_000, 0, 9000))
        self.loader = Loader(self.leases)
        self.chosen: list[Span | None] = []
        self.fetched_bytes_per_s: float | None = None
        facts = replace(
            facts,
            model=replace(facts.model, model_hash=SPEC.model_hash, layers=12),
            span_limit=None,
            links=(),
        )
        self.profile = Profile(facts.layer_latencies, facts.embed_ms, facts.head_ms, facts.load_bytes_per_s)
        self.changed = asyncio.Event()
        discovery = cast("Discovery", board)
        self.prober = cast("Prober", NoLinks())
        self.announcer = Announcer(
            discovery,
            facts,
            SPEC,
            self.leases,
            cast("Stepper", NoSteps()),
            self.changed,
            Measurements(self.prober, LineQuality, StepTimes(self.profile), lambda: self.fetched_bytes_per_s),
        )
        loader = cast("LayerLoader", self.loader)
        self.placing = PlacementDriver(discovery, SPEC, self.leases, loader, self.announcer)

    async def join(self) -> None:
        await self.placing.join(
            lambda: joining_machine(self.announcer.facts, SPEC, self.leases, self.profile, self.prober),
            lambda preview: self.chosen.append(preview.span),
        )
        await self.announcer.announce(facts_too=True)

    async def hold(self, span: Span) -> None:
        self.leases.preload(span, 0.0)
        await self.loader.load(span)
        await self.announcer.announce(facts_too=True)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_core, "SETTLE_S", 0.05)
    monkeypatch.setattr(placing, "LOOK_EVERY_S", (0.05, 0.1))


async def swarm_of(*spans: Span) -> tuple[Board, list[Member]]:
    board = Board()
    members = [Member(board, identity) for identity in IDENTITIES[: len(spans)]]
    for member, span in zip(members, spans, strict=True):
        await member.hold(span)
    return board, members


def keep_placed(*members: Member) -> list[asyncio.Task[None]]:
    return [
        asyncio.create_task(duty)
        for member in members
        for duty in (member.placing.keep_placed(), member.announcer.keep_announced())
    ]


async def end(duties: list[asyncio.Task[None]]) -> None:
    for duty in duties:
        duty.cancel()
    for ended in await asyncio.gather(*duties, return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError), ended


def covered(members: list[Member]) -> set[int]:
    return {layer for member in members for span in member.leases.held for layer in span}


@asynchronous
async def test_two_that_join_at_the_same_moment_hold_all_layers_between_them() -> None:
    board, [known] = await swarm_of(Span(0, 1))
    both = [Member(board, identity) for identity in IDENTITIES[1:3]]
    await soon(asyncio.gather(*(member.join() for member in both)))
    assert covered([known, *both]) == set(SPEC.whole)
    assert [member.chosen for member in both] == [[span] for member in both for span in member.leases.held]


@asynchronous
async def test_who_joins_alone_takes_the_first_layers_and_says_so_before_it_holds_them() -> None:
    board = Board()
    member = Member(board, IDENTITIES[0])
    await soon(member.join())
    assert [(state.spans, state.loading) for state in board.told] == [((), (FIRST,)), ((FIRST,), ())]


@asynchronous
async def test_who_has_room_for_nothing_joins_and_holds_nothing() -> None:
    member = Member(Board(), IDENTITIES[0])
    member.leases = LeaseBook(SPEC, MemoryPlan(900, 0, 900))
    await soon(member.join())
    assert member.chosen == [None]


@asynchronous
async def test_two_that_hold_the_same_layers_come_to_hold_all_of_them() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    duties = keep_placed(*members)
    await until(lambda: covered(members) == set(SPEC.whole))
    await end(duties)
    assert [member.leases.held for member in members] == [(FIRST,), (SECOND,)]
    first_told = next(state for state in board.told if state.loading)
    assert (first_told.spans, first_told.loading) == ((Span(3, 9),), (Span(9, 12),))
    assert members[1].leases.free_weight_bytes == 0


@asynchronous
async def test_of_many_that_hold_the_same_layers_only_as_many_move_as_are_needed() -> None:
    _, members = await swarm_of(FIRST, FIRST, FIRST, FIRST)
    duties = keep_placed(*members)
    await until(lambda: covered(members) == set(SPEC.whole))
    await end(duties)
    assert sum(bool(member.loader.dropped) for member in members) == 1


@asynchronous
async def test_a_session_that_comes_after_the_word_keeps_its_layers() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    mover = members[1]
    duties = keep_placed(*members)
    await until(lambda: any(state.loading for state in board.told))
    assert isinstance(mover.leases.request(LEASE, Span(0, 9), 10, "client", 0.0), Granted)
    await until(lambda: board.told[-1].spans == (FIRST,) and board.told[-1].sessions == 1)
    assert mover.leases.held == (FIRST,)
    assert mover.loader.dropped == []
    mover.leases.release(LEASE)
    await until(lambda: mover.leases.held == (SECOND,))
    await end(duties)


@asynchronous
async def test_a_load_that_fails_ends_no_duty_and_has_the_old_layers_loaded_again() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    members[1].loader.fails = 1
    duties = keep_placed(*members)
    await until(lambda: members[1].loader.fails == 0)
    await until(lambda: members[1].leases.held == (FIRST,))
    await until(lambda: board.views[members[1].peer_id].state.spans == (FIRST,))
    await end(duties)
    assert members[1].loader.dropped == [Span(0, 3)]


@asynchronous
async def test_a_busy_network_keeps_nobody_from_loading_the_old_layers_again() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    members[1].loader.fails = 1
    board.is_busy = lambda state: state.loading == (Span(0, 3),)
    duties = keep_placed(*members)
    await until(lambda: members[1].loader.fails == 0)
    await until(lambda: members[1].leases.held == (FIRST,))
    await end(duties)
    assert members[1].loader.dropped == [Span(0, 3)]


@pytest.mark.full
@asynchronous
async def test_nothing_is_dropped_that_others_have_not_heard_of() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    refused: list[PeerState] = []
    board.is_busy = lambda state: bool(state.loading) and not refused.append(state)
    duties = keep_placed(*members)
    await until(lambda: bool(refused))
    assert [member.loader.dropped for member in members] == [[], []]
    board.is_busy = lambda _: False
    await until(lambda: covered(members) == set(SPEC.whole))
    await end(duties)


@asynchronous
async def test_a_busy_network_keeps_nobody_from_joining() -> None:
    board = Board()
    board.is_busy = lambda state: bool(state.loading)
    member = Member(board, IDENTITIES[0])
    await soon(member.join())
    assert member.leases.held == (FIRST,)


@asynchronous
async def test_where_neither_new_nor_old_layers_can_be_loaded_their_memory_is_left_to_circuits() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    members[1].loader.fails = 2
    duties = keep_placed(*members)
    await until(lambda: members[1].loader.fails == 0)
    await until(lambda: board.told[-1].spans == (Span(3, 9),) and board.told[-1].loading == ())
    await end(duties)
    assert members[1].leases.free_weight_bytes == SPEC.weight_bytes(Span(9, 12))


@asynchronous
async def test_who_cannot_fetch_the_new_layers_drops_nothing() -> None:
    board, members = await swarm_of(FIRST, FIRST)
    members[1].loader.unfetched = 1
    duties = keep_placed(*members)
    await until(lambda: members[1].loader.unfetched == 0)
    await until(lambda: board.views[members[1].peer_id].state.spans == (FIRST,))
    await end(duties)
    assert members[1].loader.dropped == []


@asynchronous
async def test_who_fetches_what_it_loads_announces_the_rate_at_which_both_are_done() -> None:
    member = Member(Board(), IDENTITIES[0])
    loaded_bytes_per_s = member.profile.load_bytes_per_s
    assert member.announcer.own_view().facts.load_bytes_per_s == loaded_bytes_per_s
    member.fetched_bytes_per_s = loaded_bytes_per_s / 3
    assert member.announcer.own_view().facts.load_bytes_per_s == pytest.approx(loaded_bytes_per_s / 4)


@asynchronous
async def test_a_clock_that_is_set_back_by_days_keeps_nobody_from_moving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board, members = await swarm_of(FIRST, FIRST)
    behind = SimpleNamespace(time=lambda: time.time() - 1e6, monotonic=time.monotonic)
    monkeypatch.setattr(placing, "time", behind)
    duties = keep_placed(*members)
    await until(lambda: covered(members) == set(SPEC.whole))
    await end(duties)
    assert board.told


def test_it_decides_by_the_same_objects_as_members_of_simulated_swarms() -> None:
    assert placing.next_move is rebalancing.next_move
    assert placing.core is placement_core
