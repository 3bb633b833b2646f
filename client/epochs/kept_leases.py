"""Kept leases: what hops may still have of a generation that has left their circuit. No I/O.

A hop whose lease goes on in a higher epoch keeps its KV cache, so a lease is not given back before another circuit
stands: hops that are in both compute again only what some hop of the new one does not hold.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from molink.dht.records.records import PeerView
from molink.routing import Route

RETRY_S = 2.0
"""What trying the same circuit once more may cost, where it fails again."""


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """A route, and the peers that were known when it was planned."""

    route: Route
    peers: Mapping[str, PeerView]


class LeasedHop(Protocol):
    """A hop that was asked for a lease."""

    @property
    def peer_id(self) -> str: ...


class LeasedCircuit(Protocol):
    """A circuit in one epoch, as its hops were asked for leases: a session's descriptor, or what a simulation has in
    its place."""

    @property
    def hops(self) -> Iterable[LeasedHop]: ...


Leased = TypeVar("Leased", bound=LeasedCircuit)
Without = Callable[[PlannedRoute, Collection[str]], PlannedRoute | None]
"""The same route with standbys in the places of those of these peers that have one; None: none has."""


@dataclass(slots=True)
class KeptLeases(Generic[Leased]):
    """Leases of one generation on circuits that it has left."""

    _asked: dict[str, list[Leased]] = field(default_factory=dict)
    """By hop, the epochs in which it was asked for a lease; a later one has taken the place of those before if it was
    granted."""
    _again: PlannedRoute | None = None
    _seized: PlannedRoute | None = None
    _without: Without | None = None

    def keep(self, left: Leased) -> None:
        """The generation has left this circuit, whose hops have its KV cache."""
        for hop in left.hops:
            self._asked.setdefault(hop.peer_id, []).append(left)

    def sort_out(self, refused: Leased) -> list[str]:
        """A circuit could not be formed, of which any hop may have granted. Returns the hops to give their leases back
        to now; the others have a KV cache from an earlier epoch."""
        for hop in refused.hops:
            if hop.peer_id in self._asked:
                self._asked[hop.peer_id].append(refused)
        return [hop.peer_id for hop in refused.hops if hop.peer_id not in self._asked]

    def take_all_but(self, peer_ids: Collection[str]) -> list[tuple[str, Leased]]:
        """A circuit of these peers stands, or there will be none. Returns the leases to give back: nothing is kept."""
        left = [
            (peer_id, descriptor)
            for peer_id, asked in self._asked.items()
            if peer_id not in peer_ids
            for descriptor in asked
        ]
        self._asked.clear()
        self._again = self._seized = self._without = None
        return left

    def try_again(self, circuit: PlannedRoute, lacking_s: float) -> None:
        """A link of this circuit broke, which may be there again: it is tried once more, before any other, if what
        others lack takes longer to compute than that may cost."""
        if lacking_s > RETRY_S:
            self._again = circuit

    def seize(self, circuit: PlannedRoute, without: Without) -> None:
        """The circuit that was left, with a standby in the lost hop's place, is what comes next. If it lacks a further
        hop, `without` says what is next then."""
        self._seized, self._without = circuit, without

    def seize_without(self, tried: PlannedRoute, peer_id: str) -> str:
        """That peer is gone, too, from the circuit that was tried. Returns who keeps a copy of its hop, and is in its
        place in what `take_seized` gives next; empty: nobody, or what was tried was no circuit that is seized."""
        self._seized = None if self._without is None else self._without(tried, (peer_id,))
        if self._seized is None:
            return ""
        places = zip(tried.route.peer_ids, self._seized.route.peer_ids, strict=True)
        return next(after for before, after in places if before == peer_id)

    def take_seized(self) -> PlannedRoute | None:
        """The circuit that `core.Seize` is about, once."""
        seized, self._seized = self._seized, None
        return seized

    @property
    def has_next(self) -> bool:
        """Whether there is a circuit to try before another is planned."""
        return self._again is not None

    def take_again(self) -> PlannedRoute | None:
        """Another circuit is planned, for which no standbys were chosen: nothing is seized from now on. Returns the one
        to try before that, once."""
        again, self._again = self._again, None
        self._seized = self._without = None
        return again
