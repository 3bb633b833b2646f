"""A router is asked by miniupnpc, over HTTP on loopback; only the search by multicast is left out."""

import random
import sys

import miniupnpc
import pytest
from support.links.routers import UpnpRouter

from molink.peer.reach.port_mapping import GatewayError, InnerPorts, MappedPorts, map_ports, public_host
from molink.peer.reach.upnp_gateway import find_gateway


def test_ports_are_mapped_to_this_machine_for_as_long_as_asked_and_closed_again() -> None:
    with UpnpRouter() as router:
        gateway = find_gateway("0.0.0.0", router.described_at)  # noqa: S104
        mapped = map_ports(gateway, InnerPorts(4001, 4002), random.Random(0))
        assert mapped == MappedPorts("203.0.113.7", 4001, 4002)
        assert router.mapped == {port: ("127.0.0.1", port, "TCP", 3600) for port in (4001, 4002)}
        gateway.unmap_port(4001)
        assert list(router.mapped) == [4002]


def test_a_peer_that_listens_on_one_address_has_its_ports_mapped_to_that() -> None:
    with UpnpRouter() as router:
        find_gateway("127.0.0.2", router.described_at).map_port(4001, 4001, 60)
        assert router.mapped == {4001: ("127.0.0.2", 4001, "TCP", 60)}


def test_what_the_router_refuses_is_said_in_its_words() -> None:
    with UpnpRouter() as router:
        router.taken.add(4001)
        gateway = find_gateway("127.0.0.1", router.described_at)
        with pytest.raises(GatewayError, match=r"refuses to map port 4001 .*Conflict"):
            gateway.map_port(4001, 4001, 3600)
        mapped = map_ports(gateway, InnerPorts(4001, 4002), random.Random(0))
        assert mapped.control not in (4001, 4002)
        with pytest.raises(GatewayError, match="refuses to end the mapping of port 9"):
            gateway.unmap_port(9)


def test_a_router_behind_another_one_is_found_out() -> None:
    with UpnpRouter("100.64.3.2") as router, pytest.raises(GatewayError, match=r"address is 100\.64\.3\.2"):
        public_host(find_gateway("127.0.0.1", router.described_at))


def test_whoever_answers_in_a_routers_place_is_none() -> None:
    with UpnpRouter() as router:
        router.broken = True
        with pytest.raises(GatewayError):
            public_host(find_gateway("127.0.0.1", router.described_at))


class SilentNetwork:
    """What miniupnpc does where nobody answers its search."""

    def __init__(self, **_: object) -> None:
        self.lanaddr = ""

    def discover(self) -> int:
        raise Exception("Success")


def test_where_nobody_answers_the_owner_is_told_what_to_switch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miniupnpc, "UPnP", SilentNetwork)
    with pytest.raises(GatewayError) as raised:
        find_gateway("127.0.0.1")
    assert raised.value.found == "no router answers UPnP"
    assert "switch UPnP on in the router" in raised.value.remedy


def test_without_its_library_no_router_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "miniupnpc", None)
    with pytest.raises(GatewayError, match="miniupnpc is not installed"):
        find_gateway("127.0.0.1")
