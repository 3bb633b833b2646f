"""Relays that lie, change bytes, fall silent, or have others dial: links go on over the next, and nobody is dialled."""

import asyncio
import itertools
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.attackers.hostile_relay import HostileLine, HostileRelay, flipped, swallowed
from support.links.data_plane import End, asynchronous, soon, until
from support.links.reach_ends import RelayedEnd, RelayEnd

from molink.dht.identity.identity import Identity
from molink.dht.records.records import RelayAt
from molink.peer.reach import stays
from molink.peer.reach.invitations import INVITATIONS, MOST_OF_A_RELAY
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.reach.packets import (
    Invite,
    Joined,
    JoinRequest,
    Packet,
    ReachRequest,
    RelayError,
    RelayPing,
    RelayPong,
    Stay,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_client import RelayUser, open_session
from molink.peer.wire.reach.splice import Splices
from molink.peer.wire.reach.ways import Relayed, splice_to_port
from molink.peer.wire.transmission.classes import TrafficClass

FRAMES = 40


async def all_arrive(link: Link, home: RelayedEnd) -> None:
    """Frames that are posted arrive whole, in order and once."""
    contents = [secrets.token_bytes(5000) for _ in range(FRAMES)]
    for number, content in enumerate(contents):
        link.post(pb.Activations(hidden_size=number), content, TrafficClass.DECODE)
    for number, content in enumerate(contents):
        _, frame = await soon(home.end.handler.frames.get())
        assert frame.header.hidden_size == number  # type: ignore[attr-defined]
        assert bytes(frame.payload) == content


def user() -> RelayUser:
    return RelayUser(Identity.generate(), None)


@pytest.mark.parametrize("after_bytes", [0, 100, 3000, 100_000], ids=["challenge", "proof", "tls", "frames"])
@pytest.mark.parametrize("change", [flipped, swallowed])
@asynchronous
async def test_a_relay_that_changes_bytes_or_falls_silent_is_left_for_the_next(
    after_bytes: int, change: Callable[[bytes], bytes]
) -> None:
    async with (
        RelayEnd() as lying,
        RelayEnd() as honest,
        HostileLine(lying.at, after_bytes, change) as line,
        RelayedEnd() as home,
        End(is_client=True) as client,
        End(is_client=True) as other,
    ):
        facts = await home.stay(lying.at, honest.at)
        beside = await soon(other.links.to(replace(facts, relays=(honest.at,))))
        link = await soon(client.links.to(replace(facts, relays=(line.at, honest.at))))
        await all_arrive(link, home)
        assert line.changed
        await all_arrive(beside, home)
        assert beside.closed_because is None


@asynchronous
async def test_a_relay_that_joins_another_peer_is_not_believed_and_the_next_one_is_used() -> None:
    async with RelayEnd() as honest, RelayedEnd() as home, End() as impostor, Splices() as splices:
        wrong = int(impostor.facts.grpc_addresses[0].rpartition(":")[2])

        async def join_wrong(connection: socket.socket, question: Packet) -> None:
            assert isinstance(question, ReachRequest)
            await write_relay(connection, Joined("127.0.0.1"))
            splice = await splice_to_port(splices, connection.dup(), ("127.0.0.1", wrong))
            await splice.gone

        async with HostileRelay(join_wrong) as hostile, End(is_client=True) as client:
            facts = await home.stay(honest.at)
            link = await soon(client.links.to(replace(facts, relays=(hostile.at, honest.at))))
            assert hostile.visits == [client.peer_id]
            await all_arrive(link, home)
            assert impostor.links.find(client.peer_id) is None


@asynchronous
async def test_a_relay_that_invites_without_end_takes_its_part_and_others_reach_the_peer_meanwhile() -> None:
    joins = flooding = 0
    askers = [Identity.generate().public_key for _ in range(200)]

    async def flood(connection: socket.socket, question: Packet) -> None:
        nonlocal joins, flooding
        if isinstance(question, JoinRequest):
            joins += 1
            await asyncio.Event().wait()
        assert isinstance(question, Stay)
        await read_relay(connection)
        await write_relay(connection, RelayPong())
        flooding = 1
        for asker in itertools.cycle(askers):
            await write_relay(connection, Invite(asker, secrets.token_bytes(16), direct=False))
            await asyncio.sleep(0)  # a socket with room is written to without a look at other tasks

    async with HostileRelay(flood) as hostile, RelayEnd() as honest, RelayedEnd() as home:
        facts = await home.stay(hostile.at, honest.at)
        await until(lambda: joins == MOST_OF_A_RELAY)
        for _ in range(3):
            async with End(is_client=True) as client:
                link = await soon(client.links.to(replace(facts, relays=(honest.at,))))
                await all_arrive(link, home)
        assert flooding
        assert joins <= INVITATIONS.network.at_once
        assert honest.relay.stays == {home.end.peer_id}


@asynchronous
async def test_whoever_says_that_it_relays_at_somebody_elses_address_has_it_dialled_once() -> None:
    """Identities cost nothing: twenty of them name one address, in facts that they have signed."""
    third_party = socket.create_server(("127.0.0.1", 0))
    third_party.setblocking(False)
    victim = f"127.0.0.1:{third_party.getsockname()[1]}"
    dialled: list[socket.socket] = []

    async def accept() -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(third_party)
            dialled.append(connection)

    with third_party:
        async with RelayEnd() as relay, RelayedEnd() as home:
            accepting = asyncio.create_task(accept())
            facts = await home.stay(relay.at)
            for _ in range(20):
                liar = user()
                home.relays[liar.identity.peer_id] = RelayAt(liar.identity.peer_id, victim)
                invitation = ReachRequest(home.end.identity.public_key, secrets.token_bytes(16), direct=True)
                session = await open_session(relay.at, liar, invitation)
                await session.invited()
                session.close()
            async with End(is_client=True) as client:
                await soon(client.links.to(facts))
            await until(lambda: bool(dialled))
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
    assert len(dialled) == 1
    for connection in dialled:
        connection.close()


@asynchronous
async def test_a_relay_that_ends_each_stay_is_dialled_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stays, "RETRY_S", (0.0, 600.0))

    async def hang_up(connection: socket.socket, question: Packet) -> None:
        assert isinstance(question, Stay)
        assert isinstance(await read_relay(connection), RelayPing)
        await write_relay(connection, RelayPong())

    async with HostileRelay(hang_up) as hostile, RelayEnd() as honest, RelayedEnd() as home:
        home.stays.keep((hostile.at, honest.at))
        await until(lambda: len(hostile.visits) == 2 and home.stays.relays == (honest.at,))
        async with End(is_client=True) as client:
            facts = replace(home.end.facts, grpc_addresses=(), relays=(honest.at,))
            await all_arrive(await soon(client.links.to(facts)), home)
        assert len(hostile.visits) == 2


@pytest.mark.parametrize(
    "observed", ["", "nonsense", "127.0.0.1", "127.0.0.1:-1", "127.0.0.1:70000", "::1:x"]
)
@asynchronous
async def test_where_a_relay_says_that_it_sees_this_end_is_an_address_or_the_relay_is_none(
    observed: str,
) -> None:
    async def nothing(_: socket.socket, __: Packet) -> None:
        await asyncio.Event().wait()

    async with HostileRelay(nothing, observed) as hostile:
        with pytest.raises(RelayError, match="no address"):
            await open_session(hostile.at, user())


@asynchronous
async def test_where_a_relay_says_that_the_other_end_is_is_an_address_or_it_joins_nobody() -> None:
    async def join(connection: socket.socket, _: Packet) -> None:
        await write_relay(connection, Joined("localhost; rm"))

    async with HostileRelay(join) as hostile:
        with pytest.raises(RelayError, match="no address"):
            await Relayed(Identity.generate().peer_id, hostile.at, user()).open()
        session = await open_session(hostile.at, user(), JoinRequest(bytes(16)))
        with pytest.raises(RelayError, match="no address"):
            await session.joined()
        session.close()
