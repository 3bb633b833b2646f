"""A peer that is started again is heard, and gets its link, while its neighbour still holds the link of before; and
keeps its connection when that one ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio
from support.attackers.lying_planes import now_ms
from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream, StreamEndedError
from molink.dht.host.host import Host, Listen, open_host
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.node.network import Network, NetworkSettings, open_network
from molink.dht.records.announcement import sign_facts, sign_state

ADA, BOB = sorted((Identity.generate(), Identity.generate()), key=lambda one: one.peer_id)
"""Of two links that cross Ada's is kept."""
LOOPBACK = Listen("127.0.0.1", 0)
PATIENT = replace(
    QUICK,
    interval_s=600.0,
    silence_s=600.0,
    keepalive_s=600.0,
    anti_entropy_interval_s=600.0,
    redial_s=600.0,
)
"""A link on which nothing arrives stands longer than the test takes, tables are not compared, nobody is dialled again.
"""
WITHIN_S = 120.0


def nothing() -> None:
    """Nobody waits for changes."""


def records(name: str, *addresses: str) -> list[bytes]:
    """What Bob says of himself now."""
    sequence = now_ms()
    facts = replace(facts_of(BOB, sequence=sequence), name=name, addresses=addresses)
    state = state_of(BOB, sequence=sequence + 1, facts_sequence=sequence, ttl_s=600)
    return [sign_facts(facts, BOB), sign_state(state, BOB)]


async def take(stream: FrameStream) -> None:
    """Takes what comes, and says nothing."""
    while True:
        await stream.receive(5000)


@asynccontextmanager
async def linked(
    timing: DiscoveryTiming, *, by_ada: bool = True
) -> AsyncIterator[tuple[Network, Membership, Host]]:
    """Ada with a link to Bob, who is dialled or dials. From then on Bob is as a machine without current: he takes what
    comes, and says nothing."""
    membership = Membership(ADA.peer_id, nothing)
    settings = NetworkSettings(ADA, LOOPBACK, (), None, timing)
    async with open_network(settings, membership) as network, open_host(BOB, LOOPBACK, None) as before:
        if by_ada:
            before.handle(GOSSIP, take)
            for record in records("before", *before.addresses):
                membership.receive(record)
        else:
            await before.dial(network.host.addresses[0], timeout_s=WITHIN_S)
            await speak(before)
        with trio.fail_after(WITHIN_S):
            while BOB.peer_id not in network.gossip.neighbours:  # noqa: ASYNC110 - a link is told to nobody
                await trio.sleep(0.02)
        yield network, membership, before


@asynccontextmanager
async def started_again(network: Network) -> AsyncIterator[Host]:
    """Bob's next process, connected to Ada. It lets itself be asked, so who misses Bob finds him."""
    async with open_host(BOB, None, None) as after:
        after.handle(TABLE, take)
        await after.dial(network.host.addresses[0], timeout_s=WITHIN_S)
        yield after


async def speak(host: Host) -> CompressedStream:
    """Opens a stream over which Bob's next process says what it is."""
    stream = CompressedStream(await host.open_stream(ADA.peer_id, GOSSIP, timeout_s=WITHIN_S))
    await stream.send(records("after"))
    return stream


def test_who_is_started_again_is_heard_while_its_old_link_stands() -> None:
    async def scenario() -> None:
        async with linked(PATIENT) as (network, membership, _), started_again(network) as after:
            await speak(after)
            with trio.fail_after(WITHIN_S):
                while [view.facts.name for view in membership.snapshot()] != ["after"]:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.02)

    trio.run(scenario)


def test_who_is_started_again_gets_its_link_once_no_dial_can_have_crossed_it() -> None:
    async def scenario() -> None:
        hasty = replace(PATIENT, dial_timeout_s=3.0)
        async with linked(hasty) as (network, membership, _), started_again(network) as after:
            network.publisher.announce(facts_of(ADA), state_of(ADA))
            with trio.fail_after(WITHIN_S):
                while True:
                    try:
                        frame = await (await speak(after)).receive(5000)
                    except StreamEndedError:
                        continue
                    assert membership.own.records()[-1] == frame
                    break
            assert [link.peer_id for link in network.gossip.incoming] == [BOB.peer_id]
            assert network.gossip.dialled == ()

    trio.run(scenario)


@pytest.mark.parametrize("by_ada", [True, False], ids=["dialled", "dialling"])
def test_who_is_started_again_keeps_its_connection_when_the_link_of_before_ends(*, by_ada: bool) -> None:
    async def scenario() -> None:
        async with linked(PATIENT, by_ada=by_ada) as (network, _, before), started_again(network) as after:
            await before.close_connections()
            with trio.fail_after(WITHIN_S):
                while network.gossip.neighbours:  # noqa: ASYNC110 - as above
                    await trio.sleep(0.02)
                for _ in range(10):  # by then Ada has done what follows from the end of a link
                    stream = await after.open_stream(ADA.peer_id, TABLE, timeout_s=WITHIN_S)
                    await stream.reset()

    trio.run(scenario)
