"""Neighbour selection: whom a peer dials and whom it keeps, so that nobody takes all of its links. Pure.

Links that a peer has chosen itself are counted apart from those of others: it dials `DEGREE`, whatever comes in, and of
these some in different networks where it knows such. A full set of incoming links makes room for a newcomer, in the
network that has most of them and where least has come of use: so whoever has one network can fill the places of one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from molink.dht.membership.door import network_of
from molink.dht.membership.timing import DEGREE
from molink.dht.records.records import PeerFacts

MAX_LINKS = 12
MAX_INCOMING = MAX_LINKS - DEGREE
"""Where as many can be dialled as dial."""
MOST_INCOMING = 48
"""Where few can be dialled, and all the others' links lead to them."""
UNDIALABLE_DEGREE = 2
"""Links that a peer dials which nobody can dial: what it has to say goes over these."""
MOST_COPIES = 1 + MOST_INCOMING / UNDIALABLE_DEGREE
"""Whoever invents peers that nobody can dial does not silence the others."""
COPIES_HELD_S = 120.0
"""For so long fewer copies are not believed: who has crashed is counted for as long, beside who came in its place, and
all would speak more often just when links begin anew."""
SPARE_INCOMING = 1.5
"""Places for each link that is to be expected: they do not come evenly."""
SHARE_KEPT = 1.1
"""Of the fair share of links, so that chance moves none."""
HAND_OVER_S = 15.0
"""Between two links that are ended for that: each is a connection and a comparison of tables elsewhere."""
NETWORKS = 3
"""Different ones that the links a peer has dialled lead to, if it knows as many. The others are chosen blindly:
were all to go far, the few who are there would have to carry them."""
REDIAL_SPREAD_S = 45.0
"""Where one of few that can be dialled goes, most others miss a link at once. Who has another takes its time, within
so many seconds, until who comes in that one's place is known, too."""
GRACE_S = 60.0
"""For so long a link keeps its place if the newcomer is of a network that has as many links."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Neighbour: a peer that there is, or could be, a link to."""

    peer_id: str
    network: str
    since: float = 0.0
    """When the link was opened."""
    useful_at: float = 0.0
    """When something true and new last came over it."""


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """How many links a peer has."""

    to_dial: int = DEGREE
    incoming: int = MAX_INCOMING
    """That it admits, at most."""
    copies: float = 1.0
    """Of each record that a peer sends which can be dialled, on average: those that cannot get theirs from these."""
    share: float = math.inf
    """Of the links of those that cannot be dialled, what each has that can, if they are spread evenly."""


def link_counts(living: Iterable[PeerFacts], own_peer_id: str) -> LinkCounts:
    """Decides how many links a peer dials and admits, by who of the living can be dialled: who cannot dials half as
    many, and who can admits what then is to be expected, so that none stays without."""
    dialable = undialable = 0
    own_is_dialable = True
    for facts in living:
        if facts.addresses:
            dialable += 1
        else:
            undialable += 1
            own_is_dialable = own_is_dialable and facts.peer_id != own_peer_id
    expected = DEGREE + undialable * UNDIALABLE_DEGREE / max(1, dialable)
    incoming = min(MOST_INCOMING, max(MAX_INCOMING, math.ceil(SPARE_INCOMING * expected)))
    copies = min(MOST_COPIES, 1 + undialable / max(1, dialable))
    share = undialable * UNDIALABLE_DEGREE / dialable if dialable and undialable else math.inf
    return LinkCounts(DEGREE if own_is_dialable else UNDIALABLE_DEGREE, incoming, copies, share)


def to_hand_over(incoming: Sequence[Neighbour], share: float, now: float) -> Neighbour | None:
    """Chooses, of links from peers that nobody can dial, the one to end so that its peer dials somebody who has fewer;
    None: there are no more than a fair share and a part. Where one goes that many had dialled, the others get its
    links; who comes in its place gets them by this, one at a time."""
    if len(incoming) <= SHARE_KEPT * share + 1:
        return None
    return min((link for link in incoming if now - link.since >= GRACE_S), key=_usefulness, default=None)


def _usefulness(link: Neighbour) -> tuple[float, float]:
    return link.useful_at, link.since


def redial_spread_s(copies: float) -> float:
    """Seconds within which a peer that has other links dials for one that is missing; 0 where all can be dialled."""
    return REDIAL_SPREAD_S * (1 - 1 / copies)


def to_dial(candidates: Sequence[Neighbour], dialled: Iterable[str], room: int) -> tuple[Neighbour, ...]:
    """Chooses whom to dial, at most `room`. `candidates`: in order of preference; `dialled`: the networks of the links,
    and of those on their way, that this peer has dialled."""
    networks = set(dialled)
    left, chosen = list(candidates), list[Neighbour]()
    while left and len(chosen) < room:
        elsewhere = (one for one in left if one.network not in networks)
        one = (next(elsewhere, None) if len(networks) < NETWORKS else None) or left[0]
        left.remove(one)
        chosen.append(one)
        networks.add(one.network)
    return tuple(chosen)


def to_make_room(incoming: Sequence[Neighbour], network: str, now: float) -> Neighbour | None:
    """Chooses whose link ends so that somebody of `network` gets one; None: nobody's, for the time being."""
    shares = Counter(link.network for link in incoming)
    shares[network] += 1
    most = max(shares.values())
    crowd = [link for link in incoming if shares[link.network] == most]
    if shares[network] == most:
        crowd = [link for link in crowd if now - link.since >= GRACE_S]
    return min(crowd, key=_usefulness, default=None)


def network_at(address: str) -> str:
    """The network of a multiaddress; empty if that cannot be said."""
    parts = address.split("/")
    return network_of(parts[2]) if len(parts) > 2 else ""


def worth_remembering(living: Sequence[PeerFacts], linked: Iterable[str], most: int) -> tuple[str, ...]:
    """Addresses to begin from after a restart, at most `most`: neighbours' first, and those of many networks before
    several of one."""
    near = frozenset(linked)
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, bool, int, str]] = []
    for order, facts in enumerate(sorted(living, key=lambda facts: facts.peer_id not in near)):
        for address in facts.addresses[:1]:
            network = network_at(address)
            ranked.append((seen[network], facts.peer_id not in near, order, address))
            seen[network] += 1
    return tuple(address for *_, address in sorted(ranked)[:most])
