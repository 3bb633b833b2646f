"""How often a peer speaks."""

from hypothesis import given
from hypothesis import strategies as st

from molink.dht.membership.neighbours import MAX_LINKS
from molink.dht.membership.timing import (
    ANTI_ENTROPY_BUDGET_BITS_PER_S,
    ANTI_ENTROPY_COST_BITS,
    CHANGED_FACTS_BITS_PER_S,
    FACTS_COST_BITS,
    LEAST_STATES_BITS_PER_S,
    NEWS_AVERAGED_S,
    NEWS_BUDGET_BITS_PER_S,
    PUSH_BITS_PER_S,
    STATE_COST_BITS,
    DiscoveryTiming,
    NewsRate,
    TokenBucket,
    announcement_interval_s,
    anti_entropy_interval_s,
    change_burst,
    change_spacing_s,
    facts_burst,
    facts_interval_s,
    facts_spacing_s,
    facts_ttl_s,
    ihave_interval_s,
    ihave_slowdown,
    state_ttl_s,
)
from molink.dht.records.bounds import MAX_TTL_S

swarms = st.integers(1, 20_000)
TIMING = DiscoveryTiming()


@given(swarms)
def test_where_nobody_comes_or_goes_a_peer_stays_within_32_kbit_a_second_at_any_size(peers: int) -> None:
    states = peers * STATE_COST_BITS / announcement_interval_s(peers)
    facts = peers * FACTS_COST_BITS / 2 / facts_interval_s(peers)
    repair = peers * ANTI_ENTROPY_COST_BITS / anti_entropy_interval_s(peers)
    frames = 3 * MAX_LINKS * 98 * 8 / ihave_interval_s(states)
    assert repair <= ANTI_ENTROPY_BUDGET_BITS_PER_S + 1
    assert states + facts + repair + frames <= 32_000


@given(swarms, st.floats(0.0, NEWS_BUDGET_BITS_PER_S - LEAST_STATES_BITS_PER_S))
def test_all_peers_together_settle_on_what_arrivals_and_changes_leave_of_the_budget(
    peers: int, others: float
) -> None:
    interval_s = announcement_interval_s(peers)
    for _ in range(20):
        news = others + peers * STATE_COST_BITS / interval_s
        interval_s = announcement_interval_s(peers, news, interval_s)
    assert others + peers * STATE_COST_BITS / interval_s <= NEWS_BUDGET_BITS_PER_S * 1.001


@given(swarms, st.floats(0.0, 1e7), st.floats(17.0, 1e6))
def test_however_much_there_is_to_tell_states_are_repeated(peers: int, news: float, before_s: float) -> None:
    interval_s = announcement_interval_s(peers, news, before_s)
    assert 17.0 <= interval_s <= max(17.0, peers * STATE_COST_BITS / LEAST_STATES_BITS_PER_S)
    assert 3 * interval_s <= state_ttl_s(interval_s, TIMING.jitter) <= MAX_TTL_S
    assert 3 * facts_interval_s(peers) <= facts_ttl_s(facts_interval_s(peers)) <= MAX_TTL_S


def test_the_dead_of_a_small_swarm_are_forgotten_within_a_minute() -> None:
    for news in (0.0, 1e6):
        assert announcement_interval_s(25, news, 17.0) == TIMING.interval_s
    assert state_ttl_s(TIMING.interval_s, TIMING.jitter) <= 60


@given(swarms, st.floats(0.0, 1e6), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60))
def test_changes_go_out_in_short_bursts_and_slowly_in_the_long_run(
    peers: int, news: float, waits: list[float]
) -> None:
    spacing_s = change_spacing_s(peers, announcement_interval_s(peers, news))
    burst = change_burst(TIMING, news)
    pace, now, spent = TokenBucket(float(burst), 0.0), 0.0, 0
    for wait_s in waits:
        now += wait_s
        pace = pace.refilled(now, TIMING, spacing_s, burst)
        if pace.wait_s(TIMING, spacing_s) == 0.0:
            pace, spent = pace.spend(), spent + 1
    assert spent <= burst + now / max(spacing_s, TIMING.change_gap_s) + 1e-6


@given(swarms)
def test_in_the_long_run_changes_take_no_more_than_the_budget(peers: int) -> None:
    spacing_s = max(TIMING.change_gap_s, change_spacing_s(peers, announcement_interval_s(peers)))
    assert peers * STATE_COST_BITS / spacing_s <= NEWS_BUDGET_BITS_PER_S + 1
    if peers > 1:
        assert peers * FACTS_COST_BITS / 2 / facts_spacing_s(peers) <= CHANGED_FACTS_BITS_PER_S + 1


def test_where_the_budget_is_used_bursts_are_smaller_and_offers_rarer() -> None:
    quiet, busy = 0.0, 0.9 * NEWS_BUDGET_BITS_PER_S
    assert change_burst(TIMING, busy) < change_burst(TIMING, quiet)
    assert facts_burst(busy) < facts_burst(quiet)
    assert ihave_interval_s(quiet) < ihave_interval_s(busy) <= 5.0


def test_who_waits_as_told_may_speak() -> None:
    pace = TokenBucket(0.25, 10.0)
    wait_s = pace.wait_s(TIMING, 8.0)
    assert wait_s == 6.0
    assert pace.refilled(10.0 + wait_s, TIMING, 8.0, 4).wait_s(TIMING, 8.0) == 0.0


@given(st.floats(0.1, 10.0), st.floats(1.0, 1e4))
def test_news_are_counted_at_the_rate_at_which_they_come(gap_s: float, cost_bits: float) -> None:
    news, now = NewsRate(0.0, 0.0), 0.0
    while now < 5 * NEWS_AVERAGED_S:
        now += gap_s
        news = news.after(now, cost_bits)
    assert 0.9 * cost_bits / gap_s <= news.bits_per_s <= 1.1 * cost_bits / gap_s
    assert news.after(now + 10 * NEWS_AVERAGED_S).bits_per_s < news.bits_per_s / 1000


def test_many_links_are_offered_to_as_much_more_rarely_as_their_frames_cost_more() -> None:
    assert ihave_slowdown(1) == ihave_slowdown(MAX_LINKS) == 1.0
    assert ihave_slowdown(4 * MAX_LINKS) == 4.0


def test_records_are_pushed_only_where_there_are_few() -> None:
    assert not NewsRate(PUSH_BITS_PER_S / 4, 0.0).times(5.0).pushes
    assert NewsRate(0.0, 0.0).pushes
    assert not NewsRate(NEWS_BUDGET_BITS_PER_S / 2, 0.0).pushes
