"""Strangers at a relay: replayed proofs, crowds of identities, more pairs at once than may be, floods and noise."""

import asyncio
import random
import socket
from contextlib import AsyncExitStack, suppress

import pytest
from support.attackers.strangers import damaged
from support.links.data_plane import asynchronous, soon, until
from support.links.reach_ends import RelayedEnd, RelayEnd

from molink.dht.identity.identity import Identity
from molink.peer.reach.relay_limits import DIAL_BACKS, RelayLimits
from molink.peer.wire.reach.packets import (
    Challenge,
    DialBack,
    DialledBack,
    JoinRequest,
    Packet,
    ReachRequest,
    RelayError,
    RelayHungUp,
    RelayPing,
    RelayProof,
    RelayRefusal,
    RelayWelcome,
    Stay,
    encode_relay,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_client import RelayUser
from molink.peer.wire.reach.relay_proof import prove_user
from molink.peer.wire.reach.ways import Relayed

ELSEWHERE = "127.0.0.2"
"""Loopback addresses are each a network of its own."""


def user() -> RelayUser:
    return RelayUser(Identity.generate(), None)


async def connected(relay: RelayEnd, source: str = "127.0.0.1") -> tuple[socket.socket, Challenge]:
    """A connection from an address, and the relay's challenge."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.bind((source, 0))
    host, _, port = relay.at.address.rpartition(":")
    await soon(asyncio.get_running_loop().sock_connect(connection, (host, int(port))))
    challenge = await soon(read_relay(connection))
    assert isinstance(challenge, Challenge)
    return connection, challenge


async def proven(
    relay: RelayEnd, source: str = "127.0.0.1", identity: Identity | None = None
) -> socket.socket:
    """A connection whose user has proven itself."""
    connection, challenge = await connected(relay, source)
    proof = prove_user(challenge, relay.identity.peer_id, identity or Identity.generate(), None)
    welcome = await answer(connection, proof)
    if not isinstance(welcome, RelayWelcome):
        connection.close()
        raise RelayError(f"not let in: {welcome}")
    return connection


async def answer(connection: socket.socket, question: Packet) -> Packet | None:
    """What the relay says; None: it hangs up."""
    try:
        await write_relay(connection, question)
        return await soon(read_relay(connection))
    except (RelayHungUp, ConnectionError):
        return None


async def carries(relay: RelayEnd, home: RelayedEnd) -> None:
    """An honest user reaches a peer that stays there, and gets what it serves: TLS from its gRPC port."""
    opened = await soon(Relayed(home.end.peer_id, relay.at, user()).open())
    with opened.connection:
        assert opened.host == "127.0.0.1"
    await until(lambda: relay.relay.pairs == 0)


@asynchronous
async def test_a_proof_that_was_overheard_is_worth_nothing_at_this_relay_or_another() -> None:
    async with RelayEnd() as relay, RelayEnd() as other:
        first, challenge = await connected(relay)
        overheard: RelayProof = prove_user(challenge, relay.identity.peer_id, Identity.generate(), None)
        assert isinstance(await answer(first, overheard), RelayWelcome)
        for replayed_at in (relay, other):
            connection, _ = await connected(replayed_at)
            refusal = await answer(connection, overheard)
            assert isinstance(refusal, RelayRefusal)
            assert "signature" in refusal.reason
            with pytest.raises(RelayHungUp):
                await soon(read_relay(connection))
            connection.close()
        first.close()


@asynchronous
async def test_asked_for_all_at_once_there_are_no_more_pairs_than_may_be() -> None:
    limits = RelayLimits(pairs=5, pairs_of_identity=3, pairs_of_network=4)
    async with RelayEnd(limits) as relay, RelayedEnd() as one, RelayedEnd() as two:
        await one.stay(relay.at)
        await two.stay(relay.at)
        asker = user()
        homes = [one.end.peer_id] * 6 + [two.end.peer_id] * 6
        ways = [Relayed(home, relay.at, user()).open() for home in homes]
        ways += [Relayed(one.end.peer_id, relay.at, asker).open() for _ in range(4)]
        results = await soon(asyncio.gather(*ways, return_exceptions=True))
        opened = [result for result in results if not isinstance(result, BaseException)]
        assert all(isinstance(result, RelayError) for result in results if isinstance(result, BaseException))
        assert 1 <= len(opened) <= limits.pairs_of_network
        assert relay.relay.pairs <= limits.pairs_of_network
        for each in opened:
            each.connection.close()
        await until(lambda: relay.relay.pairs == 0)
        await carries(relay, one)


@asynchronous
async def test_whoever_asks_to_be_dialled_back_without_end_is_refused_and_nobody_else_is_dialled() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home:
        await home.stay(relay.at)
        dialled: list[object] = []
        clock = asyncio.get_running_loop().time
        server = await asyncio.start_server(lambda _, writer: dialled.append(writer), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with AsyncExitStack() as stack:
            stack.callback(server.close)
            found = refused = 0
            began_s = clock()
            for _ in range(30):
                connection = await proven(relay)
                said = asyncio.ensure_future(answer(connection, DialBack(port, bytes(32))))
                await until(lambda: said.done() or len(dialled) > found)  # noqa: B023 - awaited here
                if not said.done():
                    found += 1
                    dialled[-1].transport.abort()  # type: ignore[attr-defined]
                refused += isinstance(await said, RelayRefusal)
                connection.close()
            elsewhere = await proven(relay, ELSEWHERE)
            assert await answer(elsewhere, DialBack(port, bytes(32))) == DialledBack(found=False)
            elsewhere.close()
        assert len(dialled) + refused == 30
        refilled = DIAL_BACKS.network.per_s * (clock() - began_s)
        assert DIAL_BACKS.network.at_once <= len(dialled) <= DIAL_BACKS.network.at_once + refilled
        await carries(relay, home)


async def crowd(relay: RelayEnd, count: int, stack: AsyncExitStack) -> int:
    """So many identities of one network that stay and hold; returns how many were not told to go."""
    held = []
    for _ in range(count):
        with suppress(OSError, RelayError):
            connection = await proven(relay, ELSEWHERE)
            stack.enter_context(connection)
            await write_relay(connection, Stay())
            await write_relay(connection, RelayPing())
            held.append(connection)
    answers = await asyncio.gather(*(soon(read_relay(one)) for one in held), return_exceptions=True)
    return sum(not isinstance(one, BaseException | RelayRefusal) for one in answers)


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.attack)])
@asynchronous
async def test_crowds_of_identities_hold_no_more_than_a_networks_places_and_others_are_served(
    count: int,
) -> None:
    limits = RelayLimits()
    async with RelayEnd(limits) as relay, RelayedEnd() as home, AsyncExitStack() as stack:
        await home.stay(relay.at)
        assert await crowd(relay, count, stack) <= limits.of_network
        assert len(relay.relay.stays) <= 1 + limits.of_network
        assert home.end.peer_id in relay.relay.stays
        await carries(relay, home)


@asynchronous
async def test_a_stay_that_pings_without_end_does_not_keep_the_relay_from_anything() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home:
        await home.stay(relay.at)
        flooding = await proven(relay)
        await write_relay(flooding, Stay())
        pings = encode_relay(RelayPing()) * 10_000
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(flooding, pings))
        await carries(relay, home)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        flooding.close()


@asynchronous
async def test_a_deaf_stay_is_ended_and_its_askers_are_told() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home:
        await home.stay(relay.at)
        deaf = user()
        stay = await proven(relay, identity=deaf.identity)
        await write_relay(stay, Stay())
        await until(lambda: deaf.identity.peer_id in relay.relay.stays)
        guest = relay.relay._stays[deaf.identity.peer_id]
        async with guest.writing:  # as if somebody's packet were stuck there
            with pytest.raises(RelayError, match="does not hear"):
                await Relayed(deaf.identity.peer_id, relay.at, user()).open()
        await until(lambda: deaf.identity.peer_id not in relay.relay.stays)
        stay.close()
        await carries(relay, home)


@pytest.mark.parametrize("rounds", [60, pytest.param(3000, marks=pytest.mark.attack)])
@asynchronous
async def test_damaged_packets_in_every_stage_end_their_own_conversation(rounds: int) -> None:
    chance = random.Random(5)
    questions = [
        Stay(),
        DialBack(9, bytes(32)),
        JoinRequest(bytes(16)),
        ReachRequest(Identity.generate().public_key, bytes(16), direct=True),
        RelayPing(),
    ]
    async with RelayEnd() as relay, RelayedEnd() as home:
        await home.stay(relay.at)
        for number in range(rounds):
            identity = Identity.generate()
            connection, challenge = await connected(relay, f"127.1.{number // 250}.{number % 250 + 1}")
            packets = [
                encode_relay(prove_user(challenge, relay.identity.peer_id, identity, None)),
                *(encode_relay(chance.choice(questions)) for _ in range(3)),
            ]
            at = chance.randrange(len(packets))
            packets[at] = damaged(packets[at], [chance.randrange(600)], bytes((chance.randrange(1, 256),)))
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(connection, b"".join(packets))
                connection.shutdown(socket.SHUT_WR)
                while True:
                    await soon(read_relay(connection))
            connection.close()
        assert relay.relay.stays >= {home.end.peer_id}
        await carries(relay, home)
