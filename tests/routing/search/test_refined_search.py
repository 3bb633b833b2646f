"""`refined` finds the optimum of small problems, is never behind the others, and answers alike for like problems."""

import dataclasses
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import check_circuit, fits, problems, random_problem
from support.properties import examples

from molink.routing import Circuit, CircuitProblem, Hop, NoCircuit, load_ms, plan_circuit, tpot_ms
from molink.routing.problem.problem import objective_ms
from molink.routing.problem.spans import SpanCosts
from molink.routing.search.refined import plan_refined
from molink.routing.search.splitting import Splitter
from molink.simnet.papers.scheduling import testbeds


def solve(problem: CircuitProblem, algorithm: str = "refined") -> Circuit | None:
    try:
        return plan_circuit(problem, algorithm)
    except NoCircuit:
        return None


def least_objective_ms(problem: CircuitProblem) -> float | None:
    """The best objective over every order of machines and every split."""
    best: float | None = None

    def extend(hops: tuple[Hop, ...], layer: int) -> None:
        nonlocal best
        if layer == problem.layers:
            cost = objective_ms(problem, hops)
            best = cost if best is None else min(best, cost)
            return
        for machine in set(range(problem.machines)) - {hop.machine for hop in hops}:
            for stop in range(layer + 1, problem.layers + 1):
                if fits(problem, Hop(machine, layer, stop)):
                    extend((*hops, Hop(machine, layer, stop)), stop)

    extend((), 0)
    return best


def wide_problem(seed: int) -> CircuitProblem:
    """Too many machines and layers for trying every span."""
    return random_problem(np.random.default_rng(seed), 16, 24, full=seed % 2 == 0)


def test_small_problems_are_solved_as_brute_force_solves_them() -> None:
    ratios = []
    for seed in range(120):
        problem = random_problem(np.random.default_rng(seed), 5, 5, full=seed % 2 == 0)
        circuit, best = solve(problem), least_objective_ms(problem)
        assert (circuit is None) == (best is None)
        if circuit is not None and best is not None:
            check_circuit(problem, circuit.hops)
            ratios.append(objective_ms(problem, circuit.hops) / best)
    assert len(ratios) > 60
    assert np.mean(np.array(ratios) < 1 + 1e-9) >= 0.99
    assert max(ratios) <= 1.02


@settings(max_examples=examples(40), deadline=None)
@given(problems(machines=10, layers=16))
def test_a_refined_circuit_is_valid_states_its_cost_and_is_no_worse_than_augmented(
    problem: CircuitProblem,
) -> None:
    refined, augmented = solve(problem), solve(problem, "augmented")
    assert (refined is None) == (augmented is None)
    if refined is not None and augmented is not None:
        check_circuit(problem, refined.hops)
        assert refined.tpot_ms == tpot_ms(problem, refined.hops)
        assert refined.load_ms == load_ms(problem, refined.hops)
        lower, upper = (objective_ms(problem, circuit.hops) for circuit in (refined, augmented))
        assert lower <= upper * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_refined_is_no_worse_than_augmented_or_greedy_where_it_must_improve(seed: int) -> None:
    problem = wide_problem(seed)
    refined = solve(problem)
    for other in (solve(problem, "augmented"), solve(problem, "greedy")):
        assert (refined is None) == (other is None)
        if refined is not None and other is not None:
            best = objective_ms(problem, refined.hops)
            assert best <= objective_ms(problem, other.hops) * (1 + 1e-9)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_on_the_papers_testbeds_refined_leads_and_augmented_is_near_greedy(number: int) -> None:
    problem = testbeds.testbed(number, 7)
    refined, augmented, greedy = (
        plan_circuit(problem, name).tpot_ms for name in ("refined", "augmented", "greedy")
    )
    assert refined <= min(augmented, greedy) * (1 + 1e-9)
    assert augmented <= greedy * (1.03 if number == 4 else 1.01)


@settings(max_examples=examples(20), deadline=None)
@given(problems(machines=5, layers=7), st.sampled_from([2.0**-10, 3.0, 1000.0]), st.integers(2, 1000))
def test_the_units_of_time_and_memory_do_not_matter(
    problem: CircuitProblem, times: float, sizes: int
) -> None:
    scaled = {}
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if value is None:
            continue
        if field.name == "load_ms":
            value = value * times / sizes
        elif field.name.endswith("_ms"):
            value = value * times
        elif field.name.endswith("_bytes"):
            value = value * sizes
        scaled[field.name] = value
    for algorithm in ("augmented", "refined"):
        before, after = solve(problem, algorithm), solve(CircuitProblem(**scaled), algorithm)
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            scaled_objective = objective_ms(CircuitProblem(**scaled), after.hops)
            assert scaled_objective == pytest.approx(objective_ms(problem, before.hops) * times, rel=1e-9)


@settings(max_examples=examples(20), deadline=None)
@given(problems(machines=5, layers=7), st.randoms(use_true_random=False))
def test_permuting_machines_changes_nothing_but_labels(problem: CircuitProblem, shuffler: object) -> None:
    order = np.arange(problem.machines)
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    before, after = solve(problem), solve(problem.subset(order))
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        there = objective_ms(problem.subset(order), after.hops)
        assert there == pytest.approx(objective_ms(problem, before.hops), rel=1e-9)


def test_a_hop_penalty_counts_in_the_choice_but_not_in_tpot() -> None:
    base = CircuitProblem([1.0, 1.5], np.zeros((2, 2)), [40, 40], [10] * 4)
    for algorithm in ("augmented", "refined"):
        assert plan_circuit(base, algorithm) == Circuit((Hop(0, 0, 4),), 4.0)
        shy = dataclasses.replace(base, hop_penalty_ms=[3.0, 0.0])
        assert plan_circuit(shy, algorithm) == Circuit((Hop(1, 0, 4),), 6.0)
        assert objective_ms(shy, (Hop(0, 0, 4),)) == 7.0


def test_slow_machines_get_fewer_layers_than_would_fit_wherever_they_stand() -> None:
    """Each machine has room for three of five layers: the middle one must not be the one that is filled."""
    latency = np.array([[0.0, 1.0, 90.0], [90.0, 0.0, 1.0], [1.0, 90.0, 0.0]])
    problem = CircuitProblem([1.0, 9.0, 2.0], latency, [3, 3, 3], [1] * 7)
    circuit = plan_circuit(problem, "refined")
    assert {hop.machine: hop.stop - hop.start for hop in circuit.hops} == {0: 3, 1: 1, 2: 3}
    assert circuit.tpot_ms == 3 + 9 + 6 + 3


def test_the_best_split_of_an_order_is_the_best_of_all_splits() -> None:
    for seed in range(40):
        problem = random_problem(np.random.default_rng(seed), 3, 6, full=seed % 2 == 0)
        splitter = Splitter(problem, SpanCosts(problem), problem.dense_latency_ms)
        for order in permutations(range(3)):
            costs = []
            for first in range(1, 5):
                for second in range(first + 1, 6):
                    ends = (0, first, second, 6)
                    hops = [Hop(machine, ends[at], ends[at + 1]) for at, machine in enumerate(order)]
                    if all(fits(problem, hop) for hop in hops):
                        costs.append(objective_ms(problem, hops))
            orders = np.array([order])
            exact = float(splitter.exact_ms(orders)[0])
            assert exact == pytest.approx(min(costs, default=np.inf), rel=1e-9)
            assert float(splitter.estimate_ms(orders)[0]) <= exact * (1 + 1e-9)
            if costs:
                assert objective_ms(problem, splitter.hops(orders[0])) == pytest.approx(exact, rel=1e-9)


def test_equal_problems_and_seeds_give_equal_circuits() -> None:
    problem = wide_problem(3)
    assert plan_refined(problem, seed=5) == plan_refined(problem, seed=5)


def test_a_deadline_that_has_passed_still_gives_a_circuit_and_more_time_no_worse_one() -> None:
    problem = wide_problem(1)
    ticks = iter(range(10**6))
    hurried = plan_refined(problem, 0.5, clock=lambda: float(next(ticks)))
    check_circuit(problem, hurried.hops)
    assert objective_ms(problem, plan_refined(problem, 1.0).hops) <= objective_ms(problem, hurried.hops)


def test_what_cannot_be_covered_is_refused_with_what_is_missing() -> None:
    problem = CircuitProblem(np.ones(3), np.ones((3, 3)), [20, 10, 0], [10] * 5)
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(problem, "refined")
    assert caught.value.missing_bytes == 20
