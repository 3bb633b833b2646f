"""How often a peer speaks."""

from hypothesis import given
from hypothesis import strategies as st

from molink.dht.bounds import MAX_TTL_S
from molink.dht.gossip import MAX_LINKS
from molink.dht.timing import (
    FACTS_COST_BITS,
    REPAIR_COST_BITS,
    STATE_COST_BITS,
    DiscoveryTiming,
    Pace,
    announcement_interval_s,
    change_spacing_s,
    facts_interval_s,
    facts_ttl_s,
    repair_interval_s,
    state_ttl_s,
)

swarms = st.integers(1, 20_000)


@given(swarms)
def test_a_peer_stays_within_32_kbit_a_second_at_any_size(peers: int) -> None:
    states = peers * STATE_COST_BITS / min(announcement_interval_s(peers), max(change_spacing_s(peers), 0.5))
    steady = peers * STATE_COST_BITS / announcement_interval_s(peers)
    facts = peers * FACTS_COST_BITS / facts_interval_s(peers)
    repair = peers * REPAIR_COST_BITS / repair_interval_s(peers)
    keepalives = MAX_LINKS * 85 * 8 / DiscoveryTiming().keepalive_s
    assert steady + facts + repair + keepalives <= 32_000
    assert states <= 24_000 + 1


@given(swarms)
def test_an_announcement_outlives_two_that_are_lost(peers: int) -> None:
    timing = DiscoveryTiming()
    interval_s = announcement_interval_s(peers)
    assert 3 * interval_s <= state_ttl_s(interval_s, timing.jitter) <= MAX_TTL_S
    assert 3 * facts_interval_s(peers) <= facts_ttl_s(facts_interval_s(peers)) <= MAX_TTL_S


def test_the_dead_of_a_small_swarm_are_forgotten_within_a_minute() -> None:
    timing = DiscoveryTiming()
    assert announcement_interval_s(25) == timing.interval_s
    assert state_ttl_s(timing.interval_s, timing.jitter) <= 60


@given(swarms, st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60))
def test_changes_go_out_in_short_bursts_and_slowly_in_the_long_run(peers: int, waits: list[float]) -> None:
    timing = DiscoveryTiming()
    spacing_s = change_spacing_s(peers)
    pace, now, spent = Pace(float(timing.change_burst), 0.0), 0.0, 0
    for wait_s in waits:
        now += wait_s
        pace = pace.after(now, timing, spacing_s)
        if pace.wait_s(timing, spacing_s) == 0.0:
            pace, spent = pace.spent(), spent + 1
    assert spent <= timing.change_burst + now / max(spacing_s, timing.change_gap_s) + 1e-6


def test_who_waits_as_told_may_speak() -> None:
    timing = DiscoveryTiming()
    pace = Pace(0.25, 10.0)
    wait_s = pace.wait_s(timing, 8.0)
    assert wait_s == 6.0
    assert pace.after(10.0 + wait_s, timing, 8.0).wait_s(timing, 8.0) == 0.0
