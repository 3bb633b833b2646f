"""Fair shares of the gateway among its users, and which hosts it answers to. Pure decisions."""

import ipaddress
from collections.abc import Collection
from typing import Final

LOCAL: Final = "this machine"
UNKNOWN: Final = "unknown"
_NETWORK_BITS: Final = 64
"""Of an IPv6 address: who has one has all that begin alike."""


def user_of(address: str | None) -> str:
    """Returns the user behind an address: this machine, one IPv4 address, or an IPv6 network."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return UNKNOWN
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_loopback:
        return LOCAL
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
    return str(parsed)


class FairShares:
    """Fair shares of a resource of which there is `most`, in units of the caller's.

    A user may take all that nobody else wants but the last tenth: that is left to those who hold less than a quarter.
    This machine's own user is no stranger to it, and may take it all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, int] = {}
        self._total = 0

    @property
    def most(self) -> int:
        return self._most

    @property
    def total(self) -> int:
        """Sum of what all hold."""
        return self._total

    def held(self, user: str) -> int:
        return self._held.get(user, 0)

    def may_take(self, user: str, amount: int = 1) -> bool:
        left = self._most - self._total - amount
        if left < 0:
            return False
        return user == LOCAL or left >= self._most // 10 or self.is_within_quarter(user, amount)

    def is_within_quarter(self, user: str, amount: int) -> bool:
        """Whether that user would hold no more than a quarter with so much more."""
        return self.held(user) + amount <= self._most // 4

    def take(self, user: str, amount: int = 1) -> None:
        if amount == 0:
            return
        self._held[user] = self.held(user) + amount
        self._total += amount

    def give(self, user: str, amount: int = 1) -> None:
        left = self._held.pop(user) - amount
        if left > 0:
            self._held[user] = left
        self._total -= amount

    def greediest(self, among: Collection[str]) -> str:
        """Returns who of them holds most."""
        return max(among, key=lambda user: (self.held(user), user))


def host_is_allowed(header: str, allowed: Collection[str]) -> bool:
    """Whether a Host header names this gateway: `localhost`, a name that its operator allows, or any IP address.

    A page in a user's browser can reach a gateway of that user's network by a name of its own that it lets point
    there, and the browser then says that name. It cannot do so by an address.
    """
    name = host_of(header)
    return name == "localhost" or name in allowed or user_of(name) != UNKNOWN


def host_of(header: str) -> str:
    """Returns the name or address in a Host header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    return name.removesuffix(".")


def plain_host(name: str) -> str:
    """A name as `host_is_allowed` compares it."""
    return name.strip().lower().removesuffix(".")
