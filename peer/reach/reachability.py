"""What a peer knows of how it can be reached, decided without input or output: from what relays say of it.

Relays in different networks dial it back. If most of them find its certificate, it is dialable, and announces where; if
not, it announces the relays at which it stays. Where nobody can say, it is as its owner has set it up.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from molink.dht.identity.dialable import Ranges, host_of, may_dial, own_ranges
from molink.dht.membership.door import network_of
from molink.dht.records.records import PeerFacts, PeerView, RelayAt
from molink.peer.wire.reach.relay_client import host_and_port_of
from molink.shards.address_ranges import range_of

MOST_ASKED = 3
"""Relays that dial back."""
LEAST_AGAINST_OWNER = 2
"""Relays that say so before what the owner has said is not believed."""
MOST_LOOKED_AT = 6
"""Relays whose distance is measured."""
MOST_STAYS = 3
LEAST_TOLD = 2
"""Of the stays that others were told of: with fewer they are told anew."""


class Reachable(Enum):
    """Whether others can dial this peer."""

    DIALABLE = "dialable"
    RELAYED = "relayed"
    UNKNOWN = "unknown"
    """No relay is known, or none answers."""


@dataclass(frozen=True, slots=True)
class RelayAnswer:
    """What one relay said."""

    relay: RelayAt
    took_s: float
    """To connect and prove: three round trips."""
    observed: str
    """host:port as which the relay sees the connection."""
    found: bool | None
    """Whether it found this peer's certificate; None: it was not asked, or did not say."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a look has found."""

    reachable: Reachable
    host: str = ""
    """Where most of the relays that found this peer see it; empty: nobody said."""
    near: tuple[RelayAt, ...] = ()
    """Relays that answer, the nearest first."""
    offered: int = 0
    """Relays that were asked."""


def candidates(
    views: Iterable[PeerView], own_peer_id: str, ranges: Ranges, draw: random.Random
) -> tuple[RelayAt, ...]:
    """Relays worth a look, at most MOST_LOOKED_AT, in random order, but those of networks of their own first. Only IP
    addresses in the swarm's own ranges are dialled."""
    offered = (relay_at(view.facts, ranges) for view in views if view.peer_id != own_peer_id)
    known = [relay for relay in offered if relay is not None]
    draw.shuffle(known)
    return apart(known)[:MOST_LOOKED_AT]


def relay_at(facts: PeerFacts, ranges: Ranges) -> RelayAt | None:
    """Where a peer says that it relays, if that is an IP address in the swarm's own ranges."""
    address = facts.relay_address
    if not address or range_of(host_of(address)) is None or not may_dial(address, ranges):
        return None
    return RelayAt(facts.peer_id, address)


def apart(relays: Sequence[RelayAt]) -> tuple[RelayAt, ...]:
    """The same relays: the first of each network before the second of any."""
    seen: dict[str, int] = {}
    ranked = []
    for at, relay in enumerate(relays):
        network = network_of(host_of(relay.address))
        seen[network] = seen.get(network, -1) + 1
        ranked.append((seen[network], at, relay))
    return tuple(relay for *_, relay in sorted(ranked, key=lambda rank: rank[:2]))


def judge(answers: Sequence[RelayAnswer]) -> Finding:
    """What the answers of a look mean: more than half of those that dialled back decide."""
    near = tuple(answer.relay for answer in sorted(answers, key=lambda answer: answer.took_s))
    said = [answer for answer in answers if answer.found is not None]
    if not said:
        return Finding(Reachable.UNKNOWN, near=near)
    found = [host_of(answer.observed) for answer in said if answer.found]
    if 2 * len(found) <= len(said):
        return Finding(Reachable.RELAYED, near=near)
    return Finding(Reachable.DIALABLE, max(found, key=found.count), near)


def contradicted(told: str, answers: Sequence[RelayAnswer]) -> bool:
    """Whether relays say that nobody answers where the owner has said that others dial this peer, as host:port. Two at
    least, none says otherwise, and they see this machine at that very address: they dial no other."""
    found = [answer.found for answer in answers if host_of(answer.observed) == host_of(told)]
    return found.count(False) >= LEAST_AGAINST_OWNER and True not in found


def is_out_of_reach(addresses: Sequence[str], others: Iterable[str]) -> bool:
    """Whether the rest of the swarm dials none of a peer's own addresses: none is public, or in a range of `others`,
    the addresses of other peers and those at which this one joined. Of names, and where there is nobody else, that
    cannot be said."""
    hosts = [host_of(address) for address in others]
    ranges = own_ranges(hosts)
    own = [range_of(host_of(address)) for address in addresses]
    return bool(hosts) and bool(own) and all(one is not None and one not in ranges for one in own)


def stays_for(staying: Sequence[RelayAt], near: Sequence[RelayAt]) -> tuple[RelayAt, ...]:
    """Where to stay: where this peer stays already, as long as it can, then near ones in different networks."""
    return tuple(dict.fromkeys((*staying, *apart(near))))[:MOST_STAYS]


def relays_to_tell(told: Sequence[RelayAt], stays: Sequence[RelayAt]) -> tuple[RelayAt, ...]:
    """The relays to announce by one that has announced `told` and stays at `stays`.

    Facts go to everybody, and each relay that goes takes a stay of many with it. What was told holds on while
    LEAST_TOLD of it, or all that there are, are stays; whoever dials leaves those that are gone for last.
    """
    held = sum(relay in stays for relay in told)
    if stays and len(told) >= len(stays) and held >= min(LEAST_TOLD, len(stays)):
        return tuple(told)
    return tuple(stays)


def announced(
    base: PeerFacts,
    finding: Finding,
    stays: Sequence[RelayAt],
    relay_port: int | None,
    *,
    hard: bool | None = None,
) -> PeerFacts:
    """The facts to announce. `base` has the addresses that the owner has set up; `relay_port` is that of this peer's
    own relay. Who is relayed announces no address, and no relay of its own, and whether its NAT is a cone, which is
    what one is that is known not to be `hard`."""
    if finding.reachable is Reachable.RELAYED:
        return replace(
            base, addresses=(), grpc_addresses=(), relays=tuple(stays), relay_address="", cone=hard is False
        )
    facts = replace(base, relays=(), cone=False)
    if finding.host and facts.grpc_addresses and host_of(facts.grpc_addresses[0]) != finding.host:
        facts = _moved(facts, finding.host)
    if relay_port is None or not facts.grpc_addresses:
        return replace(facts, relay_address="")
    return replace(facts, relay_address=host_and_port_of(host_of(facts.grpc_addresses[0]), relay_port))


def _moved(facts: PeerFacts, host: str) -> PeerFacts:
    """The same ports at another host: a router passes them on."""
    kind = "ip6" if ":" in host else "ip4"
    addresses = tuple("/".join(("", kind, host, *address.split("/")[3:])) for address in facts.addresses[:1])
    ports = [int(address.rpartition(":")[2]) for address in facts.grpc_addresses[:1]]
    return replace(
        facts, addresses=addresses, grpc_addresses=tuple(host_and_port_of(host, port) for port in ports)
    )
