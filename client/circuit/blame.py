"""Blame ledger: whom to leave out after a circuit has failed, where nobody knows for sure. Pure.

What a client sees itself (a link that closes, a token that cannot be) is evidence. What one hop says of another is not:
an accusation weighs on both. Whoever is part of more that went wrong than the other is left out, so that a hop which
blames honest ones goes with its second accusation, and those whom it alone blamed come back. A circuit that stands
still weighs on all of its hops; what they have in common goes next.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from molink.client.circuit.quarantine import Quarantine

REMEMBERED_S = 180.0
"""How long a failure weighs on those who were part of it."""
MOST_REMEMBERED = 256
MOST_TAKEN_BACK = 8
"""Peers that are left out of which each is tried alone, before all of them are."""


@dataclass(frozen=True, slots=True)
class Accusation:
    """One hop said that another failed."""

    at_s: float
    accuser: str
    accused: str


@dataclass(frozen=True, slots=True)
class Standstill:
    """A circuit yielded no token, though all of its hops answered."""

    at_s: float
    hops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlameVerdict:
    """BlameVerdict on a failure: whom to leave out."""

    leave: str
    """The peer to leave out."""
    acquitted: frozenset[str] = frozenset()
    """Peers that were left out on that one's word alone."""


@dataclass(slots=True)
class BlameLedger:
    """Blame ledger of failures whose cause is not known. Times are seconds of any one clock."""

    accusations: list[Accusation] = field(default_factory=list)
    standstills: list[Standstill] = field(default_factory=list)

    def accuse(
        self, accuser: str, accused: str, now_s: float, is_gone: Callable[[str], bool] = lambda _: False
    ) -> BlameVerdict:
        """A hop of a circuit said that another one of it failed.

        `is_gone` says whether the client itself has lost a peer by now: whoever accused that one was right.
        """
        self._forget(now_s)
        self.accusations.append(Accusation(now_s, accuser, accused))
        self.accusations = [one for one in self.accusations if not is_gone(one.accused)]
        if self.weight(accuser) <= self.weight(accused) or is_gone(accused):
            return BlameVerdict(accused)
        return BlameVerdict(accuser, self._blamed_alone_by(accuser))

    def stand_still(
        self, hops: Sequence[str], now_s: float, left: Collection[str] = frozenset()
    ) -> BlameVerdict:
        """A circuit yielded nothing. Of equals its head goes first, then the others in order; one that was `left`
        before and is there for want of others goes last."""
        self._forget(now_s)
        self.standstills.append(Standstill(now_s, tuple(hops)))
        return BlameVerdict(max(hops, key=lambda peer_id: (peer_id not in left, self.weight(peer_id))))

    def weight(self, peer_id: str) -> int:
        """In how much that went wrong the peer took part: accusations that it made, other peers that accused it,
        circuits that stood still with it."""
        made = sum(one.accuser == peer_id for one in self.accusations)
        accusers = {one.accuser for one in self.accusations if one.accused == peer_id}
        return made + len(accusers) + sum(peer_id in one.hops for one in self.standstills)

    def accusers_of(self, peer_ids: frozenset[str]) -> frozenset[str]:
        """Returns who accused any of these peers: of each such pair one is at fault."""
        return frozenset(one.accuser for one in self.accusations if one.accused in peer_ids)

    def accused(self) -> frozenset[str]:
        """Returns the peers that others have accused."""
        return frozenset(one.accused for one in self.accusations)

    def _blamed_alone_by(self, accuser: str) -> frozenset[str]:
        by_others = {one.accused for one in self.accusations if one.accuser != accuser}
        blamed = {one.accused for one in self.accusations if one.accuser == accuser}
        return frozenset(blamed - by_others)

    def _forget(self, now_s: float) -> None:
        since_s = now_s - REMEMBERED_S
        self.accusations = [one for one in self.accusations if one.at_s > since_s][-MOST_REMEMBERED:]
        self.standstills = [one for one in self.standstills if one.at_s > since_s][-MOST_REMEMBERED:]


def second_choices(
    avoided: frozenset[str], shunned: frozenset[str], blame: BlameLedger, quarantine: Quarantine
) -> tuple[frozenset[str], ...]:
    """Yields whom to leave out instead, one set after the other, where there is no circuit without all who are
    `avoided`; those who are `shunned` are left out in any case."""
    # Of two, one of which accuses the other, one is at fault: without the accuser it may do.
    accusers = blame.accusers_of(avoided)
    # Who was only slow comes back before who was part of what went wrong.
    doubts = {peer_id: (blame.weight(peer_id), -quarantine.since_s(peer_id)) for peer_id in sorted(avoided)}
    taken_back = sorted(sorted(avoided - shunned), key=doubts.__getitem__)[:MOST_TAKEN_BACK]
    sets = (
        (avoided - blame.accused()) | accusers | shunned,
        *(avoided - {peer_id} for peer_id in taken_back),
        shunned,
    )
    return tuple(avoid for avoid in dict.fromkeys(sets) if avoid != avoided)
