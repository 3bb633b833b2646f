"""The search finds valid circuits, with the right cost, and good ones."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import (
    cheapest_of_all,
    check_circuit,
    greedy_orderings,
    problems,
    random_problem,
)
from support.properties import examples

from molink.routing import Circuit, CircuitProblem, Hop, NoCircuit, load_ms, plan_circuit, tpot_ms
from molink.routing.problem.greedy_fill import GreedyFill
from molink.routing.problem.spans import SpanCosts
from molink.routing.search.augmented import graph_of
from molink.routing.search.search import Beam, search


def solve(problem: CircuitProblem) -> Circuit | None:
    try:
        return plan_circuit(problem)
    except NoCircuit:
        return None


def by_hand(problem: CircuitProblem, hops: tuple[Hop, ...]) -> float:
    total = sum(
        float(problem.layer_ms[hop.machine, layer]) for hop in hops for layer in range(hop.start, hop.stop)
    )
    total += 0.0 if problem.embed_ms is None else float(problem.embed_ms[hops[0].machine])
    total += 0.0 if problem.head_ms is None else float(problem.head_ms[hops[-1].machine])
    around = [hop.machine for hop in hops] + [hops[0].machine]
    if len(hops) > 1:
        total += sum(float(problem.latency_ms[a, b]) for a, b in pairwise(around))
    return total


@settings(max_examples=examples(300), deadline=None)
@given(problems(machines=8, layers=12))
def test_greedy_fills_worked_out_at_once_are_those_of_each_layer(problem: CircuitProblem) -> None:
    fill = GreedyFill(problem)
    expected = np.array([fill.greedy_stops(layer) for layer in range(problem.layers)])
    np.testing.assert_array_equal(fill.every_greedy_stop(), expected)
    np.testing.assert_array_equal(SpanCosts(problem).greedy_stop, expected)


@settings(max_examples=examples(200), deadline=None)
@given(problems(machines=4, layers=8))
def test_the_cheapest_circuit_is_found_whatever_a_little_more_is_known_to_be_enough(
    problem: CircuitProblem,
) -> None:
    graph = graph_of(problem, SpanCosts(problem))
    free = search(graph, Beam(4096))
    assume(free.hops)
    bounded = search(graph, Beam(4096), below=free.cost * 1.0001)
    assert bounded.hops
    assert bounded.cost == pytest.approx(free.cost)


@settings(max_examples=examples(150), deadline=None)
@given(problems(machines=8, layers=12))
def test_a_circuit_covers_every_layer_once_within_memory_and_states_its_cost(problem: CircuitProblem) -> None:
    circuit = solve(problem)
    assume(circuit is not None)
    assert circuit is not None
    check_circuit(problem, circuit.hops)
    assert circuit.tpot_ms == tpot_ms(problem, circuit.hops)
    assert circuit.tpot_ms == pytest.approx(by_hand(problem, circuit.hops), rel=1e-12)
    assert circuit.load_ms == load_ms(problem, circuit.hops)


@settings(max_examples=examples(100), deadline=None)
@given(problems(full=False))
def test_without_residency_the_best_greedy_ordering_is_found_and_feasibility_agrees(
    problem: CircuitProblem,
) -> None:
    circuit, orderings = solve(problem), greedy_orderings(problem)
    assert (circuit is None) == (not orderings)
    if circuit is not None:
        assert circuit.tpot_ms == pytest.approx(orderings[0][0], rel=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(problems(full=True, machines=5, layers=7))
def test_with_residency_whatever_greedy_orderings_reach_is_reached(problem: CircuitProblem) -> None:
    circuit = solve(problem)
    if circuit is None:
        assert not greedy_orderings(problem)
    else:
        best = cheapest_of_all(problem)
        assert best is not None
        assert circuit.tpot_ms >= best - 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_permuting_machines_changes_nothing_but_their_labels(
    problem: CircuitProblem, shuffler: object
) -> None:
    order = list(range(problem.machines))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    values = {}
    for name in CircuitProblem.__slots__:
        value = getattr(problem, name)
        if name == "latency_ms":
            value = value[np.ix_(order, order)]
        elif isinstance(value, np.ndarray) and name not in ("layer_bytes", "kv_bytes"):
            value = value[order]
        values[name] = value
    before, after = solve(problem), solve(CircuitProblem(**values))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.tpot_ms == pytest.approx(before.tpot_ms, rel=1e-9)
        assert (
            tpot_ms(problem, [Hop(order[hop.machine], hop.start, hop.stop) for hop in after.hops])
            == after.tpot_ms
        )


def test_a_small_swarm_gets_close_to_the_best_of_all_partitions() -> None:
    ratios = []
    for seed in range(60):
        problem = random_problem(np.random.default_rng(seed), 5, 6, full=False)
        circuit, best = solve(problem), cheapest_of_all(problem)
        if circuit is not None and best is not None:
            ratios.append(circuit.tpot_ms / best)
    assert len(ratios) > 20
    assert np.mean(ratios) < 1.05


def test_the_same_problem_gives_the_same_circuit() -> None:
    problem = random_problem(np.random.default_rng(7), 30, 40, full=False)
    assert plan_circuit(problem) == plan_circuit(problem)


def test_labels_of_different_starts_do_not_replace_each_other() -> None:
    """Machine 2 is reached more cheaply from 0, but only 1 is close on the way back."""
    latency = np.array([[0.0, 9.0, 1.0], [9.0, 0.0, 2.0], [90.0, 1.0, 0.0]])
    problem = CircuitProblem(np.array([1.0, 1.0, 1.0]), latency, np.array([2, 2, 2]), np.array([1, 1, 1, 1]))
    assert [hop.machine for hop in plan_circuit(problem).hops] in ([1, 2], [2, 1])


def test_labels_of_different_used_machines_do_not_replace_each_other() -> None:
    """Machine 0 is the cheap way to the middle and the only way to the end."""
    allowed = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=bool)
    latency = np.full((4, 4), 5.0)
    problem = CircuitProblem(
        np.array([1.0, 50.0, 60.0, 1.0]),
        latency,
        np.array([2, 1, 2, 2]),
        np.ones(4, dtype=np.int64),
        allowed=allowed,
    )
    circuit = plan_circuit(problem)
    check_circuit(problem, circuit.hops)
    assert circuit.hops[-1] == Hop(0, 2, 4) or circuit.hops[-1] == Hop(0, 3, 4)


@pytest.mark.parametrize("seed", [0, 2, 9, 16, 18, 65])
def test_the_usual_beam_loses_next_to_nothing_on_fourteen_machines(seed: int) -> None:
    """Links without any geometry: the hardest there are for a beam."""
    rng = np.random.default_rng(seed)
    latency = rng.uniform(0.5, 50.0, (14, 14))
    problem = CircuitProblem(
        rng.uniform(0.1, 3.0, 14), latency, rng.integers(1, 4, 14), np.ones(16, dtype=int)
    )
    every = search(graph_of(problem, SpanCosts(problem)), Beam(10**6))
    assert every.complete
    assert every.cost * (1 - 1e-9) <= plan_circuit(problem).tpot_ms <= 1.015 * every.cost
    assert plan_circuit(problem, "refined").tpot_ms <= every.cost * (1 + 1e-9)


def test_the_way_back_is_paid_in_its_own_direction() -> None:
    latency = np.array([[0.0, 1.0], [100.0, 0.0]])
    problem = CircuitProblem(np.array([1.0, 1.0]), latency, np.array([1, 1]), np.array([1, 1]))
    assert plan_circuit(problem).tpot_ms == 103.0


def test_three_machines_go_round_in_the_cheap_direction() -> None:
    latency = np.array([[0.0, 1.0, 50.0], [50.0, 0.0, 1.0], [1.0, 50.0, 0.0]])
    problem = CircuitProblem(np.ones(3), latency, np.ones(3, dtype=np.int64), np.ones(3, dtype=np.int64))
    assert plan_circuit(problem).tpot_ms == 6.0
