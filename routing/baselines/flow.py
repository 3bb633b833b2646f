"""Upper bound of a swarm's tokens per second by maximum flow, however it is cut into disjoint circuits.

Every token of a circuit passes each layer once, and a machine in the circuit of rate r that serves k layers does
k r layers a second. So the rates of all circuits together are a flow: from each machine to the layers that it can
serve, the same amount through every layer. A machine gives at most

- what it computes in a second, and
- as many layers as fit its memory, times the highest rate that a circuit through it can have.

The largest total rate T for which the maximum flow fills every layer is an upper bound, for both objectives of
`plan_circuits`. It is found by Newton's method: T begins at what all layers together allow; while the flow fails,
its minimum cut names layers that cannot have T each, and T falls to what these allow. This is the layer graph of
the decentralized-scheduling paper (Algorithm 1) with the machines' copies in all layers joined into one vertex,
without its links; links count as the least time that a circuit through a machine takes.

Where one token at a time goes around each circuit there is a second bound, often the lower one: n disjoint circuits
of L layers take n L places on machines, together no less than the n L cheapest ones. Rates are convex in times, so
the total is largest if the first circuit has the L cheapest places, the second the next L, and so on (majorization).
"""

from dataclasses import dataclass

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import most_layers, remaining_ms, servable_layers

_SCALE = 10**9
"""Flow of one layer at the rate asked, as an integer: capacities are rounded up, so that the bound holds."""
_ROUNDING = 1 - 1e-9
"""Sums are rounded in another order here than where circuits are timed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Supply:
    """Supply of machines at a total rate of T tokens per second: count x min(T, kink) layers each."""

    count: FloatArray
    """[machines]: layers that fit, as an upper bound."""
    kink: FloatArray
    """[machines]: tokens per second above which the machine gives no more; may be infinite."""

    def at(self, rate: float) -> FloatArray:
        """[machines]: layers per second."""
        return np.asarray(self.count * np.minimum(self.kink, rate), dtype=np.float64)


def throughput_bound(
    problem: CircuitProblem, objective: str = "throughput", max_tpot_ms: float | None = None
) -> float:
    """An upper bound on the tokens per second of any set of disjoint circuits within the TPOT limit.

    `throughput`: circuits are pipelined, each as fast as its slowest hop computes. `latency`: one token at a time
    goes around each. 0 proves that there is no circuit; infinite if nothing takes time. Raises ValueError for an
    unknown objective or a limit that is not above 0.
    """
    check_objective(objective, max_tpot_ms)
    servable = servable_layers(problem)
    count = most_layers(problem).astype(np.float64)
    floor = circuit_floor_ms(problem)
    if max_tpot_ms is not None:
        count[floor > max_tpot_ms] = 0.0
    if not servable[count > 0].any(axis=0).all():
        return 0.0
    unit = np.where(servable, problem.layer_ms, np.inf).min(axis=1)
    with np.errstate(divide="ignore"):
        kink = np.where(count > 0, 1000.0 / (unit * np.maximum(count, 1.0)), 0.0)
        if objective == "latency":
            kink = np.minimum(kink, 1000.0 / floor)
    rate = _largest_rate(_Supply(count, kink), servable)
    if objective == "latency" and np.isfinite(rate):
        rate = min(rate, _ranked_rate(problem, count.astype(np.int64), unit, max_tpot_ms))
    return rate / _ROUNDING


def _ranked_rate(
    problem: CircuitProblem, count: IntArray, unit: FloatArray, max_tpot_ms: float | None
) -> float:
    """Tokens per second of circuits that have the cheapest places, L each, one token at a time.

    A place costs its computation and its part of half the shortest links to and from its machine.
    """
    links = np.zeros(problem.machines)
    if problem.machines > 1:
        apart = np.array(problem.dense_latency_ms)
        np.fill_diagonal(apart, np.inf)
        links = np.where(count < problem.layers, (apart.min(axis=1) + apart.min(axis=0)) / 2, 0.0)
    price = np.where(count > 0, unit, 0.0) + links / np.maximum(count, 1)
    order = np.argsort(price, kind="stable")
    circuits = int(count.sum()) // problem.layers
    places = np.repeat(price[order], count[order])[: circuits * problem.layers]
    times = places.reshape(circuits, problem.layers).sum(axis=1)
    for ends in (problem.embed_ms, problem.head_ms):
        times = times + (0.0 if ends is None else float(ends.min()))
    if max_tpot_ms is not None:
        times = times[np.cumsum(times) <= max_tpot_ms * np.arange(1, circuits + 1)]
    with np.errstate(divide="ignore"):
        return float((1000.0 / (times * _ROUNDING)).sum())


def check_objective(objective: str, max_tpot_ms: float | None) -> None:
    """Raises ValueError unless the objective is known and the limit is None or above 0."""
    if objective not in ("latency", "throughput"):
        raise ValueError(f"objective must be latency or throughput, got {objective!r}")
    if max_tpot_ms is not None and not max_tpot_ms > 0:
        raise ValueError(f"max_tpot_ms must be above 0 or None, got {max_tpot_ms}")


def circuit_floor_ms(problem: CircuitProblem) -> FloatArray:
    """[machines]: no circuit through the machine takes less than this; infinite where memory cannot do.

    The fastest machines for all layers but one of its own, its nearest neighbours before and after it, and the
    shortest links for as many further hops as memory makes necessary. A machine that could hold all is also
    considered alone.
    """
    if not problem.machines:
        return np.zeros(0)
    remaining = remaining_ms(problem)
    shared = np.maximum(remaining[0], remaining[1] + problem.layer_ms.min(axis=1))
    most = most_layers(problem)
    if problem.machines > 1:
        links = np.array(problem.dense_latency_ms)
        np.fill_diagonal(links, np.inf)
        out, into = links.min(axis=1), links.min(axis=0)
        held = np.cumsum(np.sort(most)[::-1])
        hops = int(np.searchsorted(held, problem.layers)) + 1
        shared = shared + out + into + max(0, hops - 2) * float(out.min())
    alone = np.where(most >= problem.layers, problem.layer_ms.sum(axis=1), np.inf)
    return np.asarray(np.minimum(shared if problem.machines > 1 else np.inf, alone) * _ROUNDING)


def _largest_rate(supply: _Supply, servable: BoolArray) -> float:
    """The largest T at which the flow fills every layer."""
    groups, of_group = np.unique(servable, axis=0, return_inverse=True)
    kinds, of_layer = np.unique(groups, axis=1, return_inverse=True)
    of_group, sizes = of_group.reshape(-1), np.bincount(of_layer.reshape(-1))
    rate = _rate_of(supply, servable.shape[1])
    while kinds.shape[1] > 1 and 0.0 < rate < np.inf:
        capacity = np.bincount(of_group, weights=supply.at(rate), minlength=len(groups))
        starved = _starved(kinds, sizes, capacity / rate)
        if not starved.any():
            break
        helping = np.isin(of_group, np.flatnonzero(kinds[:, starved].any(axis=1)))
        lower = _rate_of(_Supply(supply.count[helping], supply.kink[helping]), int(sizes[starved].sum()))
        if lower >= rate:  # rounding: what is asked and what there is are the same
            break
        rate = lower
    return rate


def _starved(kinds: BoolArray, sizes: IntArray, capacity: FloatArray) -> BoolArray:
    """[kinds of layer]: those on the sink's side of a minimum cut; none if the flow fills every layer.

    `kinds` [groups of machines, kinds of layer] says who can serve what, `capacity` [groups] is in units of one
    layer at the rate asked.
    """
    import networkx as nx

    graph = nx.DiGraph()
    for group, amount in enumerate(capacity):
        graph.add_edge("source", ("group", group), capacity=int(np.ceil(amount * _SCALE)))
    for group, kind in np.argwhere(kinds).tolist():
        graph.add_edge(("group", group), ("kind", kind))
    for kind, size in enumerate(sizes.tolist()):
        graph.add_edge(("kind", kind), "sink", capacity=size * _SCALE)
    flow, (reached, _) = nx.minimum_cut(graph, "source", "sink")
    if flow >= int(sizes.sum()) * _SCALE:
        return np.zeros(len(sizes), dtype=np.bool_)
    return np.array([("kind", kind) not in reached for kind in range(len(sizes))], dtype=np.bool_)


def _rate_of(supply: _Supply, layers: int) -> float:
    """The largest T with layers x T at most what is supplied at T."""
    order = np.argsort(supply.kink, kind="stable")
    count, kink = supply.count[order], supply.kink[order]
    growing = float(count.sum())
    if growing < layers:
        return 0.0
    settled = 0.0
    for number, limit in zip(count.tolist(), kink.tolist(), strict=True):
        if growing < layers and settled <= limit * (layers - growing):
            break
        if limit == np.inf:
            return float("inf")
        settled, growing = settled + number * limit, growing - number
    return settled / (layers - growing)
