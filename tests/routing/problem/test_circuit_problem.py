"""Problems are checked at the door, and what cannot be solved is explained."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.routing import CircuitProblem, NoCircuit, plan_circuit
from molink.routing.problem.circuit import format_bytes
from molink.shards.spec import Span

GOOD: dict[str, Any] = {
    "layer_ms": [1.0, 2.0],
    "latency_ms": [[0.0, 5.0], [5.0, 0.0]],
    "free_bytes": [30, 30],
    "layer_bytes": [10, 10, 10, 10],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_ms", [1.0, float("nan")]),
        ("layer_ms", [1.0, 2.0, 3.0]),
        ("layer_ms", [[1.0, 2.0], [1.0, 2.0]]),
        ("layer_ms", [1.0, -2.0]),
        ("layer_ms", ["fast", "slow"]),
        ("layer_ms", [1j, 2j]),
        ("latency_ms", [[0.0, float("inf")], [5.0, 0.0]]),
        ("latency_ms", [0.0, 5.0]),
        ("latency_ms", [[0.0, 5.0], [5.0]]),
        ("free_bytes", [30, -1]),
        ("free_bytes", [[30, 30]]),
        ("free_bytes", [30, float("nan")]),
        ("free_bytes", 30),
        ("layer_bytes", []),
        ("layer_bytes", [10, -10, 10, 10]),
        ("layer_bytes", [2**62, 2**62, 2**62, 2**62]),
        ("layer_bytes", [2**70, 1, 1, 1]),
        ("embed_ms", [1.0]),
        ("head_ms", [1.0, float("inf")]),
        ("resident", [[1, 0, 0, 0], [0, 0, 0, 0]]),
        ("resident", [True, False]),
        ("allowed", [[True] * 4]),
        ("embed_bytes", -1),
        ("head_bytes", 1.5),
        ("head_bytes", True),
        ("embed_resident", [True]),
        ("head_resident", [0, 1]),
        ("kv_bytes", [1, 2]),
        ("free_kv_bytes", [-1, 5]),
        ("load_ms", [1.0, float("nan")]),
        ("load_weight", -1.0),
        ("load_weight", float("nan")),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        CircuitProblem(**(GOOD | {field: value}))


@pytest.mark.parametrize("layer_ms", [[1.0, 2.0, 3.0], [[1.0] * 4] * 3])
def test_memory_of_too_few_machines_is_what_is_named_where_all_else_is_of_more(layer_ms: object) -> None:
    of_three = {"layer_ms": layer_ms, "latency_ms": np.zeros((3, 3))}
    message = r"^free_bytes must have the shape \(3,\), as layer_ms and latency_ms have it, got \(2,\)$"
    with pytest.raises(ValueError, match=message):
        CircuitProblem(**(GOOD | of_three))


def test_memory_of_too_few_machines_is_named_beside_coordinates_too() -> None:
    rest = {"positions": np.zeros((3, 2)), "heights_ms": [1.0] * 3, "layer_ms": [1.0] * 3}
    with pytest.raises(ValueError, match=r"^free_bytes .* as layer_ms and heights_ms have it"):
        CircuitProblem.from_coordinates(free_bytes=[9, 9], layer_bytes=[1, 1], **rest)


def test_arrays_are_private_copies_that_nobody_can_change() -> None:
    mine = np.array([1.0, 2.0])
    problem = CircuitProblem(**(GOOD | {"layer_ms": mine}))
    mine[0] = 99.0
    assert problem.layer_ms.shape == (2, 4)
    assert problem.layer_ms[0, 0] == 1.0
    assert problem.layer_ms.dtype == np.float64
    assert problem.free_bytes.dtype == np.int64
    for name in ("layer_ms", "latency_ms", "free_bytes", "layer_bytes"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(problem, name)[0] = 7
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.load_weight = 1.0  # type: ignore[misc]


def test_fractions_of_bytes_are_rounded_to_the_safe_side() -> None:
    problem = CircuitProblem(**(GOOD | {"free_bytes": [30.9, 1e30], "layer_bytes": [9.1] * 4}))
    assert problem.free_bytes.tolist() == [30, 2**61]
    assert problem.layer_bytes.tolist() == [10] * 4


def test_a_problem_can_be_changed_by_replacing_fields() -> None:
    problem = dataclasses.replace(CircuitProblem(**GOOD), free_bytes=np.array([40, 0]))
    assert len(plan_circuit(problem).hops) == 1


def test_an_unknown_algorithm_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"augmented.*'fastest'"):
        plan_circuit(CircuitProblem(**GOOD), algorithm="fastest")
    with pytest.raises(ValueError, match="time_limit_s"):
        plan_circuit(CircuitProblem(**GOOD), time_limit_s=0.0)


def test_too_little_memory_in_all_states_what_would_do() -> None:
    problem = CircuitProblem(**(GOOD | {"free_bytes": [19, 15]}))
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(problem)
    assert caught.value.missing_layers == ()
    assert caught.value.missing_bytes == 20
    assert "as far as layer 2 of 4" in str(caught.value)
    enough = {
        "layer_ms": [1.0, 2.0, 3.0],
        "latency_ms": np.zeros((3, 3)),
        "free_bytes": [19, 15, caught.value.missing_bytes],
    }
    plan_circuit(CircuitProblem(**(GOOD | enough)))


def test_eighty_layers_on_twenty_small_machines_fall_short_by_the_layers_that_are_left() -> None:
    machines = 21
    latency = np.full((machines, machines), 20.0)
    problem = CircuitProblem(np.ones(machines), latency, np.full(machines, 35), np.full(80, 10))
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(problem)
    assert caught.value.missing_bytes == (80 - 63) * 10


def test_layers_that_nobody_serves_are_named() -> None:
    allowed = np.ones((2, 4), dtype=bool)
    allowed[:, 1] = allowed[:, 3] = False
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(CircuitProblem(**(GOOD | {"allowed": allowed})))
    assert caught.value.missing_layers == (Span(1, 2), Span(3, 4))
    assert caught.value.missing_bytes == 20
    assert "[1, 2), [3, 4)" in str(caught.value)
    assert "none of the 2 machines takes them: each is held to others, as a peer is by --layers" in str(
        caught.value
    )


def test_of_one_machine_that_is_held_to_other_layers_the_reason_speaks_of_one() -> None:
    one = {
        "layer_ms": [1.0],
        "latency_ms": [[0.0]],
        "free_bytes": [99],
        "allowed": [[True, True, False, False]],
    }
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(CircuitProblem(**(GOOD | one)))
    assert caught.value.missing_layers == (Span(2, 4),)
    assert "the one machine does not take them: it is held to others, as a peer is by --layers" in str(
        caught.value
    )


def test_a_head_that_fits_nowhere_is_missing_with_the_last_layer() -> None:
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(CircuitProblem(**(GOOD | {"head_bytes": 100})))
    assert caught.value.missing_layers == (Span(3, 4),)
    assert caught.value.missing_bytes == 110


def test_a_swarm_without_machines_misses_all_layers() -> None:
    empty = CircuitProblem(np.zeros(0), np.zeros((0, 0)), np.zeros(0, dtype=int), np.array([10, 10]))
    with pytest.raises(NoCircuit, match="there are no machines") as caught:
        plan_circuit(empty)
    assert caught.value.missing_layers == (Span(0, 2),)
    assert caught.value.missing_bytes == 20


def test_kv_cache_that_is_short_counts_in_what_is_missing() -> None:
    short = {"kv_bytes": [5] * 4, "free_kv_bytes": [5, 5]}
    with pytest.raises(NoCircuit) as caught:
        plan_circuit(CircuitProblem(**(GOOD | short)))
    assert caught.value.missing_bytes == 30


@given(st.integers(0, 10**15))
def test_sizes_for_people_are_never_rounded_down(count: int) -> None:
    number, unit = format_bytes(count).split()
    size = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "bytes": 1}[unit]
    assert round(float(number) * 10) * size >= count * 10
