"""Problems from network coordinates: the same answers as from a matrix, and large swarms without one."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import check_circuit, random_problem
from support.properties import examples

from molink.routing import Circuit, CircuitProblem, NoCircuit, plan_circuit, tpot_ms
from molink.routing.search.pool import pool


def swarm(rng: np.random.Generator, machines: int, measured: int, **rest: Any) -> CircuitProblem:  # noqa: ANN401 (fields)
    """Machines at random places, some of them with measured links."""
    ends = rng.integers(0, machines, (2, measured))
    return CircuitProblem.from_coordinates(
        **{
            "layer_ms": rng.choice([1.2, 2.2, 3.7], machines),
            "positions": rng.uniform(0.0, 60.0, (machines, 3)),
            "heights_ms": rng.uniform(0.5, 5.0, machines),
            "measured": (ends[0], ends[1], rng.uniform(1.0, 20.0, measured)),
            "free_bytes": rng.integers(3, 30, machines),
            "layer_bytes": np.ones(40, dtype=np.int64),
        }
        | rest
    )


def as_matrix(problem: CircuitProblem) -> CircuitProblem:
    return dataclasses.replace(problem, latency_ms=problem.dense_latency_ms, coordinates=None)


def test_a_prediction_is_the_distance_and_both_heights_and_a_measurement_overrules_it() -> None:
    problem = CircuitProblem.from_coordinates(
        layer_ms=[1.0, 1.0], positions=[[0.0, 0.0], [3.0, 4.0]], heights_ms=[1.0, 2.0],
        measured={(1, 0): 7.0}, free_bytes=[1, 1], layer_bytes=[1, 1],
    )  # fmt: skip
    assert problem.dense_latency_ms.tolist() == [[0.0, 8.0], [7.0, 0.0]]
    assert problem.latency_ms is None
    assert plan_circuit(problem).tpot_ms == 1 + 1 + 8 + 7


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_blocks_and_pairs_agree_with_the_matrix(seed: int, machines: int) -> None:
    rng = np.random.default_rng(seed)
    links = swarm(rng, machines, 3 * machines).links
    every = np.arange(machines)
    matrix = links.block(every, every)
    rows, columns = rng.integers(0, machines, (2, 7))
    few = rng.permutation(machines)[:7]
    assert np.array_equal(links.block(rows, few), matrix[np.ix_(rows, few)])
    assert np.array_equal(links.pairs(rows, columns), matrix[rows, columns])


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 24), st.sampled_from(["augmented", "refined"]))
def test_both_forms_give_the_same_circuit(seed: int, machines: int, algorithm: str) -> None:
    problem = swarm(np.random.default_rng(seed), machines, 2 * machines)
    answers: list[Circuit | int] = []
    for form in (problem, as_matrix(problem)):
        try:
            circuit = plan_circuit(form, algorithm)
            assert circuit.tpot_ms == tpot_ms(form, circuit.hops)
            answers.append(circuit)
        except NoCircuit as error:
            answers.append(error.missing_bytes)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("algorithm", ["augmented", "refined"])
def test_thousands_of_machines_are_planned_without_a_matrix(algorithm: str) -> None:
    problem = swarm(np.random.default_rng(1), 5000, 20_000)
    circuit = plan_circuit(problem, algorithm)
    check_circuit(problem, circuit.hops)
    with pytest.raises(ValueError, match="too many for a matrix"):
        _ = problem.dense_latency_ms


def test_a_pool_loses_little_of_what_all_machines_offer() -> None:
    for seed in range(3):
        problem = swarm(np.random.default_rng(seed), 400, 1200)
        small = problem.subset(pool(problem, 100))
        whole = plan_circuit(as_matrix(problem), "refined").tpot_ms
        assert plan_circuit(small, "refined").tpot_ms <= 1.02 * whole


def test_a_pool_keeps_whoever_alone_can_serve_a_layer() -> None:
    problem = random_problem(np.random.default_rng(4), 300, 20, full=False)
    allowed = np.ones((300, 20), dtype=bool)
    allowed[:, 7] = False
    slowest = int(np.argmax(np.where(problem.free_bytes >= 220, problem.layer_ms[:, 7], -1.0)))
    allowed[slowest, 7] = True
    chosen = dataclasses.replace(problem, allowed=allowed)
    assert slowest in pool(chosen, 50)
    assert slowest in {hop.machine for hop in plan_circuit(chosen).hops if hop.start <= 7 < hop.stop}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", [[0.0, 1.0]]),
        ("positions", [0.0, 1.0]),
        ("positions", [[0.0], [float("nan")]]),
        ("positions", [["here"], ["there"]]),
        ("heights_ms", [1.0, -1.0]),
        ("heights_ms", [1.0, 1.0, 1.0]),
        ("heights_ms", 1.0),
        ("measured", {(0, 2): 1.0}),
        ("measured", {(0, -1): 1.0}),
        ("measured", {(0, 1): float("inf")}),
        ("measured", ([0], [1, 0], [1.0])),
        ("measured", ([0], [1])),
        ("measured", ([0.5], [1.0], [1.0])),
        ("hop_penalty_ms", [1.0, -1.0]),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    good: dict[str, Any] = {
        "layer_ms": [1.0, 2.0],
        "positions": [[0.0, 1.0], [2.0, 3.0]],
        "heights_ms": [1.0, 1.0],
        "free_bytes": [30, 30],
        "layer_bytes": [10, 10],
    }
    with pytest.raises(ValueError, match=field if field != "heights_ms" else "heights_ms|positions"):
        CircuitProblem.from_coordinates(**(good | {field: value}))
