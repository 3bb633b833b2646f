"""Links of the product over relays: frames go both ways, a link outlives its relay, and moves without losing any."""

import asyncio
import socket
from dataclasses import replace

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, soon, until
from support.links.reach_ends import RelayedEnd, RelayEnd
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import RelayAt
from molink.peer.reach.relay import Relay
from molink.peer.wire.link import ladder
from molink.peer.wire.link.dialled_connection import DialledConnection
from molink.peer.wire.link.ladder import Ladder
from molink.peer.wire.link.link import Link, LinkError, Resumed
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.reach.ways import REVERSED_TIMEOUT_S, Relayed
from molink.peer.wire.transmission.classes import TrafficClass


def way_of(link: Link) -> str:
    assert isinstance(link.connection, DialledConnection)
    return link.connection.way


@asynchronous
async def test_a_peer_that_announces_no_address_is_reached_over_its_relay_and_answers() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home, End(is_client=True) as client:
        link = await soon(client.links.to(await home.stay(relay.at)))
        assert way_of(link) == "relayed"
        link.post(pb.Activations(hidden_size=7), b"x" * 100_000, TrafficClass.DECODE)
        _, frame = await soon(home.end.handler.frames.get())
        assert (frame.header.hidden_size, len(frame.payload)) == (7, 100_000)  # type: ignore[attr-defined]
        back = await home.end.linked(client.peer_id)
        back.post(pb.Activations(hidden_size=8))
        _, frame = await soon(client.handler.frames.get())
        assert frame.header.hidden_size == 8  # type: ignore[attr-defined]


@asynchronous
async def test_a_relay_cannot_put_another_peer_in_the_place_of_the_one_that_was_meant() -> None:
    async with (
        RelayEnd() as relay,
        RelayedEnd() as home,
        RelayedEnd() as impostor,
        End(is_client=True) as client,
    ):
        facts = await home.stay(relay.at)
        await impostor.stay(relay.at)
        dialler = client.links.dialler
        way = Relayed(impostor.end.peer_id, relay.at, dialler.ladder.user)
        with pytest.raises(LinkError, match="cannot be reached"):
            await soon(dialler.knock_over(facts, way))


@asynchronous
async def test_of_two_relays_the_one_that_answers_is_used() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(relay.at)
        dead = RelayAt(Identity.generate().peer_id, "127.0.0.1:9")
        link = await soon(client.links.to(replace(facts, relays=(dead, relay.at))))
        assert way_of(link) == "relayed"


@asynchronous
async def test_a_link_whose_relay_is_gone_goes_on_over_the_next() -> None:
    async with RelayEnd() as first, RelayEnd() as second, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(first.at, second.at)
        link = await soon(client.links.to(facts))
        await first.__aexit__(None)
        for number in range(20):
            link.post(pb.Activations(hidden_size=number), b"", TrafficClass.DECODE)
        seen = [(await soon(home.end.handler.frames.get()))[1].header.hidden_size for _ in range(20)]  # type: ignore[attr-defined]
        assert seen == list(range(20))
        assert second.relay.pairs == 1


@asynchronous
async def test_a_link_that_breaks_is_dialled_by_what_is_known_of_the_peer_by_then() -> None:
    async with RelayEnd() as first, RelayEnd() as second, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(first.at, second.at)
        link = await soon(client.links.to(replace(facts, relays=(first.at,))))
        client.links.newest_facts = {facts.peer_id: facts}.get
        await first.__aexit__(None)
        link.post(pb.Activations(hidden_size=5), b"", TrafficClass.DECODE)
        assert (await soon(home.end.handler.frames.get()))[1].header.hidden_size == 5  # type: ignore[attr-defined]
        assert second.relay.pairs == 1


@asynchronous
async def test_a_relay_at_which_a_peer_does_not_stay_is_still_asked_for_others() -> None:
    async with RelayEnd() as relay, RelayedEnd() as home, RelayedEnd() as liar, End(is_client=True) as client:
        facts = await home.stay(relay.at)
        lies = replace(liar.end.facts, grpc_addresses=(), relays=(relay.at,))
        with pytest.raises(LinkError):
            await soon(client.links.to(lies))
        assert way_of(await soon(client.links.to(facts))) == "relayed"


@asynchronous
async def test_a_link_moves_under_traffic_and_nothing_is_lost_or_comes_twice() -> None:
    async with RelayEnd() as first, RelayEnd() as second, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(first.at, second.at)
        link = await soon(client.links.to(replace(facts, relays=(first.at,))))
        dialler = client.links.dialler
        way = Relayed(facts.peer_id, second.at, dialler.ladder.user, name="moved")

        async def redial(moved: Link) -> Resumed:
            asked = pb.Proof(link_id=moved.link_id, resumes=True, received=moved.received)
            return await (await dialler.knock_over(facts, way)).finish(asked)

        for number in range(300):
            link.post(pb.Activations(hidden_size=number), b"", TrafficClass.DECODE)
            if number == 150:
                assert link.move(redial)
            await asyncio.sleep(0)
        seen = [(await soon(home.end.handler.frames.get()))[1].header.hidden_size for _ in range(300)]  # type: ignore[attr-defined]
        assert seen == list(range(300))
        await until(lambda: way_of(link) == "moved")
        assert link.closed_because is None
        await until(lambda: first.relay.pairs == 0)


@pytest.fixture
def rung_by_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rung of relays begins beside one that a busy machine is at."""
    monkeypatch.setattr(ladder, "NEXT_RELAY_S", DEADLINE_S)


@pytest.mark.usefixtures("rung_by_rung")
@asynchronous
async def test_a_dialler_with_a_relay_of_its_own_is_dialled_by_the_other_end() -> None:
    async with RelayEnd() as relay, RelayEnd() as own, RelayedEnd() as home, End(is_client=True) as peer:
        facts = await home.stay(relay.at)
        home.relays[own.identity.peer_id] = own.at
        peer.links.dialler.ladder.user = replace(peer.links.dialler.ladder.user, identity=own.identity)
        peer.links.dialler.ladder.expect = own.relay.expect
        link = await soon(peer.links.to(facts))
        assert way_of(link) == "reversed"
        assert relay.relay.pairs == 0


@asynchronous
async def test_a_peer_that_stays_at_the_diallers_own_relay_alone_is_told_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with RelayedEnd() as home, End() as peer:
        relay = Relay("127.0.0.1", 0, peer.identity, None)
        async with relay:
            facts = await home.stay(RelayAt(peer.peer_id, f"127.0.0.1:{relay.port}"))
            peer.links.dialler.ladder.call = relay.call
            with monkeypatch.context() as patched:
                patched.setattr(ladder, "NEXT_RELAY_S", DEADLINE_S)
                link = await soon(peer.links.to(facts))
            assert way_of(link) == "reversed"
            assert relay.pairs == 0
            stranger = replace(facts_of(Identity.generate()), grpc_addresses=(), relays=facts.relays)
            with pytest.raises(LinkError):
                await soon(peer.links.to(replace(stranger, certificate=facts.certificate)))


@asynchronous
async def test_a_peer_of_the_local_network_is_dialled_there_and_only_its_own_certificate_counts() -> None:
    async with End() as near, End() as other, End(is_client=True) as client:
        address = near.facts.grpc_addresses[0]
        there = {near.peer_id: (address,), other.peer_id: (address,)}
        client.links.dialler.ladder.local = lambda peer_id: there.get(peer_id, ())
        link = await soon(client.links.to(replace(near.facts, grpc_addresses=("192.0.2.7:9",))))
        assert way_of(link) == "direct"
        link = await soon(client.links.to(other.facts))  # somebody else answers where the network has it
        link.post(pb.Activations(hidden_size=3))
        assert (await soon(other.handler.frames.get()))[0] == client.peer_id


@pytest.mark.usefixtures("rung_by_rung")
@asynchronous
async def test_relays_are_asked_in_the_order_that_the_dialler_prefers() -> None:
    async with RelayEnd() as first, RelayEnd() as second, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(first.at, second.at)
        client.links.dialler.preferred_relays = lambda facts: tuple(reversed(facts.relays))
        await soon(client.links.to(facts))
        assert (first.relay.pairs, second.relay.pairs) == (0, 1)


@pytest.mark.usefixtures("rung_by_rung")
@asynchronous
async def test_relays_of_which_nobody_has_heard_are_asked_last() -> None:
    async with RelayEnd() as first, RelayEnd() as second, RelayedEnd() as home, End(is_client=True) as client:
        facts = await home.stay(first.at, second.at)
        client.links.dialler.is_member = lambda peer_id: peer_id == second.at.peer_id
        await soon(client.links.to(facts))
        assert (first.relay.pairs, second.relay.pairs) == (0, 1)


ADDRESSES = ("198.51.100.1:1", "[2001:db8::1]:1", "192.168.1.9:1")
NEAR = "192.168.1.9:1"


async def nobody_comes(*_: object) -> tuple[socket.socket, str]:
    raise AssertionError


@pytest.mark.parametrize(
    ("local", "expects", "stays_here", "expected"),
    [
        (False, False, False, [(1.5, "192.0.2.1:1", "relayed"), (2.1, "192.0.2.2:1", "relayed")]),
        (True, False, False, [(1.8, "192.0.2.1:1", "relayed"), (2.4, "192.0.2.2:1", "relayed")]),
        (
            True,
            True,
            False,
            [
                (1.8, "192.0.2.1:1", "reversed"),
                (2.4, "192.0.2.1:1", "relayed"),
                (3.0, "192.0.2.2:1", "relayed"),
            ],
        ),
        (
            True,
            True,
            True,
            [(1.8, "", "reversed"), (2.4, "192.0.2.1:1", "relayed"), (3.0, "192.0.2.2:1", "relayed")],
        ),
    ],
)
def test_each_rung_has_its_time(
    local: bool, expects: bool, stays_here: bool, expected: list[tuple[float, str, str]]
) -> None:
    ladder = Ladder(Identity.generate(), None)
    if local:
        ladder.local = lambda _: (NEAR,)
    if expects:
        ladder.expect = ladder.call = nobody_comes
    relays = tuple(RelayAt(Identity.generate().peer_id, f"192.0.2.{at}:1") for at in (1, 2))
    rungs = ladder.rungs("peer", ADDRESSES, relays, stays_here=stays_here)
    found = [(round(rung.start_s, 2), rung.address, rung.way.name if rung.way else "") for rung in rungs]
    direct = [(0.0, "[2001:db8::1]:1", ""), (0.25, "198.51.100.1:1", ""), (0.5, NEAR, "")]
    near = [(0.0, NEAR, ""), (0.3, "[2001:db8::1]:1", ""), (0.55, "198.51.100.1:1", "")]
    assert found == [*(near if local else direct), *expected]
    assert REVERSED_TIMEOUT_S == 2.0


def test_a_peer_without_addresses_is_asked_for_at_relays_at_once() -> None:
    ladder = Ladder(Identity.generate(), None)
    relays = tuple(RelayAt(Identity.generate().peer_id, f"192.0.2.{at}:1") for at in (1, 2))
    assert [rung.start_s for rung in ladder.rungs("peer", (), relays)] == [0.0, 0.6]
    assert ladder.rungs("peer", (), ()) == ()
