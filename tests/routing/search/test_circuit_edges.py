"""Small problems whose answer is known: fills, residency, loading, odd shapes."""

import numpy as np
from support.circuits.circuit_cases import check_circuit, random_problem

from molink.routing import Circuit, CircuitProblem, Hop, plan_circuit


def test_one_machine_that_holds_everything_has_no_links() -> None:
    problem = CircuitProblem(
        np.array([2.0]),
        np.zeros((1, 1)),
        np.array([100]),
        np.array([10] * 5),
        np.array([0.5]),
        np.array([0.25]),
    )
    assert plan_circuit(problem) == Circuit((Hop(0, 0, 5),), 10.75)


def test_one_layer_goes_to_the_fastest_machine() -> None:
    problem = CircuitProblem(
        np.array([3.0, 1.0, 2.0]), np.full((3, 3), 9.0), np.array([5, 5, 5]), np.array([5])
    )
    assert plan_circuit(problem) == Circuit((Hop(1, 0, 1),), 1.0)


def test_two_equal_machines_share_the_model_and_the_first_starts() -> None:
    problem = CircuitProblem(
        np.ones(2), np.array([[0.0, 4.0], [4.0, 0.0]]), np.array([3, 3]), np.ones(6, dtype=int)
    )
    assert plan_circuit(problem) == Circuit((Hop(0, 0, 3), Hop(1, 3, 6)), 14.0)


def test_zero_latencies_and_zero_memory_are_no_trouble() -> None:
    problem = CircuitProblem(
        np.array([1.0, 1.0, 2.0]), np.zeros((3, 3)), np.array([0, 4, 4]), np.ones(8, dtype=int)
    )
    circuit = plan_circuit(problem)
    check_circuit(problem, circuit.hops)
    assert circuit.tpot_ms == 12.0


def test_layers_of_different_sizes_fill_by_bytes() -> None:
    problem = CircuitProblem(
        np.array([1.0, 0.9]), np.zeros((2, 2)), np.array([50, 60]), np.array([50, 10, 10, 10, 10, 10, 10])
    )
    assert plan_circuit(problem).hops == (Hop(0, 0, 1), Hop(1, 1, 7))


def test_a_head_too_big_for_the_machine_that_has_room_for_the_layers_goes_elsewhere() -> None:
    problem = CircuitProblem(
        np.ones(2), np.zeros((2, 2)), np.array([40, 110]), np.array([10, 10, 10, 10]), head_bytes=100
    )
    circuit = plan_circuit(problem)
    assert circuit.hops == (Hop(0, 0, 3), Hop(1, 3, 4))


def test_the_embedding_takes_room_where_a_circuit_starts() -> None:
    problem = CircuitProblem(
        np.ones(2), np.zeros((2, 2)), np.array([20, 30]), np.array([10] * 4), embed_bytes=10
    )
    assert plan_circuit(problem).hops[0].stop in (1, 2)
    check_circuit(problem, plan_circuit(problem).hops)


def test_the_kv_cache_limits_a_span_where_weights_would_fit() -> None:
    problem = CircuitProblem(
        np.array([1.0, 5.0]),
        np.zeros((2, 2)),
        np.array([100, 100]),
        np.array([1] * 10),
        kv_bytes=np.array([2] * 10),
        free_kv_bytes=np.array([12, 100]),
    )
    assert {hop.machine: hop.stop - hop.start for hop in plan_circuit(problem).hops} == {0: 6, 1: 4}


def test_a_warm_machine_need_not_load_because_it_has_room() -> None:
    held = np.zeros((2, 8), dtype=bool)
    held[0, :4] = held[1, 4:] = True
    problem = CircuitProblem(
        np.ones(2), np.full((2, 2), 1.0), np.array([100, 0]), np.array([10] * 8), resident=held,
        load_ms=np.array([10.0, 10.0]), load_weight=1.0,
    )  # fmt: skip
    circuit = plan_circuit(problem)
    assert circuit.hops == (Hop(0, 0, 4), Hop(1, 4, 8))
    assert circuit.load_ms == 0.0


def test_overlapping_warm_spans_join_where_the_faster_begins() -> None:
    held = np.zeros((2, 8), dtype=bool)
    held[0, :6] = held[1, 2:] = True
    problem = CircuitProblem(
        np.array([9.0, 1.0]), np.full((2, 2), 1.0), np.array([0, 0]), np.array([10] * 8), resident=held
    )
    assert plan_circuit(problem).hops == (Hop(0, 0, 2), Hop(1, 2, 8))


def test_loading_counts_in_the_choice_but_not_in_tpot() -> None:
    held = np.array([[True] * 4, [False] * 4])
    for weight, machine in ((0.01, 1), (1.0, 0)):
        problem = CircuitProblem(
            np.array([3.0, 2.0]), np.zeros((2, 2)), np.array([0, 40]), np.array([10] * 4), resident=held,
            load_ms=np.array([1.0, 1.0]), load_weight=weight,
        )  # fmt: skip
        circuit = plan_circuit(problem)
        assert circuit.hops == (Hop(machine, 0, 4),)
        assert circuit.tpot_ms == (8.0 if machine else 12.0)
        assert circuit.load_ms == (40.0 if machine else 0.0)


def test_scarce_machines_are_spared_when_cheap_choices_lead_nowhere() -> None:
    """Nine fast generalists tempt the start; each is needed for a layer that only it may serve."""
    layers = 12
    allowed = np.zeros((layers, layers), dtype=bool)
    np.fill_diagonal(allowed, True)
    allowed[:, 0] = True
    speed = np.array([90.0] + [1.0] * (layers - 1))
    problem = CircuitProblem(
        speed,
        np.full((layers, layers), 1.0),
        np.ones(layers, dtype=int),
        np.ones(layers, dtype=int),
        allowed=allowed,
    )
    assert [hop.machine for hop in plan_circuit(problem).hops] == list(range(layers))


def test_a_large_swarm_is_planned_within_memory() -> None:
    problem = random_problem(np.random.default_rng(1), 300, 60, full=True)
    check_circuit(problem, plan_circuit(problem).hops)
