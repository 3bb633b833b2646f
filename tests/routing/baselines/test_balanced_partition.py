"""The balanced partition: equal shares for equals, shares by speed otherwise, on the machines preferred."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.circuits.circuit_cases import check_circuit

from molink.routing import Circuit, CircuitProblem, MachineKind, NoCircuit, plan_balanced


def swarm(layer_ms: Sequence[float], layers: int, free: Sequence[int] | int = 100) -> CircuitProblem:
    machines = len(layer_ms)
    latency = np.abs(np.subtract.outer(np.arange(machines), np.arange(machines))) * 10.0
    return CircuitProblem(layer_ms, latency, np.broadcast_to(free, machines), np.ones(layers, dtype=np.int64))


def shares(circuit: Circuit) -> dict[int, int]:
    return {hop.machine: hop.stop - hop.start for hop in circuit.hops}


def test_equal_machines_have_equal_shares_though_one_could_hold_all() -> None:
    assert sorted(shares(plan_balanced(swarm([2.0] * 4, 32), gpus=4)).values()) == [8, 8, 8, 8]


def test_layers_that_do_not_divide_differ_by_at_most_one() -> None:
    assert sorted(shares(plan_balanced(swarm([2.0] * 4, 30), gpus=4)).values()) == [7, 7, 8, 8]


def test_unequal_machines_have_layers_in_proportion_to_their_speed() -> None:
    assert shares(plan_balanced(swarm([1.0, 2.0, 4.0], 28), gpus=3)) == {0: 16, 1: 8, 2: 4}


def test_what_does_not_fit_on_a_fast_machine_goes_to_the_others_by_their_speed() -> None:
    assert shares(plan_balanced(swarm([1.0, 2.0, 4.0], 28, [10, 100, 100]), gpus=3)) == {0: 10, 1: 12, 2: 6}


def test_no_more_machines_than_memory_and_the_number_asked_for_need() -> None:
    assert len(plan_balanced(swarm([1.0] * 6, 20)).hops) == 1
    assert len(plan_balanced(swarm([1.0] * 6, 20, 8)).hops) == 3
    assert len(plan_balanced(swarm([1.0] * 6, 20, 8), gpus=2).hops) == 3
    assert len(plan_balanced(swarm([1.0] * 6, 20, 8), gpus=5).hops) == 5


def test_machines_near_one_another_are_preferred() -> None:
    problem = swarm([1.0] * 5, 12, 4)
    latency = np.full((5, 5), 50.0)
    latency[np.ix_([0, 2, 4], [0, 2, 4])] = 3.0
    assert set(shares(plan_balanced(replace(problem, latency_ms=latency)))) == {0, 2, 4}


def test_machines_with_several_gpus_are_preferred_to_near_ones() -> None:
    kinds = [MachineKind("a"), MachineKind("a"), MachineKind("a", 4), MachineKind("a"), MachineKind("a", 4)]
    circuit = plan_balanced(swarm([1.0] * 5, 12, 6), kinds, gpus=8)
    assert set(shares(circuit)) == {2, 4}


def test_only_machines_of_the_wanted_type_are_taken() -> None:
    kinds = [MachineKind("slow"), MachineKind("fast"), MachineKind("slow"), MachineKind("fast")]
    problem = swarm([9.0, 1.0, 9.0, 1.0], 12, 8)
    assert set(shares(plan_balanced(problem, kinds, gpu_type="slow"))) == {0, 2}
    assert set(shares(plan_balanced(problem, kinds, gpu_type="fast"))) == {1, 3}
    with pytest.raises(NoCircuit):
        plan_balanced(problem, kinds, gpu_type="none")


def test_fewer_gpus_than_asked_for_is_no_circuit_of_that_size_but_all_there_are() -> None:
    check_circuit(swarm([1.0] * 2, 6), plan_balanced(swarm([1.0] * 2, 6), gpus=5).hops)


def test_what_cannot_be_asked_for_is_refused_by_name() -> None:
    problem = swarm([1.0] * 2, 6)
    with pytest.raises(ValueError, match=r"^kinds must name 2 machines"):
        plan_balanced(problem, [MachineKind("a")])
    with pytest.raises(ValueError, match=r"^gpus must"):
        plan_balanced(problem, gpus=0)
    with pytest.raises(ValueError, match=r"^gpu_type needs"):
        plan_balanced(problem, gpu_type="a")
    with pytest.raises(ValueError, match=r"^gpu_count must"):
        MachineKind("a", 0)
