"""Peers of one network find each other, and believe nothing that leads elsewhere."""

import asyncio
import string
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import NotRunningException, ServiceInfo, ServiceStateChange

from molink.dht.identity.addresses import PeerAddress
from molink.dht.identity.identity import Identity
from molink.dht.node import local_neighbours, local_network
from molink.dht.node.local_neighbours import LocalNeighbours
from molink.dht.node.local_network import (
    MOST_ADDRESSES,
    MOST_PEERS,
    SERVICE,
    LocalAdvertisement,
    LocalService,
    NearbyPeer,
    addresses_of,
    ask_local_peer,
    find_local_peers,
    peer_id_named,
    read_local_peer,
)
from molink.shards.address_ranges import AddressRange

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

LOOPBACK = ("127.0.0.1",)
PRIVATE = frozenset({AddressRange.PRIVATE})
PEER = Identity.generate().peer_id
SAYS = {b"version": b"1", b"private": b"0"}


def test_peers_of_one_network_find_each_other() -> None:
    async def scenario() -> None:
        open_one, private_one = Identity.generate().peer_id, Identity.generate().peer_id
        async with (
            LocalAdvertisement(LocalService(open_one, LOOPBACK, 4001, private=False)),
            LocalAdvertisement(LocalService(private_one, LOOPBACK, 4002, private=True)),
        ):
            found: dict[str, NearbyPeer] = {}
            while not {open_one, private_one} <= found.keys():
                found |= {peer.peer_id: peer for peer in await find_local_peers(LOOPBACK)}
        assert found[open_one] == NearbyPeer(
            open_one, (f"/ip4/127.0.0.1/tcp/4001/p2p/{open_one}",), private=False
        )
        assert found[private_one].private

    asyncio.run(scenario())


def test_a_peer_knows_where_links_to_its_neighbours_are_dialled_until_they_leave() -> None:
    async def scenario() -> None:
        near = Identity.generate().peer_id
        async with LocalNeighbours(LOOPBACK) as neighbours, asyncio.timeout(120.0):
            async with LocalAdvertisement(LocalService(near, LOOPBACK, 4001, private=False, data_port=4002)):
                while neighbours.links_of(near) != ("127.0.0.1:4002",):  # noqa: ASYNC110 - the network tells nobody
                    await asyncio.sleep(0.01)
            while neighbours.links_of(near):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_what_is_answered_for_a_neighbour_that_has_left_or_changed_since_is_not_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        changes: list[Callable[..., None]] = []
        answers: list[asyncio.Future[NearbyPeer]] = []

        class Browser:
            def __init__(self, _: object, __: str, handlers: list[Callable[..., None]]) -> None:
                changes.extend(handlers)

            async def async_cancel(self) -> None:
                pass

        async def ask(*_: object) -> NearbyPeer:
            answers.append(asyncio.get_running_loop().create_future())
            return await answers[-1]

        monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Browser)
        monkeypatch.setattr(local_neighbours, "ask_local_peer", ask)
        async with LocalNeighbours(LOOPBACK) as neighbours:
            for change in (
                ServiceStateChange.Added,
                ServiceStateChange.Updated,
                ServiceStateChange.Removed,
                ServiceStateChange.Added,
            ):
                changes[0](name=f"{PEER}.{SERVICE}", state_change=change)
                await asyncio.sleep(0)
            for port, answer in enumerate(answers, 1):
                if not answer.cancelled():
                    answer.set_result(NearbyPeer(PEER, (), private=False, links=(f"192.168.1.7:{port}",)))
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
            assert neighbours.links_of(PEER) == ("192.168.1.7:3",)
            assert [answer.cancelled() for answer in answers] == [True, True, False]

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [b"", b"0", b"65536", b"99999999999", b"-1", "²".encode(), b"4 2", b"x"])
def test_a_port_of_links_that_is_none_is_left_out(said: bytes) -> None:
    peer = read_local_peer(PEER, ["192.168.1.7"], 4001, SAYS | {b"data": said}, PRIVATE)
    assert peer is not None
    assert peer.links == ()


@pytest.mark.full
def test_who_has_left_is_not_found() -> None:
    async def scenario() -> None:
        gone = Identity.generate().peer_id
        async with LocalAdvertisement(LocalService(gone, LOOPBACK, 4001, private=False)):
            while gone not in {peer.peer_id for peer in await find_local_peers(LOOPBACK)}:
                pass
        assert gone not in {peer.peer_id for peer in await find_local_peers(LOOPBACK)}

    asyncio.run(scenario())


def test_where_there_is_no_local_network_nobody_is_found_and_nothing_fails() -> None:
    async def scenario() -> None:
        async with LocalAdvertisement(LocalService(PEER, (), 4001, private=False)):
            assert await find_local_peers(()) == ()
        async with LocalAdvertisement(
            LocalService(PEER, ("192.0.2.77",), 4001, private=False)
        ):  # not this machine's
            assert await find_local_peers(("192.0.2.77",)) == ()

    asyncio.run(scenario())


def test_who_listens_on_loopback_alone_is_no_peer_of_the_local_network() -> None:
    assert addresses_of("127.0.0.1") == addresses_of("::1") == ()


def test_addresses_of_other_ranges_and_of_nobody_are_not_believed() -> None:
    hosts = ["192.168.1.7", "203.0.113.7", "127.0.0.1", "8.8.8.8", "fd00::1"]
    assert read_local_peer(PEER, hosts, 4001, SAYS, PRIVATE) == NearbyPeer(
        PEER, (f"/ip4/192.168.1.7/tcp/4001/p2p/{PEER}",), private=False
    )
    assert read_local_peer(PEER, ["8.8.8.8"], 4001, SAYS, PRIVATE) is None
    assert read_local_peer(PEER, ["192.168.1.7"], 0, SAYS, PRIVATE) is None
    assert read_local_peer("me", ["192.168.1.7"], 4001, SAYS, PRIVATE) is None
    assert read_local_peer(PEER, ["192.168.1.7"], 4001, SAYS | {b"version": b"2"}, PRIVATE) is None


@given(
    st.one_of(st.just(PEER), st.text(max_size=80)),
    st.lists(
        st.one_of(
            st.sampled_from(["192.168.1.7", "10.0.0.1", "127.0.0.1", "203.0.113.7", "::1"]),
            st.text(string.printable, max_size=40),
        ),
        max_size=12,
    ),
    st.integers(-1, 70_000),
    st.dictionaries(st.binary(max_size=8), st.one_of(st.none(), st.binary(max_size=8))),
)
def test_whatever_a_stranger_says_is_a_peer_of_this_network_or_nothing(
    peer_id: str, hosts: list[str], port: int, said: dict[bytes, bytes | None]
) -> None:
    peer = read_local_peer(peer_id, hosts, port, SAYS | said, PRIVATE)
    if peer is not None:
        assert 0 < len(peer.addresses) <= MOST_ADDRESSES
        for address in peer.addresses:
            assert PeerAddress.parse(address).peer_id == peer_id == peer.peer_id


NO_PEERS = {
    "another service's": "evil._http._tcp.local.",
    "another service's, with a peer's id": f"{PEER}.evil._http._tcp.local.",
    "with a label that is too long": f"{'x' * 80}.{SERVICE}",
    "with control characters": f"\x07\n.{SERVICE}",
    "nobody's": SERVICE,
    "without a service": PEER,
    "with a peer id that is none": f"{PEER[:-1]}.{SERVICE}",
}


@pytest.mark.parametrize("kind", NO_PEERS)
def test_a_name_that_no_peer_would_have_is_asked_of_nobody(kind: str) -> None:
    """Nobody is there to be asked: that would fail."""
    nobody = cast("AsyncZeroconf", None)
    assert peer_id_named(NO_PEERS[kind]) is None
    assert asyncio.run(ask_local_peer(nobody, NO_PEERS[kind], PRIVATE, 1.0)) is None


def test_the_name_of_a_peers_service_has_its_id() -> None:
    assert peer_id_named(f"{PEER}.{SERVICE}") == PEER


class Closed:
    """Stands for zeroconf, once it is closed."""

    async def async_get_service_info(self, *_: object) -> None:
        raise NotRunningException


def test_a_question_that_zeroconf_refuses_is_no_failure() -> None:
    closed = cast("AsyncZeroconf", Closed())
    assert asyncio.run(ask_local_peer(closed, f"{PEER}.{SERVICE}", PRIVATE, 1.0)) is None


def test_names_that_nobody_answers_for_or_that_are_none_keep_no_peer_from_being_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = [Identity.generate().peer_id for _ in range(MOST_PEERS)]
    names = [*NO_PEERS.values(), *(f"{peer_id}.{SERVICE}" for peer_id in silent), f"{PEER}.{SERVICE}"]

    class Network(Closed):
        """Says something of one peer only."""

        zeroconf = None

        async def async_get_service_info(self, _: str, name: str, *__: object) -> ServiceInfo:
            if name.removesuffix(f".{SERVICE}") in silent:
                await asyncio.Event().wait()
            return ServiceInfo(SERVICE, name, port=4001, parsed_addresses=["127.0.0.1"], properties=SAYS)

        async def async_close(self) -> None:
            pass

    class Browser:
        """Has heard of all names at once."""

        def __init__(self, _: object, __: str, handlers: list[Callable[..., None]]) -> None:
            for name in names:
                handlers[0](name=name, state_change=ServiceStateChange.Added)

        async def async_cancel(self) -> None:
            pass

    monkeypatch.setattr(local_network, "open_zeroconf", lambda _: Network())
    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Browser)
    found = asyncio.run(find_local_peers(LOOPBACK))
    assert [peer.peer_id for peer in found] == [PEER]
