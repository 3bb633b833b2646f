"""What holds for every algorithm behind `plan_circuit`."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from support.circuits.circuit_cases import (
    cheapest_of_all,
    check_circuit,
    greedy_orderings,
    problems,
    random_problem,
)
from support.properties import examples

from molink.routing import (
    ALGORITHMS,
    Circuit,
    CircuitProblem,
    Hop,
    NoCircuit,
    load_ms,
    plan_circuit,
    solve_compact_ilp,
    tpot_ms,
)

Solve = Callable[[CircuitProblem], Circuit]

SOLVERS: dict[str, Solve] = {
    name: lambda problem, name=name: plan_circuit(problem, name, samples=64)  # type: ignore[misc]
    for name in ALGORITHMS
}
EXACT = ("ilp", "compact ilp")
EVERY: dict[str, Solve] = SOLVERS | {"compact ilp": lambda problem: solve_compact_ilp(problem).circuit}
EVERY_SOLVER = pytest.mark.parametrize("solve", EVERY.values(), ids=EVERY.keys())


def alike(machines: int, layers: int, latency: float, free: int) -> CircuitProblem:
    """Layers of one byte and one millisecond, all links the same."""
    return CircuitProblem(
        np.ones(machines),
        np.full((machines, machines), latency),
        np.full(machines, free),
        np.ones(layers, dtype=np.int64),
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_circuit_covers_the_model_within_memory_and_states_its_cost(name: str) -> None:
    solved = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, int(rng.integers(2, 7)), int(rng.integers(1, 8)), full=seed % 2 == 1)
        try:
            circuit = SOLVERS[name](problem)
        except NoCircuit:
            continue
        check_circuit(problem, circuit.hops)
        assert circuit.tpot_ms == tpot_ms(problem, circuit.hops)
        assert circuit.load_ms == load_ms(problem, circuit.hops)
        solved += 1
    assert solved >= 4


@EVERY_SOLVER
def test_one_machine_serves_alone_and_has_no_links(solve: Solve) -> None:
    problem = CircuitProblem([2.0], [[9.0]], [5], [1] * 5, embed_ms=[0.5], head_ms=[0.25])
    assert solve(problem) == Circuit((Hop(0, 0, 5),), 10.75)


@EVERY_SOLVER
def test_one_layer_goes_to_the_fastest_machine(solve: Solve) -> None:
    problem = CircuitProblem([3.0, 1.0, 2.0], np.full((3, 3), 9.0), [5, 5, 5], [5])
    assert solve(problem) == Circuit((Hop(1, 0, 1),), 1.0)


@EVERY_SOLVER
def test_links_that_take_no_time_are_no_trouble(solve: Solve) -> None:
    circuit = solve(alike(4, 9, 0.0, 3))
    check_circuit(alike(4, 9, 0.0, 3), circuit.hops)
    assert circuit.tpot_ms == 9.0


@EVERY_SOLVER
def test_computation_that_takes_no_time_is_no_trouble(solve: Solve) -> None:
    problem = CircuitProblem(np.zeros(3), np.full((3, 3), 2.0), [2, 2, 2], [1] * 4)
    circuit = solve(problem)
    check_circuit(problem, circuit.hops)
    assert circuit.tpot_ms == 4.0


@EVERY_SOLVER
def test_memory_that_does_not_do_is_an_error_with_the_missing_bytes(solve: Solve) -> None:
    with pytest.raises(NoCircuit) as caught:
        solve(alike(3, 8, 1.0, 2))
    assert caught.value.missing_bytes == 2
    assert caught.value.missing_layers == ()


@EVERY_SOLVER
def test_no_machines_are_an_error_with_the_missing_layers(solve: Solve) -> None:
    with pytest.raises(NoCircuit) as caught:
        solve(alike(0, 4, 1.0, 2))
    assert caught.value.missing_bytes == 4
    assert [str(span) for span in caught.value.missing_layers] == ["[0, 4)"]


def test_what_nobody_can_serve_is_said_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    unsought = {name: lambda *_: pytest.fail("searches") for name in ALGORITHMS}
    monkeypatch.setitem(plan_circuit.__globals__, "ALGORITHMS", unsought)
    full = replace(alike(2, 4, 1.0, 9), allowed=np.array([[True, True, False, True]] * 2))
    for name in ALGORITHMS:
        with pytest.raises(NoCircuit) as caught:
            plan_circuit(full, name)
        assert [str(span) for span in caught.value.missing_layers] == ["[2, 3)"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_layers_that_nobody_is_willing_to_serve_are_named(name: str) -> None:
    problem = replace(alike(2, 4, 1.0, 9), allowed=np.array([[True, True, False, True]] * 2))
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(problem, name)
    assert [str(span) for span in caught.value.missing_layers] == ["[2, 3)"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_circuit_that_only_one_order_gives_is_found(name: str) -> None:
    allowed = np.array([[0, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=bool)
    problem = replace(alike(3, 5, 1.0, 9), allowed=allowed)
    assert plan_circuit(problem, name, samples=1).hops == (Hop(1, 0, 2), Hop(0, 2, 4), Hop(2, 4, 5))


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"random"}))
def test_the_order_of_machines_does_not_matter(name: str) -> None:
    for seed in (1, 3, 5):
        rng = np.random.default_rng(seed)
        problem = replace(random_problem(rng, 5, 6, full=False), free_bytes=rng.integers(2, 8, 5) * 100)
        order = rng.permutation(5)
        assert problem.latency_ms is not None
        assert problem.embed_ms is not None
        assert problem.head_ms is not None
        shuffled = replace(
            problem,
            layer_ms=problem.layer_ms[order],
            latency_ms=problem.latency_ms[np.ix_(order, order)],
            free_bytes=problem.free_bytes[order],
            embed_ms=problem.embed_ms[order],
            head_ms=problem.head_ms[order],
        )
        assert plan_circuit(shuffled, name).tpot_ms == pytest.approx(plan_circuit(problem, name).tpot_ms)


@EVERY_SOLVER
def test_units_of_time_and_memory_do_not_matter(solve: Solve) -> None:
    rng = np.random.default_rng(4)
    latency = rng.integers(1, 60, (6, 6))
    small = CircuitProblem(rng.integers(1, 9, 6), latency, rng.integers(2, 6, 6), [1] * 10)
    big = replace(
        small,
        layer_ms=small.layer_ms * 8,
        latency_ms=latency * 8,
        free_bytes=small.free_bytes * 1_600_000_001,
        layer_bytes=small.layer_bytes * 1_600_000_001,
    )
    assert solve(big).tpot_ms == 8 * solve(small).tpot_ms


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_same_problem_and_seed_give_the_same_circuit(name: str) -> None:
    problem = random_problem(np.random.default_rng(7), 8, 8, full=False)
    first = plan_circuit(problem, name, seed=3, samples=5)
    assert plan_circuit(problem, name, seed=3, samples=5) == first


@settings(max_examples=examples(40), deadline=None)
@given(problems(full=False))
def test_without_residency_greedy_finds_the_best_greedy_ordering(problem: CircuitProblem) -> None:
    orderings = greedy_orderings(problem)
    if orderings:
        assert plan_circuit(problem, "greedy").tpot_ms == pytest.approx(orderings[0][0], rel=1e-9)
    else:
        with pytest.raises(NoCircuit):
            plan_circuit(problem, "greedy")


def test_many_samples_find_the_best_greedy_ordering_of_few_machines() -> None:
    problem = replace(random_problem(np.random.default_rng(5), 5, 8, full=False), free_bytes=[500] * 5)
    best = greedy_orderings(problem)[0][0]
    assert plan_circuit(problem, "random").tpot_ms == pytest.approx(best, rel=1e-9)


def test_more_samples_of_a_seed_are_never_worse_and_seeds_differ() -> None:
    problem = random_problem(np.random.default_rng(2), 30, 40, full=False)
    costs = [plan_circuit(problem, "random", samples=samples).tpot_ms for samples in (1, 16, 256)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[2]
    assert len({plan_circuit(problem, "random", seed=seed, samples=1).tpot_ms for seed in range(5)}) > 1


def test_greedy_keeps_labels_of_a_vertex_that_have_used_different_machines() -> None:
    """Machine 0 is the cheap way to the middle and the only way to the end."""
    allowed = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=bool)
    problem = CircuitProblem(
        [1.0, 50.0, 60.0, 1.0], np.full((4, 4), 5.0), [2, 1, 2, 2], [1] * 4, allowed=allowed
    )
    circuit = plan_circuit(problem, "greedy")
    assert circuit.tpot_ms == cheapest_of_all(problem)


def test_greedy_in_a_larger_swarm_and_out_of_time_still_answers() -> None:
    problem = random_problem(np.random.default_rng(3), 90, 30, full=True)
    whole = plan_circuit(problem, "greedy")
    hurried = plan_circuit(problem, "greedy", time_limit_s=1e-9)
    check_circuit(problem, whole.hops)
    check_circuit(problem, hurried.hops)
    assert plan_circuit(problem, "greedy", time_limit_s=1e-9) == hurried


@pytest.mark.parametrize("samples", [0, -1, True, 2.5, "many"])
def test_bad_samples_are_refused(samples: object) -> None:
    with pytest.raises(ValueError, match=r"^samples "):
        plan_circuit(alike(2, 2, 1.0, 2), "random", samples=samples)  # type: ignore[arg-type]


def test_an_unknown_algorithm_a_bad_seed_and_a_bad_limit_are_refused() -> None:
    problem = alike(2, 2, 1.0, 2)
    with pytest.raises(ValueError, match=r"^algorithm must be one of augmented, balanced, .*got 'best'"):
        plan_circuit(problem, "best")
    with pytest.raises(ValueError, match=r"^seed "):
        plan_circuit(problem, seed=-1)
    for limit in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"^time_limit_s "):
            plan_circuit(problem, "greedy", time_limit_s=limit)
