"""What a stranger's address means from here, and which of them may be dialled."""

import asyncio
from collections.abc import Collection

import pytest

from molink.dht.identity.dialable import ANYWHERE, dialled_as, host_of, may_dial, own_ranges
from molink.shards.address_ranges import AddressRange, range_of

PUBLIC = own_ranges(["8.8.8.8:4002"])


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", AddressRange.PUBLIC),
        ("2001:4860:4860::8888", AddressRange.PUBLIC),
        ("10.0.0.1", AddressRange.PRIVATE),
        ("172.31.255.255", AddressRange.PRIVATE),
        ("172.32.0.0", AddressRange.PUBLIC),
        ("192.168.1.1", AddressRange.PRIVATE),
        ("fd00::1", AddressRange.PRIVATE),
        ("100.64.3.4", AddressRange.SHARED),
        ("169.254.169.254", AddressRange.LINK_LOCAL),
        ("fe80::1%eth0", AddressRange.LINK_LOCAL),
        ("127.9.9.9", AddressRange.LOOPBACK),
        ("[::1]", AddressRange.LOOPBACK),
        ("0.0.0.0", AddressRange.NOBODY),  # noqa: S104 - nothing is bound
        ("::", AddressRange.NOBODY),
        ("224.0.0.1", AddressRange.NOBODY),
        ("255.255.255.255", AddressRange.NOBODY),
        ("ff02::1", AddressRange.NOBODY),
    ],
)
def test_each_address_has_one_range(host: str, expected: AddressRange) -> None:
    assert range_of(host) is expected


@pytest.mark.parametrize("host", ["::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::7f00:1"])
def test_an_address_that_carries_another_is_where_that_one_is(host: str) -> None:
    assert range_of(host) is AddressRange.LOOPBACK


@pytest.mark.parametrize("name", ["example.org", "127.1", "0x7f000001", "2130706433", "localhost", ""])
def test_a_name_is_in_no_range_and_is_not_dialled_as_it_stands(name: str) -> None:
    assert range_of(name) is None
    assert not may_dial(f"{name}:22", ANYWHERE)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.1:80", "192.0.2.1"),
        ("[::1]:80", "::1"),
        ("::1", "::1"),
        ("host:4", "host"),
        ("/ip4/10.0.0.1/tcp/1/p2p/x", "10.0.0.1"),
        ("/foo", ""),
    ],
)
def test_the_host_is_found_in_whatever_form_an_address_has(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_swarm_dials_public_addresses_and_those_of_its_own_ranges_only() -> None:
    home = own_ranges(["192.168.1.5:4002", "/ip4/192.168.1.9/tcp/4001/p2p/x", "example.org:1"])
    assert may_dial("8.8.8.8:1", PUBLIC)
    assert may_dial("8.8.8.8:1", home)
    assert may_dial("192.168.7.7:1", home)
    for address in ("192.168.1.5:22", "127.0.0.1:22", "169.254.169.254:80", "100.64.0.1:1", "[fe80::1]:1"):
        assert not may_dial(address, PUBLIC)
    assert not may_dial("127.0.0.1:22", home)
    assert not may_dial("0.0.0.0:22", own_ranges(["0.0.0.0:1"]))


def test_a_name_is_dialled_as_what_it_stands_for_if_that_may_be_dialled() -> None:
    async def both(_: str) -> Collection[str]:
        return ("10.0.0.7", "8.8.8.8", "2001:4860:4860::8888")

    async def nobody(_: str) -> Collection[str]:
        raise OSError("no such name")

    async def scenario() -> None:
        assert await dialled_as("a.example:9", PUBLIC, both) == ("8.8.8.8:9", "[2001:4860:4860::8888]:9")
        assert await dialled_as("a.example:9", PUBLIC, nobody) == ()
        assert await dialled_as("127.0.0.1:9", PUBLIC, nobody) == ()
        assert await dialled_as("8.8.8.8:9", PUBLIC, nobody) == ("8.8.8.8:9",)
        assert await dialled_as("localhost:9", PUBLIC) == ()
        assert "127.0.0.1:9" in await dialled_as("localhost:9", own_ranges(["127.0.0.1"]))

    asyncio.run(scenario())
