"""How simulated volunteers are reached: a seeded part cannot be dialled, and the others relay for them.

Where a peer stays and what it announces is decided by `molink.peer.reach.reachability`, as in the product. Clients
cannot be dialled and punch no holes.
"""

import hashlib
from dataclasses import replace

from numpy.random import Generator, default_rng

from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.reach.reachability import (
    MOST_LOOKED_AT,
    Finding,
    Reachable,
    RelayAnswer,
    announced,
    judge,
    relays_to_tell,
    stays_for,
)
from molink.routing.latency.relayed_links import (
    RelayOffer,
    is_undialable,
    needs_relay,
    relay_line_mbps,
    relayed_mbps,
)
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.population.volunteers import Volunteer

SYMMETRIC_PART = 0.16
"""Of those that cannot be dialled. So 71 % of their pairs punch; 70 % was measured of pairs on IPFS (arXiv
2510.27500)."""
_RELAY_PORT = 443
_ASKING_RTT = 3.0
"""Round trips until a relay has answered."""
_LOOKS = 2
"""Beside the seed: relays that are looked at are not drawn from what draws volunteers."""


class SwarmReach:
    """Owner of who relays for whom. Its round trips are those of the ways that links take."""

    def __init__(self, seed: int, part: float, places: Places) -> None:
        """`places`: the round trips of direct ways."""
        self.symmetric = 0
        """Volunteers that nobody can dial and whose NAT gives each destination another port; and the next those that
        nobody can dial, of whatever NAT, and the one after it those that can be dialled, all that ever came."""
        self.undialable = 0
        self.dialable = 0
        self._seed = seed
        self._part = part
        self._places = places
        self._rng: Generator = default_rng((seed, _LOOKS))
        self._relays: dict[str, RelayAt] = {}
        """Those that are there."""
        self._stayers: dict[str, dict[str, None]] = {}
        """By relay, those that have stayed there."""
        self._stays: dict[str, tuple[RelayAt, ...]] = {}
        """By volunteer that nobody can dial, where it stays, which is not all that it has told others."""
        self._volunteers: dict[str, Volunteer] = {}

    def settle_all(self, volunteers: list[Volunteer]) -> list[Volunteer]:
        """Those that are there from the beginning, as they announce themselves."""
        ranked = sorted(volunteers, key=lambda one: self._drawn(one)[0] < self._part)
        settled = {one.peer_id: self.settle(one) for one in ranked}
        return [settled[one.peer_id] for one in volunteers]

    def settle(self, volunteer: Volunteer) -> Volunteer:
        """One that comes, as it announces itself. Who comes while nobody relays can be dialled, or there is no swarm
        that it could come to."""
        drawn, nat = self._drawn(volunteer)
        if drawn >= self._part or not self._relays:
            self.dialable += 1
            facts = announced(volunteer.facts, Finding(Reachable.DIALABLE), (), _RELAY_PORT)
            self._relays[volunteer.peer_id] = RelayAt(volunteer.peer_id, facts.relay_address)
        else:
            self.undialable += 1
            hard = nat < SYMMETRIC_PART
            self.symmetric += hard
            stays = self._stay(volunteer.peer_id, ())
            facts = announced(volunteer.facts, Finding(Reachable.RELAYED), stays, None, hard=hard)
        return self._announced(volunteer, facts)

    def gone(self, peer_id: str) -> tuple[str, ...]:
        """A volunteer is gone, and relays for nobody any more: for whom it did."""
        self._relays.pop(peer_id, None)
        self._stays.pop(peer_id, None)
        return tuple(self._stayers.pop(peer_id, ()))

    def moved(self, volunteer: Volunteer, lost: str) -> Volunteer | None:
        """The same volunteer with what it announces after it has lost that relay; None: it announces nothing, for it
        did not stay there, or what it told before holds on, or there is no other relay."""
        facts, staying = volunteer.facts, self._stays.get(volunteer.peer_id, ())
        kept = tuple(relay for relay in staying if relay.peer_id != lost)
        if len(kept) == len(staying) or not self._relays:
            return None
        told = relays_to_tell(facts.relays, self._stay(volunteer.peer_id, kept))
        if told == facts.relays:
            return None
        facts = announced(facts, Finding(Reachable.RELAYED), told, None, hard=not facts.cone)
        return self._announced(volunteer, facts)

    def rtt_ms(self, one: str, other: str) -> float:
        """The round trip of the way that `one` has to `other`."""
        relay = self.relay_between(one, other)
        if relay is None:
            return self._places.rtt_ms(one, other)
        return self._places.rtt_ms(one, relay) + self._places.rtt_ms(relay, other)

    def relay_between(self, one: str, other: str) -> str | None:
        """The relay over which `one` reaches `other`, if it needs any: the first there is of where `other` stays, which
        is dialled first."""
        here, there = self._facts(one), self._facts(other)
        if there is None or not is_undialable(there) or (here is not None and not needs_relay(here, there)):
            return None
        stays = [relay.peer_id for relay in there.relays]
        return next((peer_id for peer_id in stays if peer_id in self._relays), stays[0])

    def relays_with_mbps(self, peer_id: str) -> float:
        """What a volunteer relays with, all pairs together."""
        return relayed_mbps(self._volunteers[peer_id].uplink_mbps)

    def offer(self, peer_id: str, pairs: int = 0) -> RelayOffer:
        """What a relay offers to one more link while it joins so many pairs."""
        volunteer = self._volunteers[peer_id]
        return RelayOffer(
            peer_id,
            volunteer.facts.name,
            volunteer.facts.coordinate,
            self.relays_with_mbps(peer_id) / (1 + pairs),
            relay_line_mbps(volunteer.uplink_mbps),
        )

    def offers(self) -> dict[str, RelayOffer]:
        """What each relay offers while it joins nobody."""
        return {peer_id: self.offer(peer_id) for peer_id in self._relays}

    def _stay(self, peer_id: str, kept: tuple[RelayAt, ...]) -> tuple[RelayAt, ...]:
        """Where it stays from now on, of these as long as it can."""
        self._stays[peer_id] = stays = stays_for(kept, self._near(peer_id))
        for relay in stays:
            self._stayers.setdefault(relay.peer_id, {})[peer_id] = None
        return stays

    def _announced(self, volunteer: Volunteer, facts: PeerFacts) -> Volunteer:
        self._volunteers[volunteer.peer_id] = settled = replace(volunteer, facts=facts)
        return settled

    def _facts(self, peer_id: str) -> PeerFacts | None:
        """None: it is a client."""
        volunteer = self._volunteers.get(peer_id)
        return None if volunteer is None else volunteer.facts

    def _near(self, peer_id: str) -> tuple[RelayAt, ...]:
        """Relays drawn by chance, the nearest first."""
        relays = list(self._relays.values())
        looked_at = self._rng.choice(len(relays), min(MOST_LOOKED_AT, len(relays)), replace=False)
        answers = []
        for at in looked_at.tolist():
            took_s = _ASKING_RTT * self._places.rtt_ms(peer_id, relays[at].peer_id) / 1000
            answers.append(RelayAnswer(relays[at], took_s, observed="", found=None))
        return judge(answers).near

    def _drawn(self, volunteer: Volunteer) -> tuple[float, float]:
        """Two numbers from 0 to 1 that depend on the seed and the volunteer alone."""
        digest = hashlib.blake2b(
            f"{self._seed}\0{volunteer.peer_id}".encode(), digest_size=16, usedforsecurity=False
        ).digest()
        return int.from_bytes(digest[:8], "little") / 2**64, int.from_bytes(digest[8:], "little") / 2**64
