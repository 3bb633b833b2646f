"""A network that is too busy to hear of something ends nothing: it is announced later, and what was to be done is."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from support.links.data_plane import asynchronous, soon, until
from support.swarms.lease_books import SPEC, book, granted, key
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.records.records import PeerFacts, PeerState
from molink.peer.announcing.announcer import Announcer, Measurements
from molink.peer.announcing.prober import Prober
from molink.peer.daemon.parts import PeerParts
from molink.peer.daemon.peer import let_sessions_end
from molink.peer.engine.stepping import Stepper
from molink.peer.host_policy import rules
from molink.peer.host_policy.pausing import Pausing
from molink.peer.host_policy.rules import HostPolicy, Readings
from molink.peer.profiling.profile import Profile
from molink.peer.profiling.step_times import StepTimes
from molink.peer.serving.data_plane import DataPlane
from molink.peer.wire.transport.line_quality import LineQuality
from molink.shards.spec import Span


class Network:
    """What an announcer uses of Discovery: it hears something unless it is busy."""

    def __init__(self) -> None:
        self.busy = True
        self.asked = 0
        self.heard: list[tuple[PeerFacts | None, PeerState]] = []

    async def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        self.asked += 1
        if self.busy:
            raise TimeoutError("the network took longer than 5 s")
        self.heard.append((facts, state))


class SwarmMember:
    """A peer that holds three layers, in a swarm whose network is busy."""

    def __init__(self) -> None:
        facts = replace(facts_of(Identity.generate()), span_limit=None)
        self.network, self.leases, self.told_to_leave = Network(), book(), 0
        self.leases.preload(Span(0, 3), 0.0)
        self.leases.loaded(Span(0, 3))
        profile = Profile(facts.layer_latencies, facts.embed_ms, facts.head_ms, facts.load_bytes_per_s)
        no_links = SimpleNamespace(measurements=lambda: (), coordinate=None)
        self.announcer = Announcer(
            cast("Discovery", self.network),
            facts,
            SPEC,
            self.leases,
            cast("Stepper", SimpleNamespace(queued=0)),
            asyncio.Event(),
            Measurements(cast("Prober", no_links), LineQuality, StepTimes(profile)),
        )
        guessing = SimpleNamespace(source_of=None)
        self.serving = SimpleNamespace(
            say_leaving=self._say_leaving,
            admission=SimpleNamespace(hand_back=lambda _: None),
            loader=self,
            stepper=SimpleNamespace(guessing=guessing),
        )

    def _say_leaving(self, *_: object) -> None:
        self.told_to_leave += 1

    def abandon(self) -> None:
        """Nothing is being loaded."""

    async def drop(self, spans: tuple[Span, ...]) -> None:
        self.leases.drop(*spans)


@asynchronous
async def test_what_the_network_is_too_busy_for_is_announced_later_with_the_facts_that_were_due() -> None:
    member = SwarmMember()
    network, announcer = member.network, member.announcer
    await announcer.announce_or_later(facts_too=True)
    assert (network.asked, network.heard) == (1, [])
    network.busy = False
    keeping = asyncio.create_task(announcer.keep_announced())
    await until(lambda: bool(network.heard))
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    (facts, state), *_ = network.heard
    assert facts is not None
    assert state.spans == (Span(0, 3),)
    await announcer.announce()
    assert network.heard[-1][0] is None  # they have been said


@pytest.mark.full
@asynchronous
async def test_a_peer_pauses_although_nobody_can_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PAUSE_AFTER_S", 0.0)
    member = SwarmMember()
    parts = (member.leases, cast("DataPlane", member.serving), member.announcer)
    pausing = Pausing(HostPolicy(), "cpu", lambda: Readings(0, on_battery=True), *parts, lambda _: None)
    keeping = asyncio.create_task(pausing.enforce())
    await until(lambda: keeping.done() or not member.leases.held)
    assert not keeping.done()
    assert (member.network.asked, member.told_to_leave) == (1, 1)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@asynchronous
async def test_sessions_of_a_peer_that_leaves_have_their_time_although_nobody_can_hear_of_it() -> None:
    member = SwarmMember()
    granted(member.leases.request(key(1), Span(0, 3), 10, "client", 0.0))
    parts = SimpleNamespace(leases=member.leases, serving=member.serving, announcer=member.announcer)
    ended, at_once = asyncio.Event(), asyncio.Event()
    draining = asyncio.create_task(let_sessions_end(cast("PeerParts", parts), ended, at_once))
    await until(lambda: draining.done() or member.network.asked == 1)
    await asyncio.sleep(0)
    assert not draining.done()
    member.leases.release(key(1))
    ended.set()
    await soon(draining)
