"""The reach of a peer on loopback, as if it were the Internet: it finds out how it is reached, and keeps so."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, soon, until
from support.links.reach_ends import RelayEnd
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts, PeerState, PeerView, RelayAt
from molink.peer.reach.invitations import INVITATIONS
from molink.peer.reach.moving import PunchingHandler
from molink.peer.reach.reach import Reach, ReachSettings, Surroundings
from molink.peer.reach.reachability import Reachable
from molink.peer.wire.link import ladder
from molink.peer.wire.link.dialled_connection import DialledConnection
from molink.peer.wire.reach.packets import Invite
from molink.peer.wire.reach.relay_client import RelayUser
from molink.peer.wire.transport.line_quality import LineQuality

NOBODY_LISTENS = 9
ASKERS = 10 * round(INVITATIONS.network.at_once)
SETTINGS = ReachSettings("127.0.0.1", 0, "auto", "auto", told="", is_local=False)


def facts_at(relay: RelayAt) -> PeerFacts:
    return replace(facts_of(Identity.generate()), peer_id=relay.peer_id, relay_address=relay.address)


def view_of(relay: RelayAt) -> PeerView:
    return PeerView(facts_at(relay), PeerState(relay.peer_id, 1, 60, 1, (), 0, 0, 0, 0), 0.0)


class Home:
    """A peer's data plane with its reach; if `blocked`, relays dial a port where nobody listens."""

    def __init__(
        self, relays: list[RelayAt], settings: ReachSettings = SETTINGS, *, blocked: bool = False
    ) -> None:
        self.end = End()
        self.relays = relays
        self._settings = settings
        self._blocked = blocked
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Home":
        handler = PunchingHandler(self.end.handler)
        self.end.links.handler = handler
        await self._stack.enter_async_context(self.end)
        port = int(self.end.facts.grpc_addresses[0].rpartition(":")[2])
        self.base: PeerFacts = self.end.facts
        self.reach = Reach(
            self._settings,
            RelayUser(self.end.identity, None),
            Surroundings(
                self.end.links,
                handler,
                port,
                lambda: tuple(map(view_of, self.relays)),
                lambda peer_id: next(
                    (facts for facts in map(facts_at, self.relays) if facts.peer_id == peer_id), None
                ),
                lambda _: True,
                lambda: 50.0,
            ),
        )
        if self._blocked:
            self.reach._around = replace(self.reach._around, grpc_port=NOBODY_LISTENS)
        await self._stack.enter_async_context(self.reach)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@asynchronous
async def test_however_many_direct_invitations_a_relay_sends_few_peers_are_looked_up_and_the_table_never() -> (
    None
):
    async with RelayEnd() as relay, Home([relay.at], blocked=True) as home:
        await soon(home.reach.settled(home.base))
        looked_up: list[str] = []
        snapshots: list[None] = []

        def look_up(peer_id: str) -> PeerFacts | None:
            looked_up.append(peer_id)
            return None

        def snapshot() -> tuple[PeerView, ...]:
            snapshots.append(None)
            return ()

        home.reach._around = replace(home.reach._around, facts_of=look_up, snapshot=snapshot)
        for _ in range(ASKERS):
            asker = Identity.generate().public_key
            home.reach.stays.guests.invite(relay.at, Invite(asker, b"t" * 16, direct=True))
        assert snapshots == []
        assert 0 < len(looked_up) < ASKERS / 2  # what a relay may pass on, and what it may again meanwhile


@asynchronous
async def test_a_peer_that_relays_find_announces_its_address_and_a_relay_of_its_own() -> None:
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at, two.at]) as home:
        facts = await soon(home.reach.settled(home.base))
        assert home.reach.finding.reachable is Reachable.DIALABLE
        assert facts.grpc_addresses == home.base.grpc_addresses
        assert home.reach.relay is not None
        assert facts.relay_address == f"127.0.0.1:{home.reach.relay.port}"
        assert facts.relays == ()
        assert home.reach.relay.limits.mbps == 5.0
        assert home.reach.sentence(facts) is None
    mapped = replace(SETTINGS, announced_relay_port=34443)
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at, two.at], mapped) as home:
        assert (await soon(home.reach.settled(home.base))).relay_address == "127.0.0.1:34443"


@asynchronous
async def test_a_peer_that_relays_do_not_find_announces_where_it_stays_and_is_reached_there() -> None:
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at, two.at], blocked=True) as home:
        facts = await soon(home.reach.settled(home.base))
        assert home.reach.finding.reachable is Reachable.RELAYED
        await until(lambda: len(home.reach.stays.relays) == 2)
        assert (facts.addresses, facts.grpc_addresses, facts.relay_address) == ((), (), "")
        assert set(home.reach.told(home.base).relays) == {one.at, two.at}
        assert home.reach.describe()["nat"] == "cone"
        assert "over 127.0.0.1" in (home.reach.sentence(facts) or "")


@asynchronous
async def test_a_peer_that_stays_at_a_relay_answers_there_without_a_link_and_one_that_has_gone_does_not() -> (
    None
):
    async with RelayEnd() as relay, Home([relay.at]) as peer:
        async with Home([relay.at], blocked=True) as home:
            facts = await soon(home.reach.settled(home.base))
            assert await soon(peer.reach.answers(facts))
            assert peer.end.links.find(facts.peer_id) is None
            await soon(peer.end.links.to(facts))
            assert await soon(peer.reach.answers(facts))
        await until(lambda: peer.end.links.find(facts.peer_id) is None)
        assert not await soon(peer.reach.answers(facts))


@asynchronous
async def test_a_peer_told_to_be_relayed_is_dialled_by_nobody_and_served_over_its_relay() -> None:
    settings = replace(SETTINGS, relay="on")
    async with RelayEnd() as relay, Home([relay.at], settings) as home, End(is_client=True) as client:
        facts = await soon(home.reach.settled(home.base))
        assert home.reach.relay is None
        link = await soon(client.links.to(facts))
        assert isinstance(link.connection, DialledConnection)
        assert link.connection.way == "relayed"
        accepted = await home.end.linked(client.peer_id)
        assert home.end.links.is_relayed(accepted)
        assert home.end.links.host_of(client.peer_id) == "127.0.0.1"
        assert home.end.links.line_quality() == LineQuality(None, ())
        link.close("enough")
        await until(lambda: not home.reach.stays.guests.serves(client.peer_id))


class PortForwarder:
    """Passes connections to a port of its own on to another; `port`: its own, `inner`: the other."""

    def __init__(self) -> None:
        self.inner = NOBODY_LISTENS

    async def __aenter__(self) -> "PortForwarder":
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.inner)
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


def mapped_to(home: Home, port: int) -> PeerFacts:
    """What a peer would announce whose router says that it passes `port` on."""
    return replace(
        home.base,
        addresses=(f"/ip4/127.0.0.1/tcp/{port - 1}/p2p/{home.base.peer_id}",),
        grpc_addresses=(f"127.0.0.1:{port}",),
    )


@asynchronous
async def test_a_port_that_the_router_maps_is_announced_once_relays_found_the_peer_there() -> None:
    async with RelayEnd() as one, RelayEnd() as two, PortForwarder() as router:
        settings = replace(SETTINGS, offer="off", mapped=f"127.0.0.1:{router.port}")
        async with Home([one.at, two.at], settings) as home:
            router.inner = int(home.base.grpc_addresses[0].rpartition(":")[2])
            base = mapped_to(home, router.port)
            facts = await soon(home.reach.settled(base))
            assert home.reach.finding.reachable is Reachable.DIALABLE
            assert facts.grpc_addresses == base.grpc_addresses != home.base.grpc_addresses
            assert facts.addresses == base.addresses
            assert home.reach.sentence(facts) is None
            # a stay that breaks tells that the router's outer address has changed
            await until(lambda: len(home.reach.stays.relays) == 1)


@asynchronous
async def test_a_port_that_the_router_only_says_to_map_is_not_announced_and_relays_carry_the_peer() -> None:
    settings = replace(SETTINGS, offer="off", mapped="127.0.0.1:9")
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at, two.at], settings) as home:
        facts = await soon(home.reach.settled(mapped_to(home, 9)))
        assert (facts.addresses, facts.grpc_addresses) == ((), ())
        assert facts.relays
        sentence = home.reach.sentence(facts) or ""
        assert "--port-mapping on: the router says that it passes 127.0.0.1:9 on" in sentence
        assert "over 127.0.0.1" in sentence


@asynchronous
async def test_where_no_relay_can_say_the_routers_word_is_taken() -> None:
    async with Home([], replace(SETTINGS, offer="off", mapped="203.0.113.7:4002")) as home:
        base = mapped_to(home, 4002)
        assert await soon(home.reach.settled(base)) == base


@pytest.mark.full
@asynchronous
async def test_a_peer_whose_relay_goes_moves_to_another_and_says_so() -> None:
    async with RelayEnd() as first, RelayEnd() as second, Home([first.at], blocked=True) as home:
        await soon(home.reach.settled(home.base))
        said: asyncio.Queue[PeerFacts] = asyncio.Queue()

        async def announce(facts: PeerFacts) -> None:
            said.put_nowait(facts)

        keeping = asyncio.create_task(home.reach.keep(home.base, announce))
        home.relays[:] = [second.at]
        await first.__aexit__()
        while (await soon(said.get())).relays != (second.at,):
            pass
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynchronous
async def test_a_stay_that_begins_after_the_first_announcement_is_announced_too() -> None:
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at], blocked=True) as home:
        first = await soon(home.reach.settled(home.base))
        assert first.relays == (one.at,)
        home.reach.stays.keep((one.at, two.at))
        await until(lambda: len(home.reach.stays.relays) == 2)
        home.relays.append(two.at)
        said: asyncio.Queue[PeerFacts] = asyncio.Queue()

        async def announce(facts: PeerFacts) -> None:
            said.put_nowait(facts)

        keeping = asyncio.create_task(home.reach.keep(home.base, announce))
        assert set((await soon(said.get())).relays) == {one.at, two.at}
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynchronous
async def test_a_peer_on_this_machine_only_has_neither_relay_nor_stays() -> None:
    async with RelayEnd() as relay, Home([relay.at], replace(SETTINGS, is_local=True)) as home:
        assert await soon(home.reach.settled(home.base)) == home.base
        assert home.reach.relay is None
        assert home.reach.stays.relays == ()


@asynchronous
async def test_an_owner_who_says_where_the_peer_is_dialled_is_believed() -> None:
    told = replace(SETTINGS, told="198.51.100.7:4002")
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at, two.at], told) as home:
        facts = await soon(home.reach.settled(home.base))
        assert facts.grpc_addresses == home.base.grpc_addresses, (
            "relays see it elsewhere, and cannot look there"
        )
        assert facts.relay_address
        await soon(home.reach.reached())


@asynchronous
async def test_an_owner_whom_two_relays_contradict_is_told_and_the_peer_is_relayed() -> None:
    told = replace(SETTINGS, told="127.0.0.1:9")
    async with RelayEnd() as one, RelayEnd() as two, Home([one.at], told) as home:
        facts = await soon(home.reach.settled(home.base))
        assert facts.grpc_addresses == home.base.grpc_addresses, (
            "one relay alone is not believed against the owner"
        )
        home.relays.append(two.at)
        facts = await soon(home.reach.settled(home.base))
        assert facts.grpc_addresses == ()
        assert facts.relays
        assert "leave --announce out" in (home.reach.sentence(facts) or "")


@asynchronous
async def test_a_peer_that_no_relay_takes_is_not_ready_until_one_does() -> None:
    async with RelayEnd() as relay, Home([], replace(SETTINGS, relay="on")) as home:
        facts = await soon(home.reach.settled(home.base))
        assert (facts.grpc_addresses, facts.relays) == ((), ())
        said = home.reach.sentence(facts) or ""
        assert "--relay on, and of relays no peer of this swarm offers one: " in said
        reached = asyncio.create_task(home.reach.reached())
        home.relays.append(relay.at)
        await soon(home.reach.settled(home.base))
        await soon(reached)


@asynchronous
async def test_a_peer_whose_addresses_the_swarm_does_not_dial_is_not_ready_until_a_relay_takes_it() -> None:
    async with RelayEnd() as relay:
        gone = relay.at
    async with RelayEnd() as relay, Home([gone], blocked=True) as home:
        facts = await soon(home.reach.settled(home.base))
        assert (facts.grpc_addresses, facts.addresses, facts.relays) == ((), (), ())
        assert "Nobody can dial this peer" in (home.reach.sentence(facts) or "")
        reached = asyncio.create_task(home.reach.reached())
        home.relays.append(relay.at)
        facts = await soon(home.reach.settled(home.base))
        await soon(reached)
        assert facts.relays == (relay.at,)


@asynchronous
async def test_a_peer_that_joined_where_its_own_address_is_announces_that_while_no_relay_answers() -> None:
    async with RelayEnd() as relay:
        gone = relay.at
    async with Home([gone], replace(SETTINGS, joined_at=("/ip4/127.0.0.1/tcp/4001/p2p/peer",))) as home:
        facts = await soon(home.reach.settled(home.base))
        assert facts.grpc_addresses == home.base.grpc_addresses
        assert home.reach.sentence(facts) is None


@asynchronous
async def test_a_relay_that_does_not_answer_is_told_from_none() -> None:
    async with RelayEnd() as relay:
        gone = relay.at
    async with Home([gone], replace(SETTINGS, relay="on")) as home:
        said = home.reach.sentence(await soon(home.reach.settled(home.base))) or ""
        assert "none of 1 that peers of this swarm offer answered within 4 s" in said
        assert "--relay-port 443" in said
        assert not home.reach.finding.near


@asynchronous
async def test_a_dialable_peer_is_dialled_by_who_cannot_be_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "NEXT_RELAY_S", DEADLINE_S)
    async with RelayEnd() as relay, Home([relay.at]) as peer, Home([relay.at], blocked=True) as home:
        near = await soon(peer.reach.settled(peer.base))
        home.relays.append(RelayAt(near.peer_id, near.relay_address))
        far = await soon(home.reach.settled(home.base))
        link = await soon(peer.end.links.to(replace(far, relays=(relay.at,))))
        assert isinstance(link.connection, DialledConnection)
        assert link.connection.way == "reversed"
        assert relay.relay.pairs == 0
