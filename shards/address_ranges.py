"""In which part of the world an IP address is: what keeps strangers from sending this machine to its own network."""

import ipaddress
from enum import Enum
from typing import Final

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
ALL_INTERFACES: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with what an owner asks to listen on, not listened on


class AddressRange(Enum):
    """Addresses that mean the same machine in the same places."""

    PUBLIC = "public"
    """The same machine from everywhere."""
    PRIVATE = "private"
    """A site's own (RFC 1918, RFC 4193)."""
    SHARED = "shared"
    """Behind a provider's translator (RFC 6598), and what overlay networks take from there."""
    LINK_LOCAL = "link-local"
    LOOPBACK = "loopback"
    NOBODY = "nobody"
    """Not one machine: unspecified, multicast, broadcast, reserved."""


_RANGES: Final = tuple(
    (ipaddress.ip_network(network), kind)
    for kind, networks in (
        (AddressRange.LOOPBACK, ("127.0.0.0/8", "::1/128")),
        (AddressRange.LINK_LOCAL, ("169.254.0.0/16", "fe80::/10", "fec0::/10")),
        (AddressRange.PRIVATE, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")),
        (AddressRange.SHARED, ("100.64.0.0/10",)),
        (
            AddressRange.NOBODY,
            ("0.0.0.0/8", "224.0.0.0/3", "192.0.0.0/24", "::/128", "ff00::/8", "100::/64"),
        ),
    )
    for network in networks
)
_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")


def range_of(host: str) -> AddressRange | None:
    """Where an IP address is, brackets and zone allowed; None: it is a name, and what it stands for must be asked.

    An IPv6 address that carries an IPv4 address is where that one is.
    """
    try:
        address: IpAddress = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        address = _carried(address) or address
    return next((kind for network, kind in _RANGES if address in network), AddressRange.PUBLIC)


def _carried(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that packets to this one reach: mapped, of 6to4, Teredo or a translator."""
    if address.ipv4_mapped or address.sixtofour:
        return address.ipv4_mapped or address.sixtofour
    if address.teredo:
        return address.teredo[1]
    if address in _TRANSLATED or (address in _COMPATIBLE and int(address) > 0xFFFF):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
