"""What a stranger may send: no bytes on any protocol end a host or disturb its neighbours."""

import random
from dataclasses import replace

import pytest
import trio
from libp2p.network.stream.exceptions import StreamError
from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.gossip.table import pull
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream, StreamEndedError
from molink.dht.host.host import DialError, Host, Listen, open_host
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.node.network import NetworkSettings, open_network
from molink.dht.records.announcement import sign_facts, sign_state

ADA, MALLORY = Identity.generate(), Identity.generate()
SETTINGS = NetworkSettings(ADA, Listen("127.0.0.1", 0), (), None, replace(QUICK, interval_s=10.0))


def nothing() -> None:
    """Nobody waits for changes."""


async def table_of(host: Host, peer_id: str) -> Membership:
    """What the peer answers when asked in earnest."""
    membership = Membership(None, nothing)
    stream = CompressedStream(await host.open_stream(peer_id, TABLE, timeout_s=120))
    await pull(stream, membership, timeout_s=120)
    await stream.close()
    return membership


async def all_frames(stream: CompressedStream) -> None:
    while True:
        await stream.receive(5000)


async def say_nonsense(address: str, protocol: str, chance: random.Random) -> None:
    async with open_host(Identity.generate(), None, None) as stranger:
        await stranger.dial(address, timeout_s=120)
        for _ in range(3):
            try:
                stream = await stranger.open_stream(ADA.peer_id, protocol, timeout_s=120)
                await stream.write(chance.randbytes(chance.choice((1, 2, 100, 5000))))
            except (DialError, StreamError):  # it has hung up on the nonsense before
                return
            await (stream.close if chance.random() < 0.5 else stream.reset)()


@pytest.mark.parametrize("protocol", [GOSSIP, TABLE, "/ipfs/ping/1.0.0"])
def test_garbage_ends_its_stream_and_nothing_else(protocol: str) -> None:
    async def scenario() -> None:
        chance = random.Random(7)
        membership = Membership(ADA.peer_id, nothing)
        async with open_network(SETTINGS, membership) as network:
            network.publisher.announce(facts_of(ADA), state_of(ADA))
            with trio.fail_after(120):
                for _ in range(10):
                    await say_nonsense(network.host.addresses[0], protocol, chance)
                async with open_host(MALLORY, None, None) as honest:
                    await honest.dial(network.host.addresses[0], timeout_s=120)
                    known = await table_of(honest, ADA.peer_id)
            assert [view.peer_id for view in known.snapshot()] == [ADA.peer_id]

    trio.run(scenario)


def test_streams_of_protocols_nobody_serves_are_refused() -> None:
    async def scenario() -> None:
        membership = Membership(ADA.peer_id, nothing)
        async with open_network(SETTINGS, membership) as network, open_host(MALLORY, None, None) as mallory:
            await mallory.dial(network.host.addresses[0], timeout_s=120)
            for protocol in ("/ipfs/id/1.0.0", "/ipfs/id/push/1.0.0", "/meshsub/1.1.0", "/no/such"):
                with pytest.raises(DialError):
                    await mallory.open_stream(ADA.peer_id, protocol, timeout_s=120)
            assert (await table_of(mallory, ADA.peer_id)).snapshot() == ()

    trio.run(scenario)


def test_a_handler_that_fails_ends_only_its_stream() -> None:
    async def scenario() -> None:
        async with (
            open_host(ADA, Listen("127.0.0.1", 0), None) as host,
            open_host(MALLORY, None, None) as other,
        ):

            async def fail(stream: FrameStream) -> None:
                raise LookupError(stream.peer_id)

            async def echo(stream: FrameStream) -> None:
                await stream.send([await stream.receive(100)])

            host.handle("/fail/1", fail)
            host.handle("/echo/1", echo)
            await other.dial(host.addresses[0], timeout_s=120)
            for _ in range(5):
                with pytest.raises((DialError, StreamEndedError)):
                    await (await other.open_stream(ADA.peer_id, "/fail/1", timeout_s=120)).receive(100)
            stream = await other.open_stream(ADA.peer_id, "/echo/1", timeout_s=120)
            await stream.send([b"still here"])
            assert await stream.receive(100) == b"still here"

    trio.run(scenario)


def test_a_liar_is_no_longer_listened_to() -> None:
    async def scenario() -> None:
        membership = Membership(ADA.peer_id, nothing)
        async with open_network(SETTINGS, membership) as network, open_host(MALLORY, None, None) as mallory:
            await mallory.dial(network.host.addresses[0], timeout_s=120)
            stream = CompressedStream(await mallory.open_stream(ADA.peer_id, GOSSIP, timeout_s=120))
            facts, state = sign_facts(facts_of(MALLORY), MALLORY), sign_state(state_of(MALLORY), MALLORY)
            await stream.send([facts, state[:-1] + bytes((state[-1] ^ 1,))] * 40)
            with trio.fail_after(120), pytest.raises(StreamEndedError):
                await all_frames(stream)
            assert membership.snapshot() == ()

    trio.run(scenario)


def test_a_link_on_which_nothing_arrives_is_dead() -> None:
    async def scenario() -> None:
        membership = Membership(ADA.peer_id, nothing)
        async with open_network(SETTINGS, membership) as network, open_host(MALLORY, None, None) as mallory:
            await mallory.dial(network.host.addresses[0], timeout_s=120)
            stream = CompressedStream(await mallory.open_stream(ADA.peer_id, GOSSIP, timeout_s=120))
            with trio.fail_after(120):
                assert await stream.receive(10) == b""
                assert network.gossip.neighbours == (MALLORY.peer_id,)
                with pytest.raises(StreamEndedError):
                    await all_frames(stream)
            assert network.gossip.neighbours == ()

    trio.run(scenario)


def test_connections_that_come_and_go_leave_room_for_the_next() -> None:
    async def scenario() -> None:
        membership = Membership(ADA.peer_id, nothing)
        async with open_network(SETTINGS, membership) as network, open_host(MALLORY, None, None) as mallory:
            slots = network.host._network._inbound_limiter
            for _ in range(10):
                await mallory.dial(network.host.addresses[0], timeout_s=120)
                await mallory.hang_up(ADA.peer_id)
            with trio.fail_after(120):
                while network.host.connections or slots.borrowed_tokens:  # noqa: ASYNC110 nothing to wait on
                    await trio.sleep(0.01)

    trio.run(scenario)
