"""The integer programs are exact, bounded, and honest about time; the layer graph bounds every circuit."""

import subprocess
import sys
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import cheapest_of_all, check_circuit, problems, random_problem
from support.properties import examples

from molink.routing import (
    CircuitProblem,
    NoCircuit,
    TimeLimitReached,
    layer_graph,
    lower_bound_ms,
    plan_circuit,
    solve_compact_ilp,
    solve_ilp,
    tpot_ms,
)
from molink.routing.problem.problem import objective_ms


@st.composite
def alike_problems(draw: st.DrawFn) -> CircuitProblem:
    """Layers that are alike, with embedding, head, KV memory, and machines that hold or refuse everything."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    machines, layers = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    held = rng.random(machines) < 0.2
    everywhere = (machines, layers)
    embed_bytes, head_bytes = int(rng.integers(0, 300)), int(rng.integers(0, 300))
    return CircuitProblem(
        layer_ms=rng.uniform(0.1, 10.0, machines),
        latency_ms=rng.uniform(0.0, 40.0, (machines, machines)),
        free_bytes=rng.integers(0, 7, machines) * 100,
        layer_bytes=np.full(layers, 100),
        embed_ms=rng.uniform(0.0, 30.0, machines),
        head_ms=rng.uniform(0.0, 30.0, machines),
        resident=np.broadcast_to(held[:, None], everywhere),
        allowed=np.broadcast_to(rng.random(machines)[:, None] < 0.9, everywhere),
        embed_bytes=embed_bytes,
        head_bytes=head_bytes,
        shared_bytes=int(rng.integers(0, min(embed_bytes, head_bytes) + 1)),
        kv_bytes=np.full(layers, 10),
        free_kv_bytes=rng.integers(0, 80, machines),
    )


def check_best(problem: CircuitProblem, solve: object) -> None:
    best = cheapest_of_all(problem)
    if best is None:
        with pytest.raises(NoCircuit) as caught:
            solve(problem)  # type: ignore[operator]
        assert caught.value.missing_bytes > 0
        return
    outcome = solve(problem)  # type: ignore[operator]
    check_circuit(problem, outcome.circuit.hops)
    assert outcome.circuit.tpot_ms == pytest.approx(best, rel=1e-7, abs=1e-7)
    assert outcome.gap == pytest.approx(0.0, abs=1e-6)
    assert outcome.bound_ms <= objective_ms(problem, outcome.circuit.hops)


@settings(max_examples=examples(25), deadline=None)
@given(problems(machines=4, layers=6))
def test_the_program_of_the_paper_finds_the_best_of_all_circuits(problem: CircuitProblem) -> None:
    check_best(replace(problem, load_weight=0.0), solve_ilp)


@settings(max_examples=examples(25), deadline=None)
@given(alike_problems())
def test_both_programs_find_the_best_of_all_circuits_where_layers_are_alike(problem: CircuitProblem) -> None:
    check_best(problem, solve_compact_ilp)
    check_best(problem, solve_ilp)


def test_loading_and_penalties_of_hops_count_in_what_is_proven_best() -> None:
    rng = np.random.default_rng(11)
    for _ in range(6):
        problem = replace(
            CircuitProblem(rng.uniform(1, 9, 4), rng.uniform(1, 9, (4, 4)), [3, 3, 4, 6], [1] * 6),
            load_ms=rng.uniform(1.0, 40.0, 4),
            load_weight=0.3,
            hop_penalty_ms=rng.uniform(0.0, 20.0, 4),
        )
        wide, compact = solve_ilp(problem), solve_compact_ilp(problem)
        objective = objective_ms(problem, compact.circuit.hops)
        assert objective_ms(problem, wide.circuit.hops) == pytest.approx(objective, rel=1e-7)
        assert compact.bound_ms == pytest.approx(objective, rel=1e-6)
        for name in ("augmented", "greedy", "balanced", "random"):
            other = plan_circuit(problem, name).hops
            assert objective_ms(problem, other) >= compact.bound_ms


def test_a_byte_too_few_is_too_few_whatever_the_tolerance_of_the_solver() -> None:
    """Two layers are one byte in 10**16 more than machine 0 has, which no float64 row can tell."""
    size = 10**16 + 1
    problem = CircuitProblem([1.0, 5.0], [[0.0, 1.0], [1.0, 0.0]], [2 * size - 1, 2 * size], [size] * 2)
    assert solve_ilp(problem).circuit.tpot_ms == 8.0
    assert solve_compact_ilp(problem).circuit.tpot_ms == 8.0
    with pytest.raises(NoCircuit):
        solve_ilp(replace(problem, free_bytes=[2 * size - 1, size - 1]))


def test_without_time_for_any_circuit_the_error_says_so_and_claims_nothing_else() -> None:
    problem = random_problem(np.random.default_rng(5), 14, 24, full=False)
    for solve in (solve_ilp, solve_compact_ilp):
        if solve is solve_compact_ilp:
            problem = replace(problem, layer_ms=problem.layer_ms[:, 0], layer_bytes=[100] * 24)
        with pytest.raises(TimeLimitReached, match=r"within 1e-09 s") as caught:
            solve(problem, time_limit_s=1e-9)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.time_limit_s == 1e-9


def test_the_compact_program_refuses_layers_that_differ() -> None:
    problem = CircuitProblem([1.0, 2.0], np.ones((2, 2)), [9, 9], [1, 2, 1])
    with pytest.raises(ValueError, match=r"^layer_bytes must be the same"):
        solve_compact_ilp(problem)
    differing = replace(problem, layer_bytes=[1, 1, 1], layer_ms=[[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]])
    with pytest.raises(ValueError, match=r"^layer_ms must be the same"):
        solve_compact_ilp(differing)


@settings(max_examples=examples(60), deadline=None)
@given(problems(machines=5, layers=6))
def test_no_circuit_is_shorter_than_the_shortest_cycle_of_the_layer_graph(problem: CircuitProblem) -> None:
    best = cheapest_of_all(problem)
    if best is not None:
        assert lower_bound_ms(problem) <= best


def test_the_bound_is_the_best_circuit_where_memory_is_no_obstacle() -> None:
    held = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]], dtype=bool)
    rng = np.random.default_rng(0)
    problem = CircuitProblem(
        rng.uniform(1, 5, (3, 6)), rng.uniform(1, 9, (3, 3)), [0] * 3, [1] * 6, resident=held, allowed=held
    )
    assert lower_bound_ms(problem) == pytest.approx(plan_circuit(problem).tpot_ms)


@settings(max_examples=examples(20), deadline=None)
@given(problems(machines=4, layers=5))
def test_the_bound_is_the_shortest_way_round_that_networkx_finds(problem: CircuitProblem) -> None:
    graph = layer_graph(problem)
    ways = []
    last = [node for node in graph if node[0] == problem.layers - 1]
    for start in [node for node in graph if node[0] == 0]:
        # The way back ends with layer 0 on the start: a whole cycle is that edge and the way out to it.
        without_back = graph.edge_subgraph([edge for edge in graph.edges if edge[1][0] != 0])
        for end in last:
            if problem.layers == 1 and start == end:
                ways.append(graph.edges[end, start]["ms"])
            elif start in without_back and end in without_back and nx.has_path(without_back, start, end):
                out = nx.shortest_path_length(without_back, start, end, weight="ms")
                ways.append(out + graph.edges[end, start]["ms"])
    assert lower_bound_ms(problem) == pytest.approx(min(ways, default=float("inf")))


def test_a_circuit_is_a_cycle_of_the_layer_graph_of_its_own_length() -> None:
    problem = replace(random_problem(np.random.default_rng(3), 5, 7, full=False), free_bytes=[400] * 5)
    hops = plan_circuit(problem).hops
    nodes = [(layer, hop.machine) for hop in hops for layer in range(hop.start, hop.stop)]
    graph = layer_graph(problem)
    around = zip(nodes, nodes[1:] + nodes[:1], strict=True)
    length = sum(graph.edges[source, target]["ms"] for source, target in around)
    assert length == pytest.approx(tpot_ms(problem, hops))
    assert graph.number_of_edges() <= 7 * 5 * 5


def test_solver_and_graph_libraries_are_loaded_only_where_they_are_used() -> None:
    program = "import sys, molink.routing; print(sorted({'highspy', 'networkx'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == "[]"
