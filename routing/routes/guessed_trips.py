"""Circuits whose heads guess: what of a trip's time a token takes, for the search and for a route. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from molink.dht.records.records import PeerView
from molink.routing.arrays import BoolArray, FloatArray
from molink.routing.cost.cost import CostModel, layer_ms_at
from molink.routing.cost.guesses import (
    NO_GUESSES,
    GuessingHead,
    best_guesses,
    guessing_head,
    trip_shares,
)
from molink.routing.cost.terms import batch_size
from molink.routing.problem.circuit import Hop
from molink.routing.problem.problem import CircuitProblem
from molink.routing.snapshot import PosedProblem, Snapshot
from molink.shards.spec import GUESSES, MOST_GUESSED_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class TripShares:
    """What the guesses of each machine would leave of a trip's time for a token, if it were the head."""

    heads: tuple[GuessingHead, ...]
    """One for each machine."""
    takes: BoolArray
    """[machines]: whether it takes rows of guesses as any hop. One that does not lets none travel."""

    @classmethod
    def of(cls, views: Sequence[PeerView], snapshot: Snapshot, cost: CostModel) -> "TripShares":
        """Of these peers, as the snapshot's router has seen them."""
        takes = np.array([GUESSES in view.facts.sampling_abilities for view in views], dtype=np.bool_)
        return cls(tuple(guessing_head(view.facts, snapshot.seen(view), cost) for view in views), takes)

    @property
    def differ(self) -> bool:
        """Whether it matters who is the head, and who is on the circuit."""
        return len({(one.chance, one.guess_ms) for one in self.heads}) > 1 or not self.takes.all()

    def per_token(self, posed: PosedProblem, trip_ms: float) -> CircuitProblem:
        """The posed problem in milliseconds per token: all that a trip takes is shared as the best head would share it.
        Other heads, and hops that let no guesses travel, cost what that is too little for a trip of `trip_ms`; 0:
        nobody knows how long one is, and they cost nothing."""
        if not any(one.chance for one in self.heads):
            return posed.problem
        problem, costs = posed.problem, posed.costs
        shares = trip_shares(self.heads, trip_ms)
        least = float(shares.min())
        once_ms = np.array([each.prefill_ms + each.reliability_ms for each in costs])
        hop_ms = np.array([each.hop_ms for each in costs]) - once_ms
        client_ms = np.array([each.client_link_ms for each in costs])
        start_ms = np.array([each.start_ms for each in costs]) - client_ms
        latency_ms = posed.links.latency_ms * least
        if posed.relay_ms is not None:
            latency_ms = latency_ms + posed.relay_ms.alone_ms * least
            latency_ms = latency_ms + posed.relay_ms.among_ms * posed.demand.prompt_part
        return replace(
            problem,
            layer_ms=problem.layer_ms * least,
            latency_ms=latency_ms,
            embed_ms=start_ms * least + client_ms + (shares - least) * trip_ms,
            head_ms=None if problem.head_ms is None else problem.head_ms * least,
            hop_penalty_ms=hop_ms * least + once_ms + np.where(self.takes, 0.0, (1 - least) * trip_ms),
        )


@dataclass(frozen=True, slots=True)
class GuessedTrip:
    """What guesses are predicted to do for a circuit's tokens."""

    head: GuessingHead = NO_GUESSES
    guesses: int = 0
    """Of a trip."""
    token_ms: float = 0.0
    """What is left of a trip's time for a token."""

    @property
    def tokens(self) -> float:
        """That a trip is expected to bring."""
        return self.head.tokens(self.guesses)

    @property
    def said(self) -> str:
        """For people: what is expected of the head."""
        by = f"{1 / (1 - self.head.chance):.1f} tokens a trip at most"
        return (
            f"{by}, of {self.head.trips} trips" if self.head.trips else f"{by}, of its draft {self.head.kind}"
        )


def guessed_trip(
    posed: PosedProblem, hops: Sequence[Hop], snapshot: Snapshot, cost: CostModel, trip_ms: float
) -> GuessedTrip:
    """What guesses do for a circuit whose trips take so long without. All sessions that step together are taken to have
    as many: rows cost most where engines are full."""
    views = [posed.views[hop.machine] for hop in hops]
    if not all(GUESSES in view.facts.sampling_abilities for view in views):
        return GuessedTrip(token_ms=trip_ms)
    head = guessing_head(views[0].facts, snapshot.seen(views[0]), cost)
    sizes = [batch_size(view) for view in views]
    transfer_ms = sum(posed.costs[hop.machine].transfer_ms for hop in hops[:-1])

    def with_guesses_ms(guesses: int) -> float:
        rows_ms = guesses * transfer_ms
        for hop, view, size in zip(hops, views, sizes, strict=True):
            rows_ms += (hop.stop - hop.start) * _rows_ms(view, size, guesses)
        return trip_ms + rows_ms

    guesses, token_ms = best_guesses(head, with_guesses_ms)
    return GuessedTrip(head, guesses, token_ms)


def possible_savings(
    before: PosedProblem, old: TripShares, after: PosedProblem, new: TripShares
) -> tuple[float, float]:
    """Bounds on what has changed for circuits' guesses: the part of what a token took that is left at least, and
    milliseconds that their rows take less at most. All peers of `after` have to be among those of `before`."""
    places = {peer_id: machine for machine, peer_id in enumerate(before.peer_ids)}
    part, rows_ms = 1.0, np.zeros(1 + MOST_GUESSED_TOKENS)
    for machine, peer_id in enumerate(after.peer_ids):
        was = places[peer_id]
        if new.takes[machine] and not old.takes[was]:
            return 0.0, 0.0
        one, other = old.heads[was], new.heads[machine]
        cheaper = other.guess_ms / one.guess_ms if other.guess_ms < one.guess_ms else 1.0
        part = min(part, cheaper * (1 - other.chance) / (1 - one.chance))
        rows_ms = np.maximum(rows_ms, _saved_rows_ms(before.views[was], after.views[machine]))
    return part, after.problem.layers * float(rows_ms.max())


def _saved_rows_ms(old: PeerView, new: PeerView) -> FloatArray:
    """By how much a layer takes less for the rows of guesses, by their number, where fewer sessions step together."""
    few, many = batch_size(new), batch_size(old)
    saved_ms = np.zeros(1 + MOST_GUESSED_TOKENS)
    if (few, new.facts.layer_latencies) == (many, old.facts.layer_latencies):
        return saved_ms
    for guesses in range(1, 1 + MOST_GUESSED_TOKENS):
        saved_ms[guesses] = _rows_ms(old, many, guesses) - _rows_ms(new, few, guesses)
    return saved_ms


def _rows_ms(view: PeerView, sessions: int, guesses: int) -> float:
    """What a layer takes longer where so many sessions have so many guesses each."""
    latencies = view.facts.layer_latencies
    return layer_ms_at(latencies, sessions * (1 + guesses)) - layer_ms_at(latencies, sessions)
