"""The testbeds are those that the paper describes, and equal seeds give equal problems."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from molink.routing import CircuitProblem, plan_circuit
from molink.simnet.core.matrices import RttMatrix, bundled_matrix
from molink.simnet.papers.scheduling import testbeds
from molink.simnet.papers.scheduling.testbeds import (
    GPUS,
    LLAMA_2_70B,
    MOST_WITH_MATRIX,
    World,
    place_random_swarm,
    place_testbed,
)

SEEDS = range(3)
SILENT = World(noise=0.0)


def arrays(problem: CircuitProblem) -> dict[str, np.ndarray]:
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def same(first: CircuitProblem, second: CircuitProblem) -> bool:
    before, after = arrays(first), arrays(second)
    return all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("number", "machines", "regions"), [(1, 21, 21), (2, 42, 21), (3, 21, 5), (4, 21, 21)]
)
def test_machines_regions_and_kinds_are_the_papers(number: int, machines: int, regions: int) -> None:
    for seed in SEEDS:
        placement = place_testbed(number, seed)
        assert placement.problem.machines == machines
        assert len(set(placement.regions)) == regions
        assert Counter(placement.gpus) == {
            "A100": machines // 21,
            "RTX 3090": 4 * machines // 21,
            "A10g": 16 * machines // 21,
        }
        for machine, kind in enumerate(placement.gpus):
            assert placement.problem.layer_ms[machine, 0] == GPUS[kind].layer_ms


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_equal_seeds_give_equal_problems_and_others_differ(number: int) -> None:
    assert same(testbeds.testbed(number, 5), testbeds.testbed(number, 5))
    assert not same(testbeds.testbed(number, 5), testbeds.testbed(number, 6))


def test_a_link_takes_half_the_round_trip_in_each_direction() -> None:
    placement = place_testbed(1, 0, SILENT)
    matrix = bundled_matrix()
    for start, stop in ((0, 1), (1, 0), (7, 20)):
        row, column = (matrix.regions.index(placement.regions[machine]) for machine in (start, stop))
        latency_ms = placement.problem.links.pairs(np.array([start]), np.array([stop]))
        assert latency_ms[0] == matrix.rtt_ms[row, column] / 2


def test_the_noise_is_the_same_in_both_directions_positive_and_of_a_fifth() -> None:
    factors = []
    for seed in range(8):
        noisy, silent = testbeds.testbed(2, seed), testbeds.testbed(2, seed, SILENT)
        assert noisy.latency_ms is not None
        assert silent.latency_ms is not None
        between = ~np.eye(noisy.machines, dtype=bool)
        factor = np.ones_like(noisy.latency_ms)
        factor[between] = noisy.latency_ms[between] / silent.latency_ms[between]
        assert np.allclose(factor, factor.T)
        assert (noisy.latency_ms[between] > 0).all()
        factors.append(factor[np.triu_indices(noisy.machines, 1)])
    assert np.mean(factors) == pytest.approx(1.0, abs=0.01)
    assert np.std(factors) == pytest.approx(0.2, abs=0.01)


def test_a_link_may_take_another_part_of_the_round_trip() -> None:
    half, whole = testbeds.testbed(1, 0), testbeds.testbed(1, 0, World(one_way_share=1.0))
    assert half.latency_ms is not None
    assert whole.latency_ms is not None
    assert np.allclose(whole.latency_ms, 2 * half.latency_ms)


def test_drawn_places_leave_some_regions_empty() -> None:
    placement = place_testbed(1, 0, World(drawn_places=True))
    assert len(set(placement.regions)) < 21
    assert same(placement.problem, place_testbed(1, 0, World(drawn_places=True)).problem)


def test_even_wild_noise_leaves_every_latency_positive() -> None:
    problem = testbeds.testbed(1, 0, World(noise=1.0))
    assert problem.latency_ms is not None
    assert (problem.latency_ms[~np.eye(21, dtype=bool)] > 0).all()


def test_only_the_fourth_testbed_has_memory_in_use() -> None:
    for number in (1, 2, 3, 4):
        placement = place_testbed(number, 1)
        whole = np.array([GPUS[kind].memory_bytes for kind in placement.gpus])
        shares = placement.problem.free_bytes / whole
        if number == 4:
            assert shares.min() >= 0.25
            assert shares.max() <= 0.75
            assert len(set(shares.round(6).tolist())) == 21
        else:
            assert (shares == 1).all()


def test_the_model_takes_about_130_gb() -> None:
    total = LLAMA_2_70B.layers * LLAMA_2_70B.layer_bytes + LLAMA_2_70B.embed_bytes + LLAMA_2_70B.head_bytes
    assert 125e9 < total < 135e9


@pytest.mark.parametrize("machines", [1, 5, 100, MOST_WITH_MATRIX + 1])
def test_a_swarm_has_the_machines_asked_for_and_the_same_ones_for_the_same_seed(machines: int) -> None:
    placement = place_random_swarm(machines, 3)
    again = place_random_swarm(machines, 3)
    assert placement.problem.machines == len(placement.gpus) == len(placement.regions) == machines
    assert placement.gpus == again.gpus
    assert same(placement.problem, again.problem)
    some = np.arange(min(machines, 50))
    latency_ms = placement.problem.links.block(some, some)
    assert np.array_equal(latency_ms, again.problem.links.block(some, some))
    assert (latency_ms[~np.eye(len(some), dtype=bool)] > 0).all()


def test_a_swarm_in_coordinates_resembles_the_one_of_the_matrix() -> None:
    some = np.arange(400)
    by_matrix = place_random_swarm(MOST_WITH_MATRIX, 0).problem.links.block(some, some)
    predicted = place_random_swarm(MOST_WITH_MATRIX + 1, 0).problem
    assert predicted.latency_ms is None
    assert predicted.links.block(some, some).mean() == pytest.approx(by_matrix.mean(), rel=0.15)


def test_a_circuit_of_a_testbed_covers_the_model() -> None:
    circuit = plan_circuit(testbeds.testbed(4, 0))
    assert (circuit.hops[0].start, circuit.hops[-1].stop) == (0, LLAMA_2_70B.layers)


def test_what_cannot_be_built_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="testbed must be one of 1, 2, 3, 4, got 5"):
        testbeds.testbed(5, 0)
    with pytest.raises(ValueError, match="machines must be at least 1, got 0"):
        place_random_swarm(0, 0)
    lonely = World(matrix=RttMatrix(("home",), np.array([[2.0]])))
    with pytest.raises(ValueError, match="testbed 3 needs 5 regions, the matrix has 1"):
        testbeds.testbed(3, 0, lonely)
