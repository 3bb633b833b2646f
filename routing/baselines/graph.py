"""The layer graph of the decentralized-scheduling paper (section 4.1, Algorithm 1), to explain and to draw,
and the lower bound that it gives.

A vertex (layer, machine) for every layer that a machine could serve by itself, an edge to every machine that
could serve the next layer, from the last layer back to the first. A circuit is a cycle once around; its TPOT
is the cycle's length. (The paper says that a cycle has length N; it is K, the number of layers, or a multiple.)
Memory is not in the graph, so a cycle may ask more of a machine than it has, or come back to it.
"""

from typing import Any

import numpy as np

from molink.routing.arrays import FloatArray
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import servable_layers


def layer_graph(problem: CircuitProblem) -> Any:  # noqa: ANN401 (networkx has no types)
    """A networkx.DiGraph with vertices (layer, machine), each with `compute_ms`, and edges with `ms`: the
    link and the computation at its end, embedding and head included.

    It has layers * machines**2 edges. networkx is imported here, not with molink.routing.
    """
    import networkx as nx

    compute = _compute_ms(problem)
    graph = nx.DiGraph()
    for layer, machine in np.argwhere(np.isfinite(compute)).tolist():
        graph.add_node((layer, machine), compute_ms=float(compute[layer, machine]))
    by_layer = [np.flatnonzero(np.isfinite(row)).tolist() for row in compute]
    for layer in range(problem.layers):
        following = (layer + 1) % problem.layers
        for source in by_layer[layer]:
            for target in by_layer[following]:
                link = 0.0 if source == target else float(problem.dense_latency_ms[source, target])
                length = link + float(compute[following, target])
                graph.add_edge((layer, source), (following, target), ms=length)
    return graph


def lower_bound_ms(problem: CircuitProblem) -> float:
    """The length of the shortest cycle once around the layer graph: no circuit has a lower TPOT.

    Infinite if some layer fits on no machine. Takes layers * machines**3 steps.
    """
    if not problem.machines:
        return float("inf")
    links = np.array(problem.dense_latency_ms)
    np.fill_diagonal(links, 0.0)
    compute = _compute_ms(problem)
    shortest = float("inf")
    for start in np.flatnonzero(np.isfinite(compute[0])):
        reached: FloatArray = np.full(problem.machines, np.inf)
        reached[start] = compute[0, start]
        for layer in range(1, problem.layers):
            reached = (reached[:, None] + links).min(axis=0) + compute[layer]
        shortest = min(shortest, float((reached + links[:, start]).min()))
    # Sums are rounded in another order than in `tpot_ms`; the bound must not pass a circuit for that.
    return shortest * (1 - 1e-12)


def _compute_ms(problem: CircuitProblem) -> FloatArray:
    """[layers, machines]: computation of each vertex, infinite where there is none."""
    compute = np.where(servable_layers(problem), problem.layer_ms, np.inf).T
    if problem.embed_ms is not None:
        compute[0] += problem.embed_ms
    if problem.head_ms is not None:
        compute[-1] += problem.head_ms
    return compute
