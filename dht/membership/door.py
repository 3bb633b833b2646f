"""Connection limiter: how many strangers of one network and identity may stay, and who is evicted. Pure.

A guest comes in unproven, proves its identity, and is then busy (something of use is going on) or idle. Nobody who is
busy is sent away. Where a limit is reached, an idle guest within that limit makes room, and only if there is none
is the newcomer refused: so a crowd that does nothing keeps nobody out, and when it goes all is as before.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from molink.shards.address_ranges import AddressRange, range_of

_IPV4_PREFIX, _IPV6_PREFIX = 24, 56
_RESERVED = 10
"""One place in so many is kept for members."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connection limits: how many guests there may be, and for how long they may do nothing."""

    unproven: int
    """That have not proven who they are."""
    proven: int
    """That have. Strangers never take the last tenth of these."""
    of_network: int
    """Proven ones of one network, see `network_of`."""
    of_identity: int
    """Proven ones of one identity."""
    proof_s: float
    """Time to prove who one is."""
    idle_s: float
    """Time that a proven guest may be idle."""


@dataclass(frozen=True, slots=True)
class DoorDecision:
    """Decision about a guest."""

    guest: int | None
    """The guest's number; None: it is refused."""
    sent_away: tuple[int, ...] = ()
    """Guests that had to make room: the door has forgotten them, their connections are to be closed."""


@dataclass(frozen=True, slots=True)
class _Guest:
    network: str
    since: float
    """When it came in or, once it is proven, when it was last busy."""
    identity: str | None = None
    busy: bool = False


class ConnectionLimiter:
    """Connection limiter of one listener; its connections are guests. Times are of one clock that never goes back."""

    def __init__(self, limits: ConnectionLimits, is_member: Callable[[str], bool]) -> None:
        """`is_member`: whether an identity is known to belong to the swarm."""
        self._limits = limits
        self._is_member = is_member
        self._guests: dict[int, _Guest] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._guests)

    def __contains__(self, guest: int) -> bool:
        return guest in self._guests

    @property
    def unproven(self) -> int:
        """Number of guests that have not proven who they are."""
        return sum(guest.identity is None for guest in self._guests.values())

    def admit(self, now: float, network: str) -> DoorDecision:
        """Admits a new connection. If too many are unproven already, the one that has waited longest goes, of the
        network that has most of them."""
        unproven = [number for number, guest in self._guests.items() if guest.identity is None]
        sent_away = self._send_away(unproven, 1 + len(unproven) - self._limits.unproven, coming=network)
        self._last += 1
        self._guests[self._last] = _Guest(network, now)
        return DoorDecision(self._last, sent_away)

    def prove(self, guest: int, now: float, identity: str) -> DoorDecision:
        """Records that a guest has proven who it is; refused, it is forgotten. It is idle, for the time being."""
        known = self._guests.pop(guest, None)
        if known is None:
            return DoorDecision(None)
        proven = {number: other for number, other in self._guests.items() if other.identity is not None}
        limits, sent_away = self._limits, list[int]()
        groups = [
            ([number for number, other in proven.items() if other.identity == identity], limits.of_identity),
            (
                [number for number, other in proven.items() if other.network == known.network],
                limits.of_network,
            ),
            (list(proven), limits.proven),
        ]
        if not self._is_member(identity):
            strangers = [
                number
                for number, other in proven.items()
                if other.identity is None or not self._is_member(other.identity)
            ]
            groups.append((strangers, limits.proven - max(1, limits.proven // _RESERVED)))
        for group, limit in groups:
            left = [number for number in group if number in self._guests]
            excess = 1 + len(left) - limit
            gone = self._send_away(
                [number for number in left if not self._guests[number].busy], excess, coming=known.network
            )
            sent_away += gone
            if len(gone) < excess:
                return DoorDecision(None, tuple(sent_away))
        self._guests[guest] = replace(known, identity=identity, since=now)
        return DoorDecision(guest, tuple(sent_away))

    def mark_busy(self, guest: int) -> None:
        """Marks a proven guest as busy: it stays until `mark_idle`."""
        if guest in self._guests:
            self._guests[guest] = replace(self._guests[guest], busy=True)

    def mark_idle(self, guest: int, now: float) -> None:
        """Marks a guest as idle: it may be evicted."""
        if guest in self._guests:
            self._guests[guest] = replace(self._guests[guest], busy=False, since=now)

    def remove_guest(self, guest: int) -> None:
        """Removes a guest; it may have been sent away before."""
        self._guests.pop(guest, None)

    def evict_overdue(self, now: float) -> tuple[int, ...]:
        """Evicts guests that have not proven themselves in time, or have been idle for too long; returns them."""
        gone = tuple(
            number
            for number, guest in self._guests.items()
            if not guest.busy
            and now - guest.since >= (self._limits.proof_s if guest.identity is None else self._limits.idle_s)
        )
        for number in gone:
            del self._guests[number]
        return gone

    def make_room(self, count: int) -> tuple[int, ...]:
        """Sends away up to so many guests, because the process can hold no more: unproven ones, then idle strangers,
        then idle members."""
        unproven = [number for number, guest in self._guests.items() if guest.identity is None]
        gone = self._send_away(unproven, count)
        idle = [number for number, guest in self._guests.items() if guest.identity and not guest.busy]
        return gone + self._send_away(idle, count - len(gone))

    def _send_away(self, candidates: Iterable[int], count: int, coming: str | None = None) -> tuple[int, ...]:
        """Strangers go before members, the network with most guests of this kind (a newcomer's counted) loses one
        before others, and of equals goes who has done nothing for longest: it is least likely to be a newcomer that is
        about to begin."""
        left = list(candidates)
        gone: list[int] = []
        shares = Counter(self._guests[number].network for number in left)
        if coming is not None:
            shares[coming] += 1
        while left and len(gone) < count:
            number = min(left, key=lambda number: self._worth(number, shares))
            left.remove(number)
            shares[self._guests.pop(number).network] -= 1
            gone.append(number)
        return tuple(gone)

    def _worth(self, number: int, shares: Counter[str]) -> tuple[bool, int, float, int]:
        guest = self._guests[number]
        member = guest.identity is not None and self._is_member(guest.identity)
        return member, -shares[guest.network], guest.since, number


def network_of(host: str) -> str:
    """Network of an address, which probably belongs to one person: /24 of IPv4, /56 of IPv6.

    On loopback, in private networks and behind a carrier's NAT each address is one: a home or a test is no crowd. What
    is no IP address is a network of its own.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address.sixtofour or address
    if range_of(str(address)) is not AddressRange.PUBLIC:
        return str(address)
    prefix = _IPV4_PREFIX if address.version == 4 else _IPV6_PREFIX
    return str(ipaddress.ip_network((address, prefix), strict=False))
