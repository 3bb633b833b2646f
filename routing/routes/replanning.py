"""Replanning with hysteresis: the incumbent route is kept unless another is really better.

A search is run only where its outcome could matter. Between the snapshot of the last search and the present
one, no circuit can have become better by more than `possible_gain_ms`: each layer is computed once, and each
machine used at most once. If the standing circuit, costed anew, is close enough to the best known circuit less
that gain, no search can find a reason to leave it.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.cost.terms import Demand
from molink.routing.problem.circuit import Hop, NoCircuit
from molink.routing.problem.problem import CircuitProblem
from molink.routing.routes.guessed_trips import TripShares, possible_savings
from molink.routing.routes.planner import Criteria, search_route
from molink.routing.routes.route import Route, route_of
from molink.routing.snapshot import PosedProblem, Snapshot


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Hysteresis: another circuit must be better by more than both."""

    relative: float = 0.1
    """As a part of what the standing circuit costs. Round trips are announced anew when they change by a
    quarter, so that less than this may be noise."""
    absolute_ms: float = 2.0
    """Per token. Below it, moving costs more than it brings."""

    def __post_init__(self) -> None:
        for name, value in (("relative", self.relative), ("absolute_ms", self.absolute_ms)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def real(self, standing_ms: float, other_ms: float) -> bool:
        """Whether leaving a circuit that costs `standing_ms` for one that costs `other_ms` is worth it."""
        return standing_ms - other_ms > max(self.relative * standing_ms, self.absolute_ms)


HYSTERESIS = Hysteresis()


@dataclass(frozen=True, slots=True, eq=False)
class IncumbentRoute:
    """Incumbent route: the circuit in use, and the problem that the last search solved."""

    route: Route
    """With its costs as of the last look."""
    searched: PosedProblem
    best_ms: float
    """The objective of the best circuit that the last search found."""
    shares: TripShares | None = None
    """What guesses would have left of trips then; None: none were asked for."""


def replan(
    standing: Route,
    snapshot: Snapshot,
    tokens: int,
    *,
    prompt_tokens: int | None = None,
    leased: frozenset[str] = frozenset(),
    criteria: Criteria = Criteria(),  # noqa: B008 (an immutable value)
) -> Route:
    """The standing circuit with its costs as they are now, or another one that is really better.

    It stands as long as its peers are usable, willing and have the memory that it needs; `leased` are those
    that have promised theirs already. Lengths and errors are as for `plan`; NoCircuit is raised only if the
    standing circuit does not hold either.
    """
    posed = snapshot.pose(Demand.of(tokens, prompt_tokens), avoid=criteria.avoid, cost=criteria.cost)
    kept = _costed_anew(standing, posed, snapshot, leased, criteria)
    return _searched(kept, posed, snapshot, criteria).route


def replan_incumbent(
    standing: IncumbentRoute | None,
    snapshot: Snapshot,
    tokens: int,
    *,
    prompt_tokens: int | None = None,
    leased: frozenset[str] = frozenset(),
    criteria: Criteria = Criteria(),  # noqa: B008 (an immutable value)
) -> IncumbentRoute:
    """Replans as `replan` does, without a search where none can find a reason to leave the incumbent route.

    To be called with what it last returned, None at first. What changes by little is summed up until it
    matters: the comparison is always with the snapshot of the last search.
    """
    posed = snapshot.pose(Demand.of(tokens, prompt_tokens), avoid=criteria.avoid, cost=criteria.cost)
    kept = None
    if standing is not None:
        kept = _costed_anew(standing.route, posed, snapshot, leased, criteria)
        if kept is not None:
            lowest_ms = standing.best_ms - possible_gain_ms(standing.searched, posed)
            if standing.shares is not None and math.isfinite(lowest_ms):
                shares = TripShares.of(posed.views, snapshot, criteria.cost)
                part, rows_ms = possible_savings(standing.searched, standing.shares, posed, shares)
                lowest_ms = part * max(0.0, lowest_ms - rows_ms)
            if not HYSTERESIS.real(kept.objective_ms, lowest_ms):
                return replace(standing, route=kept)
    return _searched(kept, posed, snapshot, criteria)


def possible_gain_ms(before: PosedProblem, after: PosedProblem) -> float:
    """An upper bound on how much less the best circuit can cost after than before; infinite if circuits may
    be possible that were not, or cost less to load, or links are known by coordinates only."""
    places = {peer_id: machine for machine, peer_id in enumerate(before.peer_ids)}
    if not places.keys() >= set(after.peer_ids):
        return math.inf
    rows = np.array([places[peer_id] for peer_id in after.peer_ids], dtype=np.int64)
    old, new = before.problem, after.problem
    if old.latency_ms is None or new.latency_ms is None or _opened(old, new, rows):
        return math.inf
    used_once = _gain(old.hop_penalty_ms, new.hop_penalty_ms, rows)
    if len(rows) > 1:
        used_once = used_once + (old.latency_ms[np.ix_(rows, rows)] - new.latency_ms).max(axis=1).clip(
            min=0.0
        )
    most = np.sort(used_once)[::-1][: new.layers]
    layers = (old.layer_ms[rows] - new.layer_ms).clip(min=0.0).max(axis=0, initial=0.0)
    ends = _gain(old.embed_ms, new.embed_ms, rows).max(initial=0.0)
    ends += _gain(old.head_ms, new.head_ms, rows).max(initial=0.0)
    return float(most.sum() + layers.sum() + ends)


def _searched(
    kept: Route | None, posed: PosedProblem, snapshot: Snapshot, criteria: Criteria
) -> IncumbentRoute:
    """The outcome of a search, unless what is kept is as good or there is nothing else."""
    shares = TripShares.of(posed.views, snapshot, criteria.cost) if criteria.guesses else None
    try:
        best = search_route(posed, snapshot, criteria)
    except NoCircuit:
        if kept is None:
            raise
        return IncumbentRoute(kept, posed, kept.objective_ms, shares)
    if kept is not None and not HYSTERESIS.real(kept.objective_ms, best.objective_ms):
        return IncumbentRoute(kept, posed, min(kept.objective_ms, best.objective_ms), shares)
    return IncumbentRoute(best, posed, best.objective_ms, shares)


def _costed_anew(
    route: Route, posed: PosedProblem, snapshot: Snapshot, leased: frozenset[str], criteria: Criteria
) -> Route | None:
    """The route under a new problem; None if it cannot be used any more."""
    machines = {peer_id: machine for machine, peer_id in enumerate(posed.peer_ids)}
    if not machines.keys() >= set(route.peer_ids) or not criteria.require <= set(route.peer_ids):
        return None
    hops = tuple(Hop(machines[hop.peer_id], hop.span.start, hop.span.stop) for hop in route.hops)
    if hops[-1].stop != posed.problem.layers:
        return None
    if not all(_holds(posed.problem, hop, posed.peer_ids[hop.machine] in leased) for hop in hops):
        return None
    return route_of(posed, hops, snapshot, criteria.cost, criteria.activation_codec, guesses=criteria.guesses)


def _holds(problem: CircuitProblem, hop: Hop, leased: bool) -> bool:
    """Whether the machine can serve the hop: it is willing, and has the memory or has promised it."""
    machine, span = hop.machine, slice(hop.start, hop.stop)
    if problem.allowed is not None and not problem.allowed[machine, span].all():
        return False
    if leased:
        return True
    cold = int(problem.cold_bytes()[machine, span].sum())
    starts, ends = hop.start == 0, hop.stop == problem.layers
    if starts and ends:
        cold += int(problem.cold_ends_bytes()[machine])
    elif starts or ends:
        cold += int((problem.cold_embed_bytes() if starts else problem.cold_head_bytes())[machine])
    if cold > problem.free_bytes[machine]:
        return False
    if problem.kv_bytes is None or problem.free_kv_bytes is None:
        return True
    return bool(problem.kv_bytes[span].sum() <= problem.free_kv_bytes[machine])


def _opened(old: CircuitProblem, new: CircuitProblem, rows: IntArray) -> bool:
    """Whether any machine of the new problem may serve what it could not before, or load it sooner."""
    everywhere = np.ones((old.machines, old.layers), dtype=np.bool_)
    nowhere = np.zeros((old.machines, old.layers), dtype=np.bool_)
    willing, held = _table(old.allowed, everywhere)[rows], _table(old.resident, nowhere)[rows]
    now_willing = _table(new.allowed, everywhere[rows])
    now_held = _table(new.resident, nowhere[rows])
    opened = np.any((now_willing & ~willing) | (now_held & ~held), axis=1)
    whole = int(old.layer_bytes.sum()) + old.embed_bytes + old.head_bytes
    cold = (now_willing & ~now_held).any(axis=1)
    opened |= cold & (np.minimum(new.free_bytes, whole) > np.minimum(old.free_bytes[rows], whole))
    faster = (old.cold_load_ms()[0][rows] - new.cold_load_ms()[0] > 0).any(axis=1)
    opened |= cold & faster
    opened |= _sessions(new) > _sessions(old)[rows]
    return bool(opened.any())


def _sessions(problem: CircuitProblem) -> FloatArray:
    """[machines]: the part of a whole model's KV cache for the session that fits, 1 at most."""
    if problem.kv_bytes is None or problem.free_kv_bytes is None:
        return np.ones(problem.machines)
    return np.minimum(1.0, problem.free_kv_bytes / max(1, int(problem.kv_bytes.sum())))


def _gain(old: FloatArray | None, new: FloatArray | None, rows: IntArray) -> FloatArray:
    """[machines of the new problem]: by how much each costs less."""
    nothing = np.zeros(len(rows))
    return ((nothing if old is None else old[rows]) - (nothing if new is None else new)).clip(min=0.0)


def _table(values: BoolArray | None, default: BoolArray) -> BoolArray:
    return default if values is None else values
