"""The world in virtual time: what theory says of queues and pipelines, nothing lost, nothing made, nothing random."""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pairwise import usually
from support.properties import examples

from molink.peer.scheduling.in_flight_rules import fixed
from molink.peer.scheduling.prompt_order import PATIENCE
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.spec import Span
from molink.simnet.core.frames import CHUNK_BYTES
from molink.simnet.core.request_load import Request, RequestOutcome
from molink.simnet.core.serving_world import ServingWorld, SimulatedCircuit
from molink.simnet.core.timeline import Alarm, Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.core.wire import ByteAccount, Wire
from molink.simnet.devices.devices import DEVICES, Work
from molink.simnet.devices.model_shapes import QWEN2_7B, even_spans
from molink.simnet.serve.petals_world import PetalsWorld
from molink.simnet.serve.scenario import Scenario, SimulatedStage, circuit_plan
from molink.simnet.serve.served_as import ServedAs, usual
from molink.simnet.serve.simulated import RequestLoad, SimulatedRun, simulate_serving

POLICIES = ("molink", "paper", "fixed-chunk", "concurrent", "fifo", "zeromq", "petals")


def scenario(peers: int = 3, bandwidth_mbps: float = 100.0, delay_ms: float = 30.0) -> Scenario:
    stages = tuple(SimulatedStage(DEVICES["rtx-4090"], span) for span in even_spans(QWEN2_7B.layers, peers))
    return Scenario(QWEN2_7B, stages, bandwidth_mbps, delay_ms, software_ms=0.0)


def plan(step_s: float, delay_s: float, micro_batches: int, peers: int = 2) -> SimulatedCircuit:
    """Engines that take the same time for every step, and lines that take none for any byte."""
    usual_plan = circuit_plan(scenario(peers), "fifo", usual("fifo", peers))

    def compute_s(_: Span, __: Work, ___: int) -> float:
        return step_s

    return replace(
        usual_plan,
        compute_s=(compute_s,) * peers,
        uplink_mbps=(math.inf,) * peers,
        delay_s=((delay_s,) * peers,) * peers,
        rule=fixed(micro_batches),
        cut=equal_chunks(1 << 20),
    )


def serve(plan: SimulatedCircuit, requests: Sequence[Request]) -> tuple[ServingWorld, list[RequestOutcome]]:
    timeline = Timeline()
    world = ServingWorld(plan, timeline)
    world.desk.arrive(requests)
    timeline.run()
    world.check()
    return world, [world.desk.outcome(request.number) for request in requests]


def short_run(policy: str, seed: int = 0, rate_rps: float = 0.5) -> SimulatedRun:
    rng = random.Random(seed)
    trace = tuple(TraceRequest(float(at), rng.randint(1, 1500), rng.randint(1, 60)) for at in range(40))
    return simulate_serving(
        scenario(), policy, usual(policy, 3), RequestLoad(trace, rate_rps, 5.0, 40.0, seed)
    )


@cache
def known_run(policy: str) -> SimulatedRun:
    """The first of its runs with seed 0."""
    return short_run(policy)


# -- time


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_actions_happen_in_the_order_of_their_times_and_those_of_one_time_in_that_of_their_calls(
    delays_s: list[float],
) -> None:
    timeline = Timeline()
    happened: list[tuple[float, int]] = []
    for number, delay_s in enumerate(delays_s):
        timeline.call(delay_s, lambda number=number: happened.append((timeline.now_s, number)))  # type: ignore[misc]
    timeline.run()
    assert happened == sorted((delay_s, number) for number, delay_s in enumerate(delays_s))
    assert timeline.events == len(delays_s)


@pytest.mark.parametrize("delay_s", [-1e-9, math.inf, math.nan])
def test_nothing_happens_in_the_past_or_never(delay_s: float) -> None:
    with pytest.raises(ValueError, match="0 or more seconds"):
        Timeline().call(delay_s, lambda: None)


def test_an_alarm_that_is_brought_forward_rings_once_and_earlier() -> None:
    timeline = Timeline()
    rang: list[float] = []
    alarm = Alarm(timeline, lambda: rang.append(timeline.now_s))
    alarm.set(5.0)
    alarm.set(2.0)
    alarm.set(3.0)
    timeline.run()
    assert rang == [2.0]
    alarm.set(7.0)
    timeline.run()
    assert rang == [2.0, 7.0]


def test_an_alarm_that_is_moved_rings_once_and_at_no_other_time() -> None:
    timeline = Timeline()
    rang: list[float] = []
    alarm = Alarm(timeline, lambda: rang.append(timeline.now_s))
    alarm.move(2.0)
    alarm.move(5.0)
    timeline.run(4.0)
    assert rang == []
    alarm.move(4.5)
    timeline.run()
    assert rang == [4.5]
    alarm.move(6.0)
    alarm.move(math.inf)
    timeline.run()
    assert rang == [4.5]


# -- theory


@pytest.mark.parametrize("utilisation", usually([0.8], [0.3, 0.6]))
def test_messages_on_a_wire_wait_as_long_as_in_an_m_d_1_queue(utilisation: float) -> None:
    """rho D / (2 (1 - rho)): Pollaczek and Khinchine, for times of service that are all alike."""
    service_s, count = 0.01, 400_000
    wire = Wire(rate_mbps=1.0)
    size_bytes = round(service_s * 125_000)
    rng = random.Random(1)
    now_s = waited_s = 0.0
    for _ in range(count):
        now_s += rng.expovariate(utilisation / service_s)
        waited_s += wire.send(size_bytes, 0.0, now_s) - now_s - service_s
        wire.received(size_bytes)
    wire.account.check()
    expected_s = utilisation * service_s / (2 * (1 - utilisation))
    assert waited_s / count == pytest.approx(expected_s, rel=0.03)
    assert wire.busy_s(now_s) / now_s == pytest.approx(utilisation, rel=0.01)


def test_one_session_on_two_stages_has_the_bubbles_of_a_pipeline() -> None:
    step_s, delay_s, tokens = 0.010, 0.030, 101
    world, [outcome] = serve(plan(step_s, delay_s, 1), [Request(0, 1.0, 100, tokens)])
    steps_s = [after - before for before, after in zip(outcome.token_s, outcome.token_s[1:], strict=False)]
    assert steps_s == pytest.approx([2 * (step_s + delay_s)] * (tokens - 1))
    assert [peer.busy_s for peer in world.peers] == pytest.approx([tokens * step_s] * 2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_micro_batches_fill_the_bubbles_of_each_other(micro_batches: int) -> None:
    """Each stage computes n times while one goes round, until there is no bubble left."""
    step_s, delay_s, tokens = 0.010, 0.005, 201
    requests = [Request(number, 0.001 * number, 1, tokens) for number in range(micro_batches)]
    world, outcomes = serve(plan(step_s, delay_s, micro_batches), requests)
    round_s = 2 * (step_s + delay_s)
    for outcome in outcomes:
        taken_s = (outcome.token_s[-1] - outcome.token_s[20]) / (tokens - 21)
        assert taken_s == pytest.approx(max(round_s, micro_batches * step_s), rel=0.01)
    assert world.peers[0].steps == pytest.approx(micro_batches * tokens, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("policy", usually(["molink", "petals"], ["concurrent"]))
def test_requests_in_the_system_are_arrivals_a_second_times_the_time_that_they_stay(policy: str) -> None:
    """Little's law, of a load that ends: the time average of who is there, counted at every event, is the rate times
    the mean stay."""
    timeline = Timeline()
    whole = circuit_plan(scenario(), policy, usual(policy, 3))
    world = PetalsWorld(whole, timeline) if policy == "petals" else ServingWorld(whole, timeline)
    rng = random.Random(2)
    at_s, requests = 0.0, []
    for number in range(60):
        at_s += rng.expovariate(0.4)
        requests.append(Request(number, at_s, rng.randint(1, 1000), rng.randint(2, 40)))
    world.desk.arrive(requests)
    inside_s = last_s = 0.0
    while timeline.next_s < math.inf:
        inside = world.desk.present
        timeline.step()
        inside_s += inside * (timeline.now_s - last_s)
        last_s = timeline.now_s
    stays_s = [world.desk.outcome(one.number).token_s[-1] - one.arrival_s for one in requests]
    assert inside_s / last_s == pytest.approx(len(requests) / last_s * sum(stays_s) / len(stays_s), rel=0.01)


# -- conservation


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_with_its_tokens_in_order_and_nothing_is_lost(policy: str) -> None:
    run = known_run(policy)
    assert run.outcomes
    for outcome in run.outcomes:
        assert outcome.error is None
        assert len(outcome.token_s) == outcome.request.new_tokens
        assert list(outcome.token_s) == sorted(outcome.token_s)
        assert outcome.token_s[0] > outcome.request.arrival_s
    assert max(run.uplink_busy) <= 1
    assert max(run.engine_busy) <= 1


@pytest.mark.full
@pytest.mark.parametrize("policy", usually(["molink", "petals"], POLICIES))
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    assert repr(short_run(policy)) == repr(known_run(policy))


@pytest.mark.full
def test_another_seed_gives_another_run() -> None:
    assert short_run("molink", seed=4) != known_run("molink")


@settings(max_examples=examples(12))
@given(seed=st.integers(0, 1000), policy=st.sampled_from(POLICIES), rate_rps=st.floats(0.05, 3.0))
def test_whatever_comes_is_served_or_said_not_to_have_been(seed: int, policy: str, rate_rps: float) -> None:
    run = short_run(policy, seed, rate_rps)
    for outcome in run.outcomes:
        complete = len(outcome.token_s) == outcome.request.new_tokens
        assert complete == (outcome.error is None)


def test_a_request_that_never_fits_is_refused_and_holds_up_nobody() -> None:
    small = replace(plan(0.01, 0.0, 1), kv_tokens=100)
    _, [large, other] = serve(small, [Request(0, 0.0, 99, 2), Request(1, 0.0, 50, 2)])
    assert large.error is not None
    assert "101 tokens do not fit" in large.error
    assert other.error is None


def test_who_does_not_fit_now_waits_and_is_not_overtaken() -> None:
    small = replace(plan(0.01, 0.0, 1), kv_tokens=100)
    requests = [Request(0, 0.0, 50, 10), Request(1, 0.01, 80, 10), Request(2, 0.02, 10, 10)]
    _, outcomes = serve(small, requests)
    firsts_s = [outcome.token_s[0] for outcome in outcomes]
    assert firsts_s == sorted(firsts_s)
    assert firsts_s[1] > outcomes[0].token_s[-1]


def served_prompts(policy: str, requests: Sequence[Request]) -> list[float]:
    """Each request's time to first token, in seconds."""
    _, outcomes = serve(circuit_plan(scenario(), policy, usual(policy, 3)), requests)
    return [outcome.token_s[0] - outcome.request.arrival_s for outcome in outcomes]


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it_and_costs_them_only_its_own_time() -> None:
    long = [Request(number, 0.0, 2000, 1) for number in range(4)]
    [alone_s] = served_prompts("molink", [Request(0, 0.0, 100, 1)])
    before_s = served_prompts("molink", long)
    *long_s, short_s = served_prompts("molink", [*long, Request(4, 2.0, 100, 1)])
    assert short_s < 3 * alone_s
    assert max(long_s) < max(before_s) + alone_s


@pytest.mark.full
def test_short_prompts_without_end_do_not_keep_a_long_one_waiting() -> None:
    """They ask for more than the line carries: whoever had no place before those that come later never got through."""
    line_s = 1000 * QWEN2_7B.spec().activation_bytes * 8 / 100e6
    short = [Request(number, 0.1 * number, 250, 1) for number in range(1, 151)]
    long_s, *others_s = served_prompts("molink", [Request(0, 0.0, 1000, 1), *short])
    assert max(others_s) > long_s
    assert long_s < (PATIENCE + 3) * line_s


# -- prompts as real peers compute them


def longest_gap_s(served_as: ServedAs) -> float:
    """Of a session that decodes while a long prompt comes, over lines that hold up neither."""
    fast = circuit_plan(scenario(bandwidth_mbps=10_000.0, delay_ms=1.0), "molink", served_as)
    _, [decoding, _] = serve(fast, [Request(0, 0.0, 16, 200), Request(1, 0.5, 2000, 1)])
    return max(after - before for before, after in zip(decoding.token_s, decoding.token_s[1:], strict=False))


def test_beside_decode_a_prompt_is_computed_in_slices_which_hold_a_token_up_for_less() -> None:
    in_slices, whole = longest_gap_s(usual("molink", 3)), longest_gap_s(ServedAs("molink", 2048))
    assert in_slices < 0.6 * whole


def test_prompts_that_come_at_once_are_computed_in_one_pass() -> None:
    def first_tokens_s(profiled: bool) -> list[float]:
        known = circuit_plan(scenario(1), "molink", usual("molink", 1))
        waiting = replace(known, opening_s=0.0125, profiles=known.profiles if profiled else None)
        world, outcomes = serve(waiting, [Request(number, 0.001 * number, 64, 1) for number in range(4)])
        steps.append(world.peers[0].steps)
        return [outcome.token_s[0] for outcome in outcomes]

    steps: list[int] = []
    together, apart = first_tokens_s(True), first_tokens_s(False)
    assert steps[0] < steps[1]
    assert max(together) <= max(apart)


def test_bytes_that_vanish_are_noticed() -> None:
    ByteAccount(10, 5, 2, 3).check()
    with pytest.raises(AssertionError, match="not conserved"):
        ByteAccount(10, 5, 2, 2).check()
    wire = Wire(1.0)
    wire.send(100, 0.0, 0.0)
    wire.received(101)
    with pytest.raises(AssertionError, match="not conserved"):
        wire.account.check()


def test_a_wire_delivers_in_order_after_transmission_and_delay() -> None:
    wire = Wire(rate_mbps=8.0)
    assert wire.send(1000, 0.5, 0.0) == pytest.approx(0.501)
    assert wire.send(1000, 0.1, 0.0) == pytest.approx(0.102)
    assert [wire.busy_s(now_s) for now_s in (0.0, 0.0015, 0.1)] == pytest.approx([0.0, 0.0015, 0.002])
    assert wire.send(CHUNK_BYTES, 0.0, 1.0) == pytest.approx(1.0 + CHUNK_BYTES / 1e6)
    assert wire.busy_s(2.0) == pytest.approx(0.002 + CHUNK_BYTES / 1e6)


# -- no copy of a policy


def test_the_peers_of_the_world_decide_with_the_objects_of_real_peers() -> None:
    """What decides is imported from the product; the simulator has no module that does it itself."""
    from molink.peer.hop import hop_core
    from molink.peer.scheduling import in_flight_rules
    from molink.peer.wire.transmission import uplink
    from molink.peer.wire.transport import acknowledgements
    from molink.routing.cost import prefill_chunks

    world = ServingWorld(plan(0.01, 0.0, 1), Timeline())
    peer, channels = world.peers[0], world.channels[0]
    assert type(vars(peer)["_core"]) is hop_core.HopCore
    assert type(vars(channels)["_uplink"]) is uplink.Uplink
    assert type(vars(channels)["_channels"][0].acknowledging) is acknowledgements.DelayedAcks
    ours = circuit_plan(scenario(), "molink", usual("molink", 3))
    assert ours.rule is in_flight_rules.molink
    assert ours.cut is prefill_chunks.chunk_lengths
    assert isinstance(ours.stages_of(Request(0, 0.0, 1, 1))[0], PipelineStage)
    decisions = {
        "peer.scheduling.microbatch",
        "peer.wire.transmission.uplink",
        "peer.scheduling.in_flight_rules",
        "routing.cost.prefill_chunks",
    }
    assert {f"molink.{name}" for name in decisions} <= set(sys.modules)
    assert Span(0, 10) == ours.spans[0]
