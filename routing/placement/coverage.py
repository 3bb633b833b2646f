"""Coverage: what a placement of layers is worth, by the rate of each layer and the TPOT of the best circuit.

Placements are asked about one peer at a time: what if it held these layers, all others staying as they are?
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from molink.dht.records.records import PeerView
from molink.routing.arrays import BoolArray, FloatArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.guesses import GuessingHead, guessing_head, trip_shares
from molink.routing.cost.reliability import UNSEEN
from molink.routing.cost.terms import Demand
from molink.routing.placement.neighbourhood import neighbours
from molink.routing.plan import plan_circuit
from molink.routing.problem.circuit import Hop, NoCircuit
from molink.routing.problem.problem import CircuitProblem
from molink.routing.search.augmented import plan_below
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span, merge_spans

_LEAST_MS = 1e-6
"""A time of 0 cannot have been measured."""


def layer_table(layers: int, spans: Iterable[Span]) -> BoolArray:
    """[layers]: whether a layer is in one of the spans."""
    table = np.zeros(layers, dtype=np.bool_)
    for span in spans:
        table[span.start : span.stop] = True
    return table


def spans_of(table: BoolArray) -> tuple[Span, ...]:
    """The layers of a table as spans, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], table, [False])).astype(np.int8)))
    return tuple(Span(int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


def weight_bytes(model: ModelSpec, table: BoolArray) -> int:
    """Weights of the layers, with the embedding if the first and the head if the last is among them."""
    return model.held_bytes(spans_of(table))


def peer_rate(view: PeerView, table: BoolArray) -> float:
    """Tokens per second that a peer takes through the layers, all in turn, at the batch size where it does most."""
    best, facts, held = 0.0, view.facts, int(np.count_nonzero(table))
    embed_ms, head_ms = facts.embed_ms if table[0] else 0.0, facts.head_ms if table[-1] else 0.0
    for latency in facts.layer_latencies:
        time_ms = latency.layer_ms * held + facts.step_ms + embed_ms + head_ms
        best = max(best, latency.batch_size * 1000.0 / max(time_ms, _LEAST_MS))
    return best


def layer_rates(views: Iterable[PeerView], layers: int) -> FloatArray:
    """[layers]: tokens per second that the layer's holders could take through it together; 0 where there are none.

    The least of them is what the swarm makes at most with circuits through what is held now.
    """
    rates = np.zeros(layers)
    for view in views:
        table = layer_table(layers, view.state.spans)
        if table.any():
            rates[table] += peer_rate(view, table)
    return rates


def as_promised(view: PeerView) -> PeerView:
    """The peer as it will be when what it is loading is there: what counts when others choose their layers."""
    state = view.state
    if not state.loading:
        return view
    return replace(view, state=replace(state, spans=merge_spans((*state.spans, *state.loading)), loading=()))


@dataclass(frozen=True, slots=True)
class BestCircuit:
    """The best circuit of a placement."""

    tpot_ms: float
    own_hop: Hop | None
    """What the peer in question does in it."""
    stops: tuple[int, ...]
    """Where its hops end."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A swarm in which one peer's layers are open to question."""

    model: ModelSpec
    view: PeerView
    """The peer in question."""
    total_bytes: int
    """What the peer has for weights, held ones included."""
    problem: CircuitProblem
    """Of all of them. Loading takes time once, but a circuit lasts: it has no weight here."""
    row: int
    """The peer's machine in `problem`."""
    other_rates: FloatArray
    """`layer_rates` of the others in `problem`, with what they are loading as if it were there."""
    cost: CostModel
    heads: tuple[GuessingHead, ...]
    """What the guesses of each machine of `problem` are expected to be, if it is the head."""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        view: PeerView,
        tokens: int,
        cost: CostModel,
        usable: Iterable[PeerView] | None = None,
    ) -> "Placement":
        """`view` is the peer in question, whether or not the snapshot has it; of a large swarm, among its neighbours.
        `usable`: the snapshot's usable peers, if they have been found. Raises ValueError if the peer is not usable."""
        usable = snapshot.usable() if usable is None else usable
        near = neighbours([other for other in usable if other.peer_id != view.peer_id], view.facts.coordinate)
        others = tuple(as_promised(other) for other in near)
        relays = snapshot.relay_offers()
        whole = Snapshot((*others, view), snapshot.model, snapshot.measured_rtt_ms, relays=relays)
        posed = whole.pose(Demand.of(tokens), cost=cost)
        if view.peer_id not in posed.peer_ids:
            raise ValueError(f"{view.peer_id} cannot take part: it drains, or its measurements make no sense")
        held = weight_bytes(snapshot.model, layer_table(snapshot.model.layers, view.state.spans))
        return cls(
            model=snapshot.model,
            view=view,
            total_bytes=max(0, view.state.free_weight_bytes) + held,
            problem=posed.of_decode_steps(),
            row=posed.peer_ids.index(view.peer_id),
            other_rates=layer_rates(others, snapshot.model.layers),
            cost=cost,
            heads=tuple(guessing_head(each.facts, UNSEEN, cost) for each in posed.views),
        )

    @property
    def willing(self) -> BoolArray:
        """[layers]: what the peer may hold."""
        limit = self.view.facts.span_limit
        return layer_table(self.model.layers, (*self.view.state.spans, limit or self.model.whole))

    def rates(self, table: BoolArray) -> FloatArray:
        """`layer_rates` if the peer held these layers."""
        rates = np.array(self.other_rates)
        if table.any():
            rates[table] += peer_rate(self.view, table)
        return rates

    def without(self) -> BestCircuit | None:
        """The best circuit of the others; None without one."""
        return _best(self.problem.subset(np.delete(np.arange(self.problem.machines), self.row)), None)

    def holding(self, table: BoolArray, below_ms: float = math.inf) -> BestCircuit | None:
        """The best circuit if the peer held these layers and loaded others into the memory that is left; None if its
        TPOT is not found to be below so much."""
        problem, row = self.problem, self.row
        size = (problem.machines, problem.layers)
        resident = np.zeros(size, dtype=np.bool_) if problem.resident is None else np.array(problem.resident)
        allowed = np.ones(size, dtype=np.bool_) if problem.allowed is None else np.array(problem.allowed)
        free = np.array(problem.free_bytes)
        resident[row] = table
        allowed[row] |= table
        free[row] = max(0, self.total_bytes - weight_bytes(self.model, table))
        held = replace(
            problem,
            resident=resident,
            allowed=allowed,
            free_bytes=free,
            embed_resident=resident[:, 0],
            head_resident=resident[:, -1],
        )
        return _best(held, row, below_ms)

    def guessed_ms(self, table: BoolArray, own: GuessingHead) -> float | None:
        """The best circuit's time per token if the peer held these layers, its guesses were such, and all others take
        rows of guesses; None without a circuit. A peer may be head of it or not."""
        heads = [own if row == self.row else head for row, head in enumerate(self.heads)]
        trip_ms, problem, found = 0.0, self.problem, None
        for _ in range(2):  # what a head saves depends on how long a trip is
            shares = trip_shares(heads, trip_ms)
            least = float(shares.min())
            embed_ms = 0.0 if problem.embed_ms is None else problem.embed_ms * least
            shared = replace(
                problem,
                layer_ms=problem.layer_ms * least,
                latency_ms=None if problem.latency_ms is None else problem.latency_ms * least,
                embed_ms=embed_ms + (shares - least) * trip_ms,
                head_ms=None if problem.head_ms is None else problem.head_ms * least,
            )
            found = replace(self, problem=shared).holding(table)
            if found is None:
                return None
            trip_ms = found.tpot_ms / least
        return None if found is None else found.tpot_ms

    def longest(self, start: int, kept: BoolArray) -> int:
        """Returns where the longest span from `start` ends that fits beside the layers kept; `start` if none does."""
        kept_spans, willing = spans_of(kept), self.willing
        stop, tokens_bytes = start, 0
        kv_bytes = self.problem.kv_bytes if self.problem.kv_bytes is not None else np.zeros(self.model.layers)
        while stop < self.model.layers and willing[stop]:
            tokens_bytes += int(kv_bytes[stop])
            if (
                self.model.held_bytes((*kept_spans, Span(start, stop + 1))) > self.total_bytes
                or tokens_bytes > self.view.state.free_kv_bytes
            ):
                break
            stop += 1
        return stop

    def candidates(self, kept: BoolArray) -> list[Span]:
        """The longest span from each layer on, less those that lie within another one."""
        spans: list[Span] = []
        for start in range(self.model.layers):
            stop = self.longest(start, kept)
            if stop > start and (not spans or stop > spans[-1].stop):
                spans.append(Span(start, stop))
        return spans


def thinness(rates: FloatArray) -> tuple[float, ...]:
    """Placements in order: the greater, the better off are the layers with the least capacity."""
    return tuple(np.sort(np.round(rates, 6)).tolist())


def _best(problem: CircuitProblem, row: int | None, below_ms: float = math.inf) -> BestCircuit | None:
    try:
        circuit = plan_circuit(problem) if below_ms == math.inf else plan_below(problem, below_ms)
    except NoCircuit:
        return None
    if circuit is None:
        return None
    own = next((hop for hop in circuit.hops if hop.machine == row), None)
    return BestCircuit(circuit.tpot_ms, own, tuple(hop.stop for hop in circuit.hops))
