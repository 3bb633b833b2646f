"""Addresses: one way to write each, and nothing else is dialled, announced or listened at."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.dht.host.host import Listen
from molink.dht.identity.addresses import (
    PeerAddress,
    host_and_port,
    multiaddress,
    require_host,
    require_host_name,
    require_listen_host,
)
from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.records.announcement import AnnouncementError, sign_facts

ADA, BOB = Identity.generate(), Identity.generate()

hosts = st.one_of(
    st.ip_addresses().filter(lambda ip: not ip.is_multicast).map(str),
    st.from_regex(r"[a-z][a-z0-9]{0,9}(\.[a-z][a-z0-9-]{0,9}[a-z0-9]){0,3}", fullmatch=True),
)


def refusal_of(check: Callable[[str], object], text: str) -> str:
    try:
        check(text)
    except ValueError as refusal:
        return str(refusal)
    return ""


@given(hosts, st.integers(1, 65535))
def test_an_address_comes_out_as_it_went_in(host: str, port: int) -> None:
    text = f"{multiaddress(host, port)}/p2p/{ADA.peer_id}"
    address = PeerAddress.parse(text)
    assert str(address) == text
    assert (address.host, address.port, address.peer_id) == (host, port, ADA.peer_id)


@given(st.text(max_size=60) | st.from_regex(r"/(ip4|ip6|dns)/[^/]{0,20}/tcp/[^/]{0,6}(/p2p/.{0,60})?"))
def test_any_text_is_an_address_as_it_stands_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert str(PeerAddress.parse(text)) == text


@given(st.text(max_size=300))
def test_a_refusal_quotes_little_and_nothing_that_a_terminal_obeys(text: str) -> None:
    for check in (PeerAddress.parse, require_host, require_host_name, require_listen_host):
        refusal = refusal_of(check, text)
        assert refusal.isprintable()
        assert len(refusal) < 300


@pytest.mark.parametrize(
    "value", ["203.0.113.7:1", "[2001:db8::1]:4001", "peer.example.org:65535", "localhost:80"]
)
def test_a_host_with_its_port_is_taken(value: str) -> None:
    assert host_and_port("it", value) == value


@pytest.mark.parametrize(
    "value",
    ["", ":1", "host:", "host:0", "host:65536", "[::1]", "[nonsense]:1", "::1:1", "a b:1", "1.2.3:1", "-:1"],
)
def test_a_host_without_a_good_port_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"it must be host:port|neither an IP|not an IP"):
        host_and_port("it", value)


@pytest.mark.parametrize(
    "address",
    [
        "/foo",
        "/ip4/127.0.0.1/tcp/99999",
        "/ip4/127.0.0.1/udp/1",
        "/dns/a b/tcp/1",
        "/ip4/127.0.0.1/tcp/1/p2p/x",
    ],
)
def test_no_peer_announces_what_is_no_address(address: str) -> None:
    facts = replace(facts_of(ADA), addresses=(f"{address}/p2p/{ADA.peer_id}",))
    with pytest.raises(AnnouncementError):
        sign_facts(facts, ADA)


def test_a_peer_that_announces_its_name_is_joined_by_it() -> None:
    async def scenario() -> None:
        async with Discovery(ADA, listen=Listen("127.0.0.1", 0, "localhost"), timing=QUICK) as ada:
            assert ada.addresses[0].startswith("/dns/localhost/tcp/")
            await ada.announce(replace(facts_of(ADA), addresses=()), state_of(ADA))
            async with (
                Discovery(BOB, initial_peers=ada.addresses, timing=QUICK) as bob,
                Discovery(
                    Identity.generate(), initial_peers=ada.addresses, listen=None, timing=QUICK
                ) as client,
                asyncio.timeout(120),
            ):
                for other in (bob, client):
                    while ADA.peer_id not in {view.peer_id for view in other.snapshot()}:
                        await other.changed(5.0)

    asyncio.run(scenario())
