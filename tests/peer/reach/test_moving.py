"""Holes on loopback: links move, and nobody has another end dial where it is not."""

import asyncio
import socket

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.links.reach_ends import RelayedEnd, RelayEnd

from molink.dht.identity.identity import Identity
from molink.dht.records.records import RelayAt
from molink.peer.reach import moving
from molink.peer.reach.moving import FALSE_ADDRESS
from molink.peer.wire.link.dialled_connection import DialledConnection
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.punching import (
    AGAIN_S,
    ObservedPort,
    PunchAttempt,
    attempt_after,
    observe_port,
    punch,
)
from molink.peer.wire.reach.relay_client import RelaySession, RelayUser, open_session


@asynchronous
async def test_a_relayed_link_moves_to_a_hole_and_answers_over_it() -> None:
    async with RelayEnd() as relay, RelayEnd() as other, RelayedEnd() as near, RelayedEnd() as far:
        facts = await far.stay(relay.at)
        for home in (near, far):
            await home.punch(relay.at, other.at)
        link = await soon(near.end.links.to(facts))
        await until(
            lambda: isinstance(link.connection, DialledConnection) and link.connection.way == "punched"
        )
        response, _ = await soon(link.request(pb.Request(release=pb.Release()), 5.0))
        assert response.WhichOneof("body") == "released"
        await until(lambda: relay.relay.pairs == 0)


@asynchronous
async def test_no_host_is_dialled_but_the_one_that_the_relay_sees() -> None:
    async with RelayEnd() as relay, RelayedEnd() as near, RelayedEnd() as far:
        facts = await far.stay(relay.at)
        await far.punch(relay.at)
        link = await soon(near.end.links.to(facts))
        with socket.create_server(("127.0.0.2", 0)) as victim:
            port = victim.getsockname()[1]
            for address in (f"127.0.0.2:{port}", "127.0.0.1:22", "nonsense", f"[::1]:{port}", ""):
                asked = pb.Request(punch=pb.Punch(address=address))
                response, _ = await soon(link.request(asked, 5.0))
                assert response.refusal.detail == FALSE_ADDRESS
        response, _ = await soon(link.request(pb.Request(punch_now=pb.PunchNow()), 5.0))
        assert response.refusal.detail == "no punch was asked for"


@asynchronous
async def test_an_end_that_says_a_false_address_is_asked_again_no_sooner_than_one_that_cannot_be_punched_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []

    def attempt(number: int) -> PunchAttempt:
        numbers.append(number)
        return PunchAttempt(0.0, 0.0)

    async def lies(_: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
        return pb.Response(punch=pb.Punch(address="127.0.0.2:4000")), b""

    monkeypatch.setattr(moving, "attempt_after", attempt)
    async with RelayEnd() as relay, RelayedEnd() as near, RelayedEnd() as far:
        far.end.handler.answer = lies
        facts = await far.stay(relay.at)
        await near.punch(relay.at)
        await soon(near.end.links.to(facts))
        await until(lambda: len(numbers) >= 4)
    assert numbers[:4] == [0, 1, 2, 3]


@asynchronous
async def test_two_ends_that_no_hole_leads_to_try_again_in_ten_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []

    def attempt(number: int) -> PunchAttempt:
        numbers.append(number)
        return PunchAttempt(0.0 if len(numbers) < 4 else 600.0, 0.0)

    async def hard(relays: tuple[RelayAt, ...], own: RelayUser) -> ObservedPort:
        port = await observe_port(relays, own)
        port.hard = True
        return port

    monkeypatch.setattr(moving, "attempt_after", attempt)
    monkeypatch.setattr(moving, "observe_port", hard)
    monkeypatch.setattr(moving, "LOOK_EVERY_S", 0.01)
    async with RelayEnd() as relay, RelayedEnd() as near, RelayedEnd() as far:
        facts = await far.stay(relay.at)
        for home in (near, far):
            await home.punch(relay.at)
        await soon(near.end.links.to(facts))
        await until(lambda: len(numbers) >= 4)
    assert [attempt_after(number).after_s >= AGAIN_S for number in numbers[:4]] == [False, True, True, True]


@asynchronous
async def test_holes_are_asked_for_at_a_rate() -> None:
    async with RelayEnd() as relay, RelayedEnd() as near, RelayedEnd() as far:
        facts = await far.stay(relay.at)
        await far.punch(relay.at)
        link = await soon(near.end.links.to(facts))
        said = []
        for _ in range(8):
            asked = pb.Request(punch=pb.Punch(address="127.0.0.1:4000"))
            response, _ = await link.request(asked, DEADLINE_S)
            said.append(response.WhichOneof("body"))
        assert said[0] == "punch"
        assert set(said[1:]) == {"refusal"}


@asynchronous
async def test_what_was_punched_is_connected_at_both_ends_and_a_closed_port_gives_up() -> None:
    async with RelayEnd() as relay:
        one, two = [await observe_port((relay.at,), RelayUser(Identity.generate(), None)) for _ in range(2)]
        assert not one.hard
        ends = await soon(asyncio.gather(punch(one.port, two.address), punch(two.port, one.address)))
        await asyncio.get_running_loop().sock_sendall(ends[0], b"through")
        assert await soon(asyncio.get_running_loop().sock_recv(ends[1], 7)) == b"through"
        for end in ends:
            end.close()
        for observed in (one, two):
            observed.close()
        with pytest.raises(RelayError, match="no connection"):
            await punch(one.port, "127.0.0.1:9", timeout_s=0.1)


@asynchronous
async def test_a_port_that_no_relay_sees_is_not_observed() -> None:
    with pytest.raises(RelayError, match="no relay"):
        await observe_port((), RelayUser(Identity.generate(), None))


@asynchronous
async def test_a_look_that_is_given_up_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[RelaySession] = []

    async def kept(relay: RelayAt, own: RelayUser, *, local_port: int) -> RelaySession:
        opened.append(await open_session(relay, own, local_port=local_port))
        return opened[-1]

    monkeypatch.setattr("molink.peer.wire.reach.punching.open_session", kept)
    async with RelayEnd() as relay:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            says_nothing = RelayAt(Identity.generate().peer_id, f"127.0.0.1:{silent.getsockname()[1]}")
            user = RelayUser(Identity.generate(), None)
            looking = asyncio.create_task(observe_port((relay.at, says_nothing), user))
            await until(lambda: bool(opened))
            looking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await looking
    assert [session.connection.fileno() for session in opened] == [-1]


def test_attempts_are_three_and_then_every_ten_minutes() -> None:
    assert [attempt_after(number).after_s for number in range(5)] == [
        0,
        2,
        10,
        10 + AGAIN_S,
        10 + 2 * AGAIN_S,
    ]
