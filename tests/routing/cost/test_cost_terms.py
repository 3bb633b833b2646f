"""One cost model: its terms add up, are never zero for want of a measurement, and move the right way."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of
from support.circuits.route_cases import aged, observations, on, snapshots, views

from molink.dht.records.records import LayerLatency, PeerView, PrefillLatency
from molink.routing import CostModel, Hop, PeerObservation, Route, Snapshot, plan
from molink.routing.cost.cost import prefill_layer_ms
from molink.routing.cost.prefill_chunks import most_chunk_tokens
from molink.routing.cost.reliability import loss_probability, loss_rate_per_s
from molink.routing.cost.terms import Demand, PeerCosts, peer_costs, queue_ms, recovery_ms
from molink.routing.problem.problem import objective_ms
from molink.shards.spec import MAX_STEP_TOKENS, Span

COST = CostModel()
LOW, HIGH = (0, 4), (4, 8)


def terms(route: Route, hop: int) -> dict[str, float]:
    return {term.name: term.ms for term in route.hops[hop].terms}


def seen(*views: PeerView, **observed: PeerObservation) -> Snapshot:
    return replace(snapshot_of(*views), observed=observed)


def costs(view: PeerView, observed: PeerObservation = PeerObservation()) -> PeerCosts:  # noqa: B008 (an immutable value)
    return peer_costs(view, observed, MODEL, Demand.of(100, 40), 6000.0, COST)


@given(snapshots(), st.integers(1, 64), st.data())
def test_the_terms_add_up_to_the_objective_of_the_search(
    snapshot: Snapshot, tokens: int, data: st.DataObject
) -> None:
    prompt = data.draw(st.none() | st.integers(1, tokens))
    route = plan(snapshot, tokens, prompt_tokens=prompt)
    problem, ids = snapshot.problem(tokens, prompt_tokens=prompt)
    hops = [Hop(ids.index(hop.peer_id), hop.span.start, hop.span.stop) for hop in route.hops]
    assert route.objective_ms == pytest.approx(objective_ms(problem, hops), rel=1e-9)
    every = [term for hop in route.hops for term in hop.terms]
    assert sum(term.ms for term in every if term.in_tpot) == pytest.approx(route.tpot_ms)
    assert route.objective_ms >= route.tpot_ms
    for number, hop in enumerate(route.hops):
        named = terms(route, number)
        assert len(named) == len(hop.terms)
        compute = ("layers", "batching", "embedding", "head")
        assert hop.compute_ms == pytest.approx(sum(named.get(name, 0.0) for name in compute))
        assert hop.link_ms == named.get("link", 0.0)
        assert min(named[name] for name in ("layers", "transfer", "prefill", "reliability")) > 0
        assert (named.get("loading", 0.0) > 0) == bool(hop.cold_spans)
        assert ("link" in named) == (len(route.hops) > 1)
    assert route.ttft_ms > 0


def test_every_term_of_two_hops_is_what_the_announcements_say() -> None:
    slow = (LayerLatency(1, 2.0), LayerLatency(2, 3.0))
    low = on(peer("low", LOW, layer_latencies=slow, sessions=1, embed_ms=0.1, links={"high": 10.0}), 2)
    high = peer("high", HIGH, head_ms=0.3)
    fast = PeerObservation(uptime_s=7200.0, client_rtt_ms=60.0, uplink_mbps=2.048)
    route = plan(seen(low, high, low=fast), 100, prompt_tokens=40)
    lost = loss_probability(1 / 14400, 1.0, 60 * 0.2)
    history = 40 + 30
    median_layer = (2.0 + 1.0 * (history - 1) + 2.0 + 0.1 * 2.0 * (history - 1)) / 2
    again_ms = 5000.0 + 8 * median_layer + history * 256 * 8 / 20_000
    assert terms(route, 0) == pytest.approx(
        {
            "layers": 8.0,
            "batching": 4.0,
            "embedding": 0.1,
            "queue": (8.0 / 200) * 8.0 / 2,
            "link": 6.0,
            "transfer": 1.0,
            "prefill": 40 / 60,
            "reliability": lost * again_ms / 60,
            "service": 0.25,
            "client link": 1.0,
        }
    )
    assert [term.name for term in route.hops[0].terms if not term.in_tpot] == [
        "prefill",
        "reliability",
        "client link",
    ]
    assert [term.name for term in route.hops[1].terms if not term.in_tpot] == [
        "transfer",
        "prefill",
        "reliability",
    ]
    assert route.hops[1].compute_ms == pytest.approx(8.3)


def test_loading_is_charged_per_token_that_it_will_serve() -> None:
    route = plan(snapshot_of(peer("a", free_weight_bytes=10**9, load_bytes_per_s=1e6)), 10)
    assert terms(route, 0)["loading"] == pytest.approx(route.load_s * 1000 / COST.load_amortisation_tokens)
    assert route.hops[0].cold_spans == (Span(0, 8),)


def test_what_nobody_measured_is_said_and_what_was_is_not() -> None:
    latencies = (LayerLatency(1, 2.0), LayerLatency(64, 4.0))
    low, high = peer("low", LOW, layer_latencies=latencies), peer("high", HIGH, layer_latencies=latencies)
    route = plan(snapshot_of(low, high), 10)
    assert route.hops[0].assumed == (
        "a round trip of 100 ms to the next hop",
        "an uplink of 20 Mbps",
        "that it stays for 2 h on average",
        "a round trip of 100 ms to the client",
        "a prompt of 5 tokens",
    )
    assert route.hops[1].assumed == route.hops[0].assumed[:3]
    known = PeerObservation(uptime_s=10.0, client_rtt_ms=5.0, uplink_mbps=50.0)
    low = peer("low", LOW, layer_latencies=latencies, links={"high": 5.0})
    route = plan(seen(low, high, low=known, high=known), 10, prompt_tokens=5)
    assert [hop.assumed for hop in route.hops] == [(), ()]
    only = plan(seen(peer("a", (0, 8)), a=known), 10, prompt_tokens=5)
    assert only.hops[0].assumed == ("the time of 5 rows from batches of 1 at most",)


def with_uplink(view: PeerView, uplink_mbps: float | None) -> PeerView:
    return replace(view, facts=replace(view.facts, uplink_mbps=uplink_mbps))


def test_an_uplink_that_a_peer_measured_is_taken_instead_of_the_assumed_one() -> None:
    low, high = with_uplink(peer("low", LOW), 2.0), peer("high", HIGH)
    route = plan(snapshot_of(low, high), 10)
    assumed_ms = terms(route, 1)["transfer"]
    assert terms(route, 0)["transfer"] == pytest.approx(assumed_ms * COST.unknown_bandwidth_mbps / 2.0)
    assert route.hops[0].measured == ("an uplink of 2 Mbps",)
    assert not any("uplink" in sentence for sentence in route.hops[0].assumed)
    assert route.hops[1].measured == ()
    assert "an uplink of 20 Mbps" in route.hops[1].assumed
    own = PeerObservation(uplink_mbps=50.0)
    assert plan(seen(low, high, low=own), 10).hops[0].measured == ("an uplink of 50 Mbps",)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_nonsensical_uplink_counts_as_unmeasured(nonsense: float) -> None:
    route = plan(snapshot_of(with_uplink(peer("a", (0, 8)), nonsense)), 10)
    assert route.hops[0].measured == ()
    assert "an uplink of 20 Mbps" in route.hops[0].assumed


@pytest.mark.parametrize("nonsense", [float("nan"), -1.0])
def test_a_link_with_a_nonsensical_measurement_counts_as_unmeasured(nonsense: float) -> None:
    route = plan(snapshot_of(peer("low", LOW, links={"high": nonsense}), peer("high", HIGH)), 10)
    assert "a round trip of 100 ms to the next hop" in route.hops[0].assumed


# -- preferences


def chosen(*views: PeerView, **observed: PeerObservation) -> str:
    """Whom the route begins with."""
    return plan(seen(*views, **observed), 100, prompt_tokens=20).peer_ids[0]


def test_of_equals_the_one_that_has_stayed_longest_and_was_lost_least_is_taken() -> None:
    a, b = peer("a", (0, 8)), peer("b", (0, 8))
    assert chosen(a, b) == "a"
    assert chosen(a, b, b=PeerObservation(uptime_s=60.0)) == "b"
    assert chosen(a, b, a=PeerObservation(uptime_s=60.0, losses=1)) == "b"
    assert chosen(aged(a, 60.0), b) == "b"


def test_of_equals_the_idle_one_the_near_one_and_the_one_with_processors_is_the_head() -> None:
    a, b = peer("a", (0, 8)), peer("b", (0, 8))
    assert chosen(peer("a", (0, 8), sessions=1), b) == "b"
    assert chosen(peer("a", (0, 8), queued=1), b) == "b"
    assert chosen(a, on(b, 8)) == "b"
    assert chosen(a, b, b=PeerObservation(client_rtt_ms=20.0)) == "b"
    assert chosen(a, b, b=PeerObservation(uplink_mbps=100.0)) == "b"
    assert chosen(a, with_uplink(b, 100.0)) == "b"
    assert chosen(with_uplink(a, 1.0), b) == "b"


def test_a_long_prompt_goes_round_a_narrow_uplink() -> None:
    near = {"layer_latencies": (LayerLatency(1, 1.0),)}
    narrow, wide = peer("narrow", LOW, links={"high": 9.0}, **near), peer("wide", LOW, links={"high": 12.0})
    snapshot = seen(narrow, wide, peer("high", HIGH), narrow=PeerObservation(uplink_mbps=0.5))
    assert plan(snapshot, 420, prompt_tokens=20).peer_ids[0] == "narrow"
    assert plan(snapshot, 420, prompt_tokens=400).peer_ids[0] == "wide"


# -- directions


@given(st.floats(0, 1e7), st.floats(0, 1e7), st.integers(0, 50))
def test_longer_uptime_never_raises_and_a_loss_always_raises_the_rate(
    uptime_s: float, more_s: float, losses: int
) -> None:
    assert loss_rate_per_s(uptime_s + more_s, losses) <= loss_rate_per_s(uptime_s, losses)
    assert loss_rate_per_s(uptime_s, losses + 1) > loss_rate_per_s(uptime_s, losses)
    assert loss_rate_per_s(0.0) == 1 / COST.mean_lifetime_s


@given(st.floats(1e-9, 1.0), st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e5))
def test_a_probability_of_loss_is_one_and_grows_with_age_and_length(
    rate: float, age_s: float, session_s: float, more_s: float
) -> None:
    probability = loss_probability(rate, age_s, session_s)
    assert 0 <= probability <= 1
    assert loss_probability(rate, age_s + more_s, session_s) >= probability
    assert loss_probability(rate, age_s, session_s + more_s) >= probability
    assert loss_probability(rate, -5.0, session_s) == loss_probability(rate, 0.0, session_s)


@given(views("a"), observations, st.floats(0, 1e6), st.integers(0, 80))
def test_being_reliable_near_wide_or_idle_never_costs_more(
    view: PeerView, observed: PeerObservation, more: float, steps: int
) -> None:
    now = costs(view, observed)
    assert costs(view, replace(observed, uptime_s=observed.uptime_s + more)).hop_ms <= now.hop_ms
    assert costs(view, replace(observed, losses=observed.losses + 1)).hop_ms > now.hop_ms
    assert costs(aged(view, view.age_s + more), observed).hop_ms >= now.hop_ms
    wider = replace(observed, uplink_mbps=(observed.uplink_mbps or COST.unknown_bandwidth_mbps) + more)
    assert costs(view, wider).hop_ms <= now.hop_ms
    assert costs(on(view, view.facts.device.processors + steps), observed).start_ms <= now.start_ms
    for name in ("queued", "sessions"):
        fuller = replace(view, state=replace(view.state, **{name: getattr(view.state, name) + steps}))
        assert queue_ms(fuller, COST) >= queue_ms(view, COST)


@given(views("a"), st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 2000))
def test_losing_a_longer_session_never_costs_less(
    view: PeerView, prompt: int, generated: int, more: int
) -> None:
    """The prompt in whole chunks: rows of equal chunks are rounded up."""
    chunk = most_chunk_tokens([MAX_STEP_TOKENS])

    def cost_of(tokens: int, prompt: int) -> float:
        return recovery_ms((view,), MODEL, Demand.of(tokens, prompt), COST)

    assert cost_of(chunk * (prompt + more), chunk * (prompt + more)) >= cost_of(
        chunk * prompt, chunk * prompt
    )
    assert cost_of(prompt + generated, prompt) > COST.recovery_ms


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=6), st.integers(1, 5000), st.integers(0, 5000))
def test_more_rows_never_take_less_time(times: list[float], rows: int, more: int) -> None:
    latencies = [LayerLatency(2**size, time) for size, time in enumerate(sorted(times))]
    assert prefill_layer_ms(latencies, rows + more, COST) >= prefill_layer_ms(latencies, rows, COST) - 1e-9
    if len(times) == 1:
        assert prefill_layer_ms(latencies, 11, COST) == pytest.approx(2 * times[0])


@given(st.lists(st.floats(0.1, 900), min_size=1, max_size=6), st.floats(0.1, 900), st.integers(1, 2000))
def test_measured_prefills_are_what_is_predicted_of_prefills(
    times: list[float], single_ms: float, rows: int
) -> None:
    decode = [LayerLatency(1, single_ms), LayerLatency(32, 3 * single_ms)]
    measured = [PrefillLatency(16 * 2**size, time) for size, time in enumerate(sorted(times))]
    for prefill in measured:
        predicted_ms = prefill_layer_ms(decode, prefill.tokens, COST, measured)
        assert predicted_ms == pytest.approx(prefill.layer_ms)
    longer_ms = prefill_layer_ms(decode, rows + 1, COST, measured)
    assert longer_ms >= prefill_layer_ms(decode, rows, COST, measured) - 1e-9


@pytest.mark.parametrize(
    "bad", [{"uptime_s": -1.0}, {"losses": -1}, {"client_rtt_ms": float("nan")}, {"uplink_mbps": 0.0}]
)
def test_impossible_observations_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        PeerObservation(**bad)  # type: ignore[arg-type]
    assert set(bad) <= {field.name for field in fields(PeerObservation)}


@pytest.mark.parametrize("prompt", [0, 11])
def test_a_prompt_must_be_a_part_of_the_session(prompt: int) -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        plan(snapshot_of(peer("a", (0, 8))), 10, prompt_tokens=prompt)
