"""Clusters of the redundancy paper in virtual time: what is conserved, and what the policies must bring about."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.pairwise import usually

from molink.peer.redundancy import pair_roles
from molink.simnet.core.timeline import Timeline
from molink.simnet.devices.devices import Work
from molink.simnet.papers.redundancy import run as running
from molink.simnet.papers.redundancy.cluster import molink_pairs
from molink.simnet.papers.redundancy.cluster.cluster import Cluster
from molink.simnet.papers.redundancy.cluster.instances import LOCAL_CONNECTIONS, SEQUENCE_MS, instance_profile
from molink.simnet.papers.redundancy.cluster.ports import Port
from molink.simnet.papers.redundancy.cluster.workloads import ARRIVALS, WORKLOADS, RedundancyRequest, requests
from molink.simnet.papers.redundancy.rows import PAIR_POLICIES
from molink.simnet.papers.redundancy.run import POLICIES, RedundancyCell, check_conserved, simulate

CELL = RedundancyCell("accellm", "h100", "mixed", 4, 8.0, 3600.0, 1.0, 4.0, "burst")


def cell(policy: str, rate_rps: float = 8.0, workload: str = "mixed") -> RedundancyCell:
    return replace(CELL, policy=policy, rate_rps=rate_rps, workload=workload)


def small_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Instances with room for so many tokens of keys and values."""
    build = running.Cluster

    def built(timeline: Timeline, profile: object, instances: int, bytes_per_s: float) -> Cluster:
        cluster = build(timeline, profile, instances, bytes_per_s)  # type: ignore[arg-type]
        for instance in cluster.instances:
            instance.capacity_tokens = tokens
        return cluster

    monkeypatch.setattr(running, "Cluster", built)


# -- conservation: simulate() itself raises where something was not conserved


@settings(max_examples=8)
@given(
    st.builds(
        RedundancyCell,
        policy=st.sampled_from(list(POLICIES)),
        device=st.sampled_from(list(LOCAL_CONNECTIONS)),
        workload=st.sampled_from(list(WORKLOADS)),
        instances=st.sampled_from([2, 4, 6, 8]),
        rate_rps=st.floats(1.0, 12.0),
        interconnect_gbps=st.sampled_from([1.0, 20.0, 400.0, 3600.0]),
        warm_up_s=st.just(0.0),
        duration_s=st.just(2.0),
        arrivals=st.sampled_from(ARRIVALS),
        seed=st.integers(0, 1000),
    )
)
def test_every_request_ends_once_and_nothing_is_lost_or_too_much(cell_of_all: RedundancyCell) -> None:
    try:
        run = simulate(cell_of_all)
    except ValueError as error:
        assume(
            not str(error).startswith("nothing came")
        )  # so it is, now and then, of few requests in two seconds
        raise
    assert run.requests > 0
    assert 0 < run.ttft_s <= run.ttft_max_s
    assert 0 < run.tbt_s <= run.tbt_max_s <= run.jct_s * run.requests
    assert 0 <= run.link_busy <= 1
    assert 0 < run.instance_busy <= 1 + 1e-9
    assert run.peak_kv_gb <= run.capacity_kv_gb


@pytest.mark.parametrize("policy", usually(["molink"], POLICIES))
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy: str) -> None:
    assert repr(simulate(cell(policy))) == repr(simulate(cell(policy)))
    assert simulate(cell(policy)) != simulate(replace(cell(policy), seed=1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tokens", usually([2100], [5000, 12000]))
def test_memory_for_a_few_requests_delays_the_others_and_loses_none(
    policy: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_memory(monkeypatch, tokens)
    run = simulate(cell(policy))
    assert run.peak_kv_gb <= tokens * instance_profile("h100").kv_token_bytes / 1e9
    if policy in PAIR_POLICIES:
        assert run.short_requests > 0


def test_what_did_not_end_is_noticed() -> None:
    timeline = Timeline()
    cluster = Cluster(timeline, instance_profile("h100"), 4, 1e9)
    cluster.arrive(requests(WORKLOADS["light"], 2.0, 1.0, "burst", 0), POLICIES["vllm"](cluster))
    timeline.run(0.05)
    with pytest.raises(AssertionError, match="request 0 has"):
        check_conserved(cluster)


# -- policies


def test_vllm_sends_nothing_and_a_decode_waits_for_prompts() -> None:
    run = simulate(cell("vllm"))
    assert run.sent_gb == 0
    assert run.tbt_max_s > 2 * simulate(cell("splitwise")).tbt_max_s


def test_splitwise_sends_the_keys_and_values_of_each_prompt_once() -> None:
    run = simulate(replace(cell("splitwise"), warm_up_s=0.0))
    coming = requests(WORKLOADS["mixed"], 8.0, CELL.duration_s, "burst", 0)
    tokens = sum(one.prompt_tokens for one in coming)
    assert run.sent_gb == pytest.approx(tokens * instance_profile("h100").kv_token_bytes / 1e9)


@pytest.mark.parametrize("policy", PAIR_POLICIES)
def test_those_with_pairs_send_prompts_and_every_line_after_them(policy: str) -> None:
    run = simulate(replace(cell(policy), warm_up_s=0.0))
    coming = requests(WORKLOADS["mixed"], 8.0, CELL.duration_s, "burst", 0)
    tokens = sum(one.prompt_tokens + one.output_tokens - 1 for one in coming)
    assert run.sent_gb >= tokens * instance_profile("h100").kv_token_bytes / 1e9


def test_two_that_prefill_halve_the_time_to_the_first_token() -> None:
    splitwise, accellm = (simulate(cell(policy)).ttft_s for policy in ("splitwise", "accellm"))
    assert accellm < 0.75 * splitwise


def test_a_slow_line_between_instances_costs_those_who_hand_over_and_not_the_others() -> None:
    for policy in ("splitwise", "accellm"):
        assert (
            simulate(replace(cell(policy), interconnect_gbps=4.0)).jct_s > 1.05 * simulate(cell(policy)).jct_s
        )
    assert simulate(replace(cell("vllm"), interconnect_gbps=4.0)).jct_s == simulate(cell("vllm")).jct_s


def test_slices_of_prompts_beside_decodes_end_the_wait_for_a_turn_and_for_a_long_prompt() -> None:
    vllm, accellm, molink = (simulate(cell(policy, 12.0)) for policy in ("vllm", "accellm", "molink"))
    assert molink.ttft_s < 0.9 * accellm.ttft_s
    assert molink.tbt_max_s < 0.7 * vllm.tbt_max_s
    assert molink.jct_s < vllm.jct_s


def test_with_roles_sessions_go_over_by_the_decision_of_peers_and_prompts_keep_no_decode_waiting() -> None:
    assert molink_pairs.going_over is pair_roles.going_over
    worst_s = {
        policy: simulate(cell(policy, 4.0)).tbt_max_s for policy in ("vllm", "molink-pairs", "molink-auto")
    }
    assert worst_s["molink-pairs"] < 0.7 * worst_s["vllm"]
    assert worst_s["molink-auto"] < 0.7 * worst_s["vllm"]


def test_slices_of_a_prompt_are_computed_as_its_whole() -> None:
    timeline = Timeline()
    cluster = Cluster(timeline, instance_profile("h100"), 2, 450e9)
    alone = RedundancyRequest(0, 0.0, 1000, 2, 2000)
    cluster.arrive([alone], POLICIES["molink"](cluster))
    timeline.run()
    check_conserved(cluster)
    whole_s = instance_profile("h100").step_s(Work(1000, 1000, 500_500), 1)
    assert whole_s < cluster.jobs[0].first_s < 1.5 * whole_s
    assert cluster.jobs[0].begun_tokens == 1000


@pytest.mark.full
@pytest.mark.parametrize("device", LOCAL_CONNECTIONS)
@pytest.mark.parametrize("instances", [4, 16])
def test_accellm_is_ahead_of_splitwise_on_the_mixed_workload(device: str, instances: int) -> None:
    rate_rps = (2.0 if device == "h100" else 1.5) * instances
    one = RedundancyCell("splitwise", device, "mixed", instances, rate_rps, 1568.0, 20.0, 60.0, "burst")
    splitwise, accellm = (simulate(replace(one, policy=policy)) for policy in ("splitwise", "accellm"))
    assert accellm.ttft_s < splitwise.ttft_s
    assert accellm.tbt_s < splitwise.tbt_s
    assert accellm.jct_s < splitwise.jct_s


# -- parts


@pytest.mark.parametrize("device", LOCAL_CONNECTIONS)
def test_20_more_sequences_cost_what_the_paper_says_and_a_bare_roofline_does_not(device: str) -> None:
    def added_ms(sequence_ms: float) -> float:
        profile = instance_profile(device, sequence_ms)
        steps_s = [profile.step_s(Work(rows, 500 * rows, 500 * rows), rows) for rows in (20, 40)]
        return 1000 * (steps_s[1] - steps_s[0])

    assert 7.2 <= added_ms(SEQUENCE_MS) < 8.2
    assert added_ms(0.0) < 1


def test_a_stream_ends_a_layer_after_the_prompt_or_when_the_line_is_through() -> None:
    fast = Port(1e9)
    assert fast.stream(80_000_000, 80, 1.0, 2.0) == pytest.approx(2.001)
    slow = Port(1e6)
    assert slow.stream(80_000_000, 80, 1.0, 2.0) == pytest.approx(1 + 1 / 80 + 80)
    assert slow.send(1_000_000, 2.0) == pytest.approx(slow.busy_s + 1 + 1 / 80)


def test_requests_do_not_depend_on_the_rate_and_come_as_often_as_it_says() -> None:
    slow, fast = (requests(WORKLOADS["mixed"], rate, 60.0, "burst", 3) for rate in (2.5, 10.0))
    assert (len(slow), len(fast)) == (150, 600)
    assert [one.prompt_tokens for one in slow] == [one.prompt_tokens for one in fast[:150]]
    assert all(one.arrival_s.is_integer() for one in fast)
    poisson = requests(WORKLOADS["heavy"], 20.0, 500.0, "poisson", 3)
    assert len(poisson) == pytest.approx(10000, rel=0.05)
    lengths = [tokens for one in poisson for tokens in (one.prompt_tokens, one.output_tokens)]
    assert (min(lengths), max(lengths)) == (500, 1000)
    assert sum(lengths) / len(lengths) == pytest.approx(750, rel=0.01)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CELL, policy="none"),
        replace(CELL, workload="none"),
        replace(CELL, device="rtx-4090"),
        replace(CELL, interconnect_gbps=0.0),
        replace(CELL, instances=3),
        replace(CELL, rate_rps=0.0),
        replace(CELL, arrivals="none"),
        replace(CELL, sequence_ms=-1.0),
    ],
)
def test_what_cannot_be_simulated_is_refused(wrong: RedundancyCell) -> None:
    with pytest.raises(
        ValueError, match=r"polic|arrivals|even number|two instances|not in the paper|rate|negative"
    ):
        simulate(wrong)
