"""Token buckets and the slices that are leased of them: whatever is asked, never more is granted than there is."""

from hypothesis import given
from hypothesis import strategies as st

from molink.client.gateway.accounts.api_keys import KeyLimits
from molink.client.gateway.accounts.quota_levels import (
    DAY_S,
    Exchange,
    Quota,
    QuotaKind,
    QuotaLevel,
    exchanged,
    full,
    quotas_of,
)

REQUESTS, TOKENS, DAY_TOKENS = QuotaKind
moves = st.lists(
    st.tuples(
        st.floats(-5, 90),  # seconds that pass by the clock of whoever asks next; clocks differ
        st.integers(0, 150),  # needed
        st.integers(0, 30),  # given back
    ),
    min_size=1,
    max_size=40,
)


@given(st.integers(1, 100), moves)
def test_a_bucket_grants_its_amount_and_what_was_refilled_and_no_more(
    amount: int, asked: list[tuple[float, int, int]]
) -> None:
    limits = KeyLimits(tokens_per_minute=amount)
    levels = {TOKENS: full(Quota(amount), 0.0)}
    now_s = latest_s = granted = 0.0
    for passed_s, need, unused in asked:
        now_s += passed_s
        latest_s = max(latest_s, now_s)
        returned = int(min(unused, granted))
        done = exchanged(
            limits, levels, Exchange(needs={TOKENS: need}, returned={TOKENS: returned}), 0, now_s
        )
        granted += done.granted.get(TOKENS, 0.0) - returned
        levels = dict(done.levels)
        assert granted <= amount + latest_s * amount / 60 + 1e-6
        assert levels[TOKENS].left <= amount


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 1000))
def test_what_is_needed_is_granted_whole_or_not_at_all(amount: int, need: int, left: float) -> None:
    level = QuotaLevel(min(left, amount), 0.0)
    limits = KeyLimits(requests_per_minute=amount)
    done = exchanged(limits, {REQUESTS: level}, Exchange(needs={REQUESTS: need}), 0, 0.0)
    if need <= level.left:
        assert need <= done.granted[REQUESTS] <= level.left
        assert done.granted[REQUESTS] == max(need, level.left // 8)
    else:
        assert done.granted == {}
    assert done.levels[REQUESTS].left == level.left - done.granted.get(REQUESTS, 0.0)


@given(st.integers(1, 1000), st.floats(-1000, 1000), st.integers(1, 2000))
def test_so_much_is_left_after_the_wait_and_not_before(amount: int, left: float, need: int) -> None:
    quota, level = Quota(amount), QuotaLevel(min(left, amount), 100.0)
    wait_s = level.wait_s(quota, need)
    assert level.at(quota, 100.0 + wait_s).left >= min(need, amount) - 1e-6
    if wait_s > 1e-6:
        assert level.at(quota, 100.0 + 0.9 * wait_s).left < min(need, amount)


def test_a_day_begins_anew_at_midnight_of_utc_and_not_bit_by_bit() -> None:
    quota = Quota(1000, DAY_S, at_once=True)
    spent = full(quota, 10 * DAY_S + 60).changed(quota, -1000)
    assert spent.at(quota, 11 * DAY_S - 1).left == 0
    assert spent.wait_s(quota, 1) == DAY_S - 60
    assert spent.at(quota, 11 * DAY_S).left == 1000
    assert QuotaLevel(-300.0, 10 * DAY_S).at(quota, 11 * DAY_S).left == 700


def test_a_clock_that_is_behind_refills_nothing_and_takes_nothing_back() -> None:
    quota, level = Quota(60), QuotaLevel(10.0, 100.0)
    assert level.at(quota, 40.0) == level
    assert level.at(quota, 40.0).at(quota, 101.0).left == 11


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.booleans()), max_size=40), st.integers(1, 12)
)
def test_gateways_together_never_hold_more_streams_than_a_key_may_have(
    asked: list[tuple[int, int, bool]], most: int
) -> None:
    held = [0, 0, 0]
    for gateway, streams, spare in asked:
        elsewhere = sum(held) - held[gateway]
        done = exchanged(
            KeyLimits(streams=most), {}, Exchange(streams=streams, spare_streams=spare), elsewhere, 0.0
        )
        held[gateway] = done.streams
        assert sum(held) <= most
        assert done.streams >= min(streams, most - elsewhere)


def test_what_was_spent_beyond_a_slice_is_owed_to_the_bucket() -> None:
    limits = KeyLimits(tokens_per_minute=60)
    owed = exchanged(limits, {TOKENS: QuotaLevel(10.0, 0.0)}, Exchange(returned={TOKENS: -40}), 0, 0.0)
    assert owed.levels[TOKENS].left == -30
    assert exchanged(limits, owed.levels, Exchange(needs={TOKENS: 1}), 0, 30.9).granted == {}
    assert exchanged(limits, owed.levels, Exchange(needs={TOKENS: 1}), 0, 31.0).granted == {TOKENS: 1}


def test_only_limits_that_are_set_are_quotas() -> None:
    assert quotas_of(KeyLimits(streams=3, models=("a",))) == {}
    assert quotas_of(KeyLimits(tokens_per_day=5)) == {DAY_TOKENS: Quota(5, DAY_S, at_once=True)}
