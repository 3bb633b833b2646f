"""Addresses, as people type them and strangers announce them: each checked before anything is dialled or bound.

A multiaddress is `/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT`, and after it `/p2p/PEER_ID` where the peer is named; nothing
else is spoken, and each address is written in one way only.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Self

from molink.dht.identity.identity import public_key_of

MAX_ADDRESS_CHARACTERS = 360
_MAX_NAME_CHARACTERS = 253
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_HOST_AND_PORT = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._-]{1,253})):([0-9]{1,5})")
_FAMILIES = {
    "ip4": socket.AF_INET,
    "dns4": socket.AF_INET,
    "ip6": socket.AF_INET6,
    "dns6": socket.AF_INET6,
    "dns": socket.AF_UNSPEC,
}
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Address of a peer: where it listens."""

    kind: str
    """`ip4`, `ip6`, `dns`, `dns4` or `dns6`."""
    host: str
    port: int
    peer_id: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The address in a multiaddress.

        Raises:
            ValueError: it is none that a peer could have; names what is wrong.
        """
        parts = text[: MAX_ADDRESS_CHARACTERS + 1].split("/")
        if len(text) > MAX_ADDRESS_CHARACTERS or len(parts) not in (5, 7) or parts[0] or parts[3] != "tcp":
            raise ValueError(
                f"{_shown(text)} is not a multiaddress such as /ip4/203.0.113.9/tcp/4001/p2p/PEER_ID"
            )
        _, kind, host, _, port = parts[:5]
        if kind not in _FAMILIES:
            raise ValueError(
                f"an address begins with /ip4, /ip6, /dns, /dns4 or /dns6, not as {_shown(text)}"
            )
        if kind.startswith("ip"):
            _require_canonical(host, 4 if kind == "ip4" else 6)
        else:
            require_host_name(host)
        if not _PORT.fullmatch(port) or int(port) > 65535:
            raise ValueError(f"a port is 1 to 65535, not {_shown(port)}")
        if len(parts) == 5:
            return cls(kind, host, int(port), None)
        if parts[5] != "p2p":
            raise ValueError(f"only /p2p/PEER_ID may follow the port in {_shown(text)}")
        public_key_of(parts[6])
        return cls(kind, host, int(port), parts[6])

    @property
    def is_name(self) -> bool:
        """Whether `host` is to be looked up first."""
        return self.kind.startswith("dns")

    @property
    def family(self) -> socket.AddressFamily:
        """Which addresses of a name are meant."""
        return _FAMILIES[self.kind]

    def at(self, ip: str) -> "PeerAddress":
        """The same peer at an IP address that its name has."""
        bare = ip.partition("%")[0]
        return PeerAddress("ip6" if ":" in bare else "ip4", bare, self.port, self.peer_id)

    def __str__(self) -> str:
        end = f"/p2p/{self.peer_id}" if self.peer_id else ""
        return f"/{self.kind}/{self.host}/tcp/{self.port}{end}"


def multiaddress(host: str, port: int) -> str:
    """Returns the multiaddress of `host`, an IP address or a name. Raises ValueError if it is neither."""
    require_host(host)
    return str(PeerAddress(_kind(host), host if _kind(host) == "dns" else _canonical(host), port, None))


def require_host(host: str) -> str:
    """`host`, if it is an IP address or a host name. Raises ValueError otherwise."""
    if _kind(host) == "dns":
        require_host_name(host)
    return host


def require_listen_host(host: str) -> str:
    """`host`, if it is an IP address: of which interface, or 0.0.0.0 or :: for all. Raises ValueError otherwise."""
    if _kind(host) == "dns":
        raise ValueError(
            f"{_shown(host)} is not an IP address: listen on one of this machine's addresses, or on 0.0.0.0 for all"
        )
    return host


def require_host_name(name: str) -> str:
    """`name`, if it is a host's name as it is in the domain name system. Raises ValueError otherwise."""
    labels = name[: _MAX_NAME_CHARACTERS + 1].removesuffix(".").split(".")
    if (
        len(name) > _MAX_NAME_CHARACTERS
        or not all(_LABEL.fullmatch(label) for label in labels)
        or labels[-1].isdigit()
    ):
        raise ValueError(f"{_shown(name)} is neither an IP address nor a host name such as peer.example.org")
    return name


def host_and_port(name: str, value: str) -> str:
    """`value`, if it is host:port with an IPv6 host in brackets. Raises ValueError, which says that `name` is wrong."""
    found = _HOST_AND_PORT.fullmatch(value) if len(value) <= _MAX_NAME_CHARACTERS + 6 else None
    if found is None or not 1 <= int(found[3]) <= 65535:
        raise ValueError(f"{name} must be host:port, it is {_shown(value)}")
    if found[1]:
        _canonical(found[1])
    else:
        require_host(found[2])
    return value


def _require_canonical(host: str, version: int) -> None:
    address = ipaddress.ip_address(_canonical(host))
    if address.version != version or str(address) != host:
        raise ValueError(f"{_shown(host)} is not an IPv{version} address as one is written")
    if address.is_multicast:
        raise ValueError(f"{_shown(host)} is the address of many, not of a peer")


def _canonical(host: str) -> str:
    """An IP address in the one way to write it. Raises ValueError if it is none, or has a zone."""
    try:
        if "%" in host:
            raise ValueError
        return str(ipaddress.ip_address(host[:64]))
    except ValueError:
        raise ValueError(f"{_shown(host)} is not an IP address") from None


def _kind(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host[:64]).version}"
    except ValueError:
        return "dns"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
