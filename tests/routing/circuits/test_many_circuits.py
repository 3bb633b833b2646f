"""Covering a swarm with disjoint circuits, how good that can be, and spares."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import (
    cheapest_of_all,
    check_circuit,
    greedy_orderings,
    problems,
    random_problem,
)
from support.properties import examples

from molink.routing import Circuit, CircuitProblem, Hop, NoCircuit, plan_circuit, tpot_ms
from molink.routing.baselines.flow import circuit_floor_ms, throughput_bound
from molink.routing.circuits.circuits import CircuitPlan, alternatives, plan_circuits, spare_without

OBJECTIVES = ("latency", "throughput")


def check_plan(problem: CircuitProblem, plan: CircuitPlan, max_tpot_ms: float = np.inf) -> None:
    """Valid, disjoint, within the limit and the bound, and worth what it says."""
    machines = [hop.machine for circuit in plan for hop in circuit.hops]
    assert len(machines) == len(set(machines))
    total = 0.0
    for circuit in plan:
        check_circuit(problem, circuit.hops)
        assert circuit.tpot_ms == pytest.approx(tpot_ms(problem, circuit.hops), rel=1e-12)
        assert circuit.tpot_ms <= max_tpot_ms
        period = circuit.tpot_ms if plan.objective == "latency" else max(stages_ms(problem, circuit.hops))
        total += 1000.0 / period
    assert plan.tokens_per_s == pytest.approx(total)
    assert plan.tokens_per_s <= plan.bound_tokens_per_s * (1 + 1e-9)
    assert 0.0 <= plan.gap <= 1.0


def stages_ms(problem: CircuitProblem, hops: tuple[Hop, ...]) -> list[float]:
    """Computation of each hop."""
    return [tpot_ms(problem, (hop,)) - ends_elsewhere_ms(problem, hop) for hop in hops]


def ends_elsewhere_ms(problem: CircuitProblem, hop: Hop) -> float:
    """What `tpot_ms` adds to a lone hop for an embedding or a head that is not its own."""
    embed = 0.0 if problem.embed_ms is None or hop.start == 0 else float(problem.embed_ms[hop.machine])
    head = (
        0.0 if problem.head_ms is None or hop.stop == problem.layers else float(problem.head_ms[hop.machine])
    )
    return embed + head


def most_tokens_per_s(problem: CircuitProblem) -> float:
    """The best total rate, one token at a time, over all ways to part the machines; by brute force."""
    best: dict[frozenset[int], float] = {}

    def alone(machines: frozenset[int]) -> float:
        cheapest = cheapest_of_all(problem.subset(np.array(sorted(machines))))
        return 0.0 if cheapest is None else 1000.0 / cheapest

    def total(machines: frozenset[int]) -> float:
        if not machines:
            return 0.0
        if machines not in best:
            first, *rest = sorted(machines)
            found = total(frozenset(rest))
            for size in range(len(rest) + 1):
                for others in combinations(rest, size):
                    group = frozenset((first, *others))
                    found = max(found, alone(group) + total(machines - group))
            best[machines] = found
        return best[machines]

    return total(frozenset(range(problem.machines)))


def equal_machines(count: int, layers: int, each: int) -> CircuitProblem:
    """Machines with room for `each` layers of 1 ms; 1 ms between any two."""
    latency = np.ones((count, count)) - np.eye(count)
    return CircuitProblem(np.ones(count), latency, np.full(count, each), np.ones(layers, dtype=int))


@settings(max_examples=examples(60), deadline=None)
@given(problems(machines=7), st.sampled_from(OBJECTIVES), st.none() | st.floats(1.0, 200.0))
def test_circuits_are_valid_disjoint_within_the_limit_and_below_the_bound(
    problem: CircuitProblem, objective: str, limit: float | None
) -> None:
    try:
        plan = plan_circuits(problem, objective, limit)
    except NoCircuit:
        with pytest.raises(NoCircuit):
            plan_circuit(problem)
        return
    check_plan(problem, plan, np.inf if limit is None else limit)


@settings(max_examples=examples(30), deadline=None)
@given(problems(machines=5, layers=4, full=False))
def test_no_way_to_part_a_few_machines_beats_the_bound_and_few_beat_the_plan(problem: CircuitProblem) -> None:
    best = most_tokens_per_s(problem)
    assert best <= throughput_bound(problem, "latency") * (1 + 1e-9)
    if best > 0:
        assert plan_circuits(problem).tokens_per_s >= 0.8 * best


@pytest.mark.full
def test_a_few_machines_are_mostly_parted_as_well_as_they_can_be() -> None:
    equal = 0
    for seed in range(40):
        problem = random_problem(np.random.default_rng(seed), 5, 4, full=False)
        best = most_tokens_per_s(problem)
        equal += best == 0 or plan_circuits(problem).tokens_per_s >= best * (1 - 1e-9)
    assert equal >= 34


@settings(max_examples=examples(40), deadline=None)
@given(problems(machines=6))
def test_no_circuit_is_quicker_than_the_floor_of_its_machines(problem: CircuitProblem) -> None:
    floor = circuit_floor_ms(problem)
    for tpot, hops in greedy_orderings(problem):
        assert all(tpot >= floor[hop.machine] for hop in hops)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_machines_are_used_up(objective: str) -> None:
    plan = plan_circuits(equal_machines(12, 9, 3), objective)
    check_plan(equal_machines(12, 9, 3), plan)
    assert len(plan) == 4
    assert {len(circuit.hops) for circuit in plan} == {3}
    assert plan[0] == plan.circuits[0]


def test_equal_machines_in_a_pipeline_reach_the_bound() -> None:
    plan = plan_circuits(equal_machines(12, 9, 3), "throughput")
    assert plan.tokens_per_s == pytest.approx(4 * 1000 / 3)
    assert plan.gap == pytest.approx(0.0, abs=1e-6)


def test_a_pipeline_shares_layers_out_where_latency_would_not() -> None:
    problem = equal_machines(4, 8, 8)
    assert plan_circuits(problem, "latency").tokens_per_s == pytest.approx(4 * 1000 / 8)
    latency = np.array(problem.latency_ms)
    short = dataclasses.replace(problem, latency_ms=latency, free_bytes=np.array([8, 2, 2, 2]))
    plan = plan_circuits(short, "throughput")
    check_plan(short, plan)
    assert plan.tokens_per_s == pytest.approx(1000 / 2)


def test_the_limit_on_tpot_keeps_a_pipeline_short() -> None:
    short = dataclasses.replace(equal_machines(4, 8, 8), free_bytes=np.array([8, 2, 2, 2]))
    plan = plan_circuits(short, "throughput", max_tpot_ms=10.5)
    check_plan(short, plan, 10.5)
    assert len(plan[0].hops) == 2


def test_a_limit_that_nothing_meets_gives_no_circuits() -> None:
    plan = plan_circuits(equal_machines(4, 8, 4), max_tpot_ms=5.0)
    assert (len(plan), plan.tokens_per_s, plan.bound_tokens_per_s) == (0, 0.0, 0.0)


def test_without_memory_for_one_circuit_the_shortfall_is_told() -> None:
    with pytest.raises(NoCircuit) as caught:
        plan_circuits(equal_machines(2, 9, 4))
    assert caught.value.missing_bytes > 0


@pytest.mark.parametrize(
    ("objective", "limit"), [("speed", None), ("latency", 0.0), ("latency", float("nan"))]
)
def test_bad_arguments_are_named(objective: str, limit: float | None) -> None:
    with pytest.raises(ValueError, match="objective" if limit is None else "max_tpot_ms"):
        plan_circuits(equal_machines(2, 2, 2), objective, limit)


def test_the_flow_finds_the_layers_that_few_can_serve() -> None:
    """Ten machines for all layers but the last, one for that one: 1000 / 1 ms is all that it can do."""
    allowed = np.ones((11, 4), dtype=bool)
    allowed[:10, 3] = False
    allowed[10, :3] = False
    problem = dataclasses.replace(equal_machines(11, 4, 4), allowed=allowed)
    assert throughput_bound(problem) == pytest.approx(1000.0)
    assert throughput_bound(dataclasses.replace(problem, allowed=None)) == pytest.approx(11 * 1000 / 4)


@pytest.mark.full
def test_a_large_swarm_is_covered_from_many_places() -> None:
    problem = large_swarm(150)
    for objective in OBJECTIVES:
        plan = plan_circuits(problem, objective)
        check_plan(problem, plan)
        assert plan.gap < 0.6
    assert len(plan_circuits(problem)) > 10


def large_swarm(machines: int) -> CircuitProblem:
    """Machines in clusters, with memory for 2 to 6 of 12 layers."""
    rng = np.random.default_rng(machines)
    place = rng.uniform(0, 60, (6, 2))[rng.integers(0, 6, machines)] + rng.normal(0, 2, (machines, 2))
    latency = np.linalg.norm(place[:, None] - place[None], axis=2) + 1.0
    np.fill_diagonal(latency, 0.0)
    return CircuitProblem(
        rng.choice([1.0, 2.0, 5.0], machines), latency, rng.integers(2, 7, machines), np.ones(12, dtype=int)
    )


@settings(max_examples=examples(40), deadline=None)
@given(problems(machines=6), st.integers(0, 6))
def test_alternatives_are_distinct_in_order_and_do_without_some_machine(
    problem: CircuitProblem, k: int
) -> None:
    try:
        circuit = plan_circuit(problem)
    except NoCircuit:
        return
    found = alternatives(problem, circuit, k)
    used = {hop.machine for hop in circuit.hops}
    assert len(found) <= k
    assert len({one.hops for one in found}) == len(found)
    assert [one.tpot_ms for one in found] == sorted(one.tpot_ms for one in found)
    for one in found:
        check_circuit(problem, one.hops)
        assert used - {hop.machine for hop in one.hops}


@settings(max_examples=examples(30), deadline=None)
@given(problems(machines=6, full=False))
def test_with_room_for_all_each_loss_has_its_spare_among_the_alternatives(problem: CircuitProblem) -> None:
    try:
        circuit = plan_circuit(problem)
    except NoCircuit:
        return
    found = alternatives(problem, circuit, 100)
    for hop in circuit.hops:
        spare = spare_without(problem, {hop.machine})
        if spare is not None:
            assert hop.machine not in {other.machine for other in spare.hops}
            assert spare in found


def test_alternatives_of_a_lone_machine_are_none() -> None:
    problem = equal_machines(1, 2, 2)
    assert alternatives(problem, Circuit((Hop(0, 0, 2),), 2.0), 3) == ()
    with pytest.raises(ValueError, match="k"):
        alternatives(problem, plan_circuit(problem), -1)
