"""How many micro-batches circulate: predicted as a simulation has it, and never fewer or more than is good."""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.pipelines import pipelines, roofline, stage

from molink.peer.scheduling.in_flight_rules import (
    ALIKE,
    MOST_MICRO_BATCHES,
    RULES,
    InFlightPlan,
    Rule,
    fixed,
    iteration_ms,
    molink,
    rule_named,
    system,
    transmission,
)
from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage

ROUNDS = 30
MAX_SESSIONS = 64
NOTICEABLE = ALIKE * 1.03
"""What the rule holds to be alike, and how far predictions are from simulations where they matter."""
sessions_there_are = st.integers(1, 48)


def simulated_ms(stages: Sequence[PipelineStage], sessions: int, micro_batches: int) -> float:
    """The mean iteration of a closed pipeline, event by event, once it has settled.

    Each stage has a device and an uplink, each first come, first served; links only delay. All micro-batches wait at
    the head to begin with, the larger ones first.
    """
    sizes = [len(range(number, sessions, micro_batches)) for number in range(micro_batches)]
    events = [(0.0, number, 0) for number in range(micro_batches)]
    free_ms = [0.0] * (2 * len(stages))
    begun_ms: list[list[float]] = [[] for _ in sizes]
    while any(len(times) <= 2 * ROUNDS for times in begun_ms):
        now_ms, number, resource = heapq.heappop(events)
        one = stages[resource // 2]
        if resource == 0:
            begun_ms[number].append(now_ms)
        device = resource % 2 == 0
        taken_ms = (
            one.decode_ms(sizes[number]) + STEP_OVERHEAD_MS if device else one.transfer_ms(sizes[number])
        )
        free_ms[resource] = max(now_ms, free_ms[resource]) + taken_ms
        after_ms = 0.0 if device else one.link_ms
        heapq.heappush(events, (free_ms[resource] + after_ms, number, (resource + 1) % len(free_ms)))
    return max(times[2 * ROUNDS] - times[ROUNDS] for times in begun_ms) / ROUNDS


def all_rules() -> dict[str, Rule]:
    return {**RULES, **{str(number): fixed(number) for number in (1, 2, 3, 5, 8, 64)}}


@settings(max_examples=examples(60))
@given(pipelines(), sessions_there_are, st.data())
def test_an_iteration_is_predicted_as_a_simulation_of_every_step_has_it(
    stages: list[PipelineStage], sessions: int, data: st.DataObject
) -> None:
    micro_batches = data.draw(st.integers(1, sessions))
    predicted_ms = iteration_ms(stages, sessions, micro_batches)
    assert predicted_ms == pytest.approx(simulated_ms(stages, sessions, micro_batches), rel=0.05)


@pytest.mark.full
@settings(max_examples=examples(60))
@given(pipelines(), sessions_there_are)
def test_in_simulation_no_other_rule_gives_tokens_noticeably_sooner_than_ours(
    stages: list[PipelineStage], sessions: int
) -> None:
    ours_ms = simulated_ms(stages, sessions, molink(stages, sessions, MAX_SESSIONS).micro_batches)
    for rule in all_rules().values():
        other = rule(stages, sessions, MAX_SESSIONS).micro_batches
        assert ours_ms <= simulated_ms(stages, sessions, other) * NOTICEABLE


@settings(max_examples=examples(25))
@given(pipelines(), st.integers(1, 24))
def test_in_simulation_no_number_of_micro_batches_at_all_is_noticeably_better_than_ours(
    stages: list[PipelineStage], sessions: int
) -> None:
    ours_ms = simulated_ms(stages, sessions, molink(stages, sessions, MAX_SESSIONS).micro_batches)
    best_ms = min(simulated_ms(stages, sessions, count) for count in range(1, sessions + 1))
    assert ours_ms <= best_ms * NOTICEABLE


@given(pipelines(), st.integers(1, 300), st.integers(1, 64), st.sampled_from(list(all_rules().values())))
def test_every_rule_has_room_for_every_session_and_leaves_no_micro_batch_empty(
    stages: list[PipelineStage], sessions: int, max_sessions: int, rule: Rule
) -> None:
    chosen = rule(stages, sessions, max_sessions)
    assert chosen.max_sessions <= max_sessions
    assert chosen.micro_batches * chosen.max_sessions >= sessions
    assert 1 <= chosen.micro_batches <= max(sessions, 1)
    assert chosen.iteration_ms == iteration_ms(stages, sessions, chosen.micro_batches)


@given(pipelines(), st.sampled_from(list(all_rules().values())))
def test_a_lone_session_is_one_micro_batch_under_every_rule(stages: list[PipelineStage], rule: Rule) -> None:
    assert rule(stages, 1, MAX_SESSIONS) == InFlightPlan(1, 1, iteration_ms(stages, 1, 1))


def test_one_hop_steps_all_of_its_sessions_together() -> None:
    assert molink([stage()], 32, MAX_SESSIONS).micro_batches == 1


def test_memory_bound_stages_without_links_between_them_take_as_many_micro_batches_as_there_are_stages() -> (
    None
):
    stages = [roofline(20.0, 1.0, 32, link_ms=0.0)] * 3
    assert molink(stages, 24, MAX_SESSIONS).micro_batches in (1, 2, 3)
    assert molink(stages, 24, MAX_SESSIONS).iteration_ms < 1.02 * iteration_ms(stages, 24, 3)


@settings(max_examples=examples(60))
@given(pipelines(), sessions_there_are, st.floats(1, 1.3), st.integers(0, MOST_MICRO_BATCHES))
def test_whatever_was_planned_no_number_is_predicted_to_be_noticeably_better(
    stages: list[PipelineStage], sessions: int, rows_each: float, planned: int
) -> None:
    chosen = molink(stages, sessions, MAX_SESSIONS, rows_each, planned)
    anew = molink(stages, sessions, MAX_SESSIONS, rows_each)
    assert anew.micro_batches <= chosen.micro_batches <= max(anew.micro_batches, planned)
    counts = range(1, sessions + 1)
    assert chosen.iteration_ms <= ALIKE * min(
        iteration_ms(stages, sessions, one, rows_each) for one in counts
    )


def test_numbers_that_are_about_as_good_do_not_take_turns() -> None:
    stages = [stage(1.0, 0.12, link_ms=30.0)] * 3
    turns = [1.2, 1.4] * 4
    assert [molink(stages, 12, MAX_SESSIONS, rows_each).micro_batches for rows_each in turns] == [1, 2] * 4
    planned = [0]
    for rows_each in turns:
        planned.append(molink(stages, 12, MAX_SESSIONS, rows_each, planned[-1]).micro_batches)
    assert planned == [0, 1, *[2] * 7]
    assert molink(stages, 6, MAX_SESSIONS, 1.2, planned=2).micro_batches == 1


def test_links_as_long_as_the_computation_ask_for_more_micro_batches_than_stages() -> None:
    stages = [stage(1.0, 1.0, link_ms=12.0)] * 3
    assert molink(stages, 24, MAX_SESSIONS).micro_batches > 3
    assert transmission(stages, 24, MAX_SESSIONS).micro_batches > 3


def test_stages_that_share_the_processors_of_one_host_take_fewer_micro_batches_than_on_hosts_of_their_own() -> (
    None
):
    def on(host: str) -> PipelineStage:
        one = stage(6.0, 0.5, link_ms=1.0)
        device = replace(one.facts.device, kind="cpu", processors=2)
        return replace(one, facts=replace(one.facts, device=device, grpc_addresses=(f"{host}:4002",)))

    apart = molink([on("192.0.2.1"), on("192.0.2.2"), on("192.0.2.3")], 12, MAX_SESSIONS)
    together = molink([on("192.0.2.1")] * 3, 12, MAX_SESSIONS)
    assert together.micro_batches < apart.micro_batches
    work_ms = 3 * 3 * (6.0 + 4 * 0.5 + STEP_OVERHEAD_MS)
    assert iteration_ms([on("192.0.2.1")] * 3, 12, 3) == pytest.approx(work_ms / 2)


def test_the_system_rule_stops_where_one_more_computation_does_not_fit_into_the_bubble() -> None:
    stages = [roofline(10.0 - STEP_OVERHEAD_MS, 0.0, 32, link_ms=7.0)] * 2
    chosen = system(stages, 8, MAX_SESSIONS)
    assert chosen.micro_batches == 3
    assert 3 * 10.0 <= chosen.iteration_ms < 4 * 10.0


def test_the_transmission_rule_searches_from_as_many_as_stages_to_twice_as_many() -> None:
    far, near = [stage(2.0, 0.1, link_ms=1000.0)] * 3, [roofline(50.0, 0.0, 32, link_ms=0.0)] * 3
    assert transmission(far, 32, MAX_SESSIONS).micro_batches == 6
    assert transmission(near, 32, MAX_SESSIONS).micro_batches == 3
    assert transmission(far, 2, MAX_SESSIONS).micro_batches == 2


def test_a_fixed_number_holds_as_far_as_there_are_sessions_for_it() -> None:
    assert [fixed(5)([stage()] * 3, sessions, MAX_SESSIONS).micro_batches for sessions in (3, 5, 50)] == [
        3,
        5,
        5,
    ]
    assert fixed(1)([stage()] * 3, 100, MAX_SESSIONS).micro_batches == 2


def test_rules_are_found_by_name_and_numbers_are_rules() -> None:
    assert rule_named("molink") is molink
    assert rule_named("7")([stage()] * 3, 20, MAX_SESSIONS).micro_batches == 7


@pytest.mark.parametrize("name", ["", "zero", "0", "-1", "1.5", "²", str(MOST_MICRO_BATCHES + 1)])
def test_a_name_that_is_no_rule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"micro-batches can circulate|neither a number nor one of"):
        rule_named(name)


@pytest.mark.parametrize("rule", all_rules().values(), ids=all_rules())
@given(pipelines(), st.integers(1, 48), st.integers(1, 16), st.integers(1, 64))
def test_rows_of_guesses_count_as_so_many_sessions_and_every_session_has_room(
    rule: Rule, stages: list[PipelineStage], sessions: int, rows_each: int, max_rows: int
) -> None:
    chosen = rule(stages, sessions, max_rows, float(rows_each))
    assert 1 <= chosen.micro_batches <= max(sessions, 1)
    assert chosen.micro_batches * chosen.max_sessions >= sessions
    assert chosen.max_sessions * rows_each <= max(max_rows, rows_each) + rows_each - 1
    assert chosen.iteration_ms == iteration_ms(stages, sessions, chosen.micro_batches, rows_each)
    if not sessions % chosen.micro_batches:
        alike = iteration_ms(stages, sessions * rows_each, chosen.micro_batches)
        assert chosen.iteration_ms == pytest.approx(alike)
