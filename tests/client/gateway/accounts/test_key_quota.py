"""What a gateway has leased of a key's quota: spent without asking, and given back; gateways side by side keep one."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.gateway.accounts.api_keys import ApiKey, KeyLimits, KeyScope
from molink.client.gateway.accounts.errors import (
    AccountsUnavailable,
    DemandTooLarge,
    OutcomeUnknown,
    QuotaExceeded,
)
from molink.client.gateway.accounts.key_quota import KeyQuota, duration
from molink.client.gateway.accounts.quota_levels import (
    Exchange,
    Exchanged,
    QuotaKind,
    QuotaLevel,
    exchanged,
)
from molink.client.gateway.accounts.quotas import Quotas

NOW_S = 1_000_000.0
DEADLINE_S = 120.0


class Ledger:
    """The database's side in memory: no time passes there, so that nothing is refilled."""

    def __init__(self) -> None:
        self.levels: Mapping[QuotaKind, QuotaLevel] = {}
        self.streams: dict[str, int] = {}
        self.asked = 0
        self.fails = False
        self.asks = asyncio.Event()
        """Set when somebody asks."""
        self.answers = asyncio.Event()
        self.answers.set()
        """Cleared by a test: who asks waits."""
        self.commits = asyncio.Event()
        """Set when what somebody asked for is done."""
        self.confirms = asyncio.Event()
        self.confirms.set()
        """Cleared by a test: who asks waits though it is done."""
        self.is_silent = False
        """Set by a test: who asks is not told that it is done."""

    def of(self, gateway: str) -> "LedgerOfGateway":
        return LedgerOfGateway(self, gateway)


class LedgerOfGateway:
    def __init__(self, ledger: Ledger, gateway: str) -> None:
        self._ledger = ledger
        self._gateway = gateway

    async def exchange(self, quota_id: str, limits: KeyLimits, asked: Exchange) -> Exchanged:
        assert quota_id == "k"
        await asyncio.sleep(0)
        ledger = self._ledger
        ledger.asked += 1
        ledger.asks.set()
        await ledger.answers.wait()
        if ledger.fails:
            raise AccountsUnavailable("gone")
        elsewhere = sum(held for gateway, held in ledger.streams.items() if gateway != self._gateway)
        done = exchanged(limits, ledger.levels, asked, elsewhere, NOW_S)
        ledger.levels = done.levels
        ledger.streams[self._gateway] = done.streams
        ledger.commits.set()
        await ledger.confirms.wait()
        if ledger.is_silent:
            raise OutcomeUnknown("silent")
        await asyncio.sleep(0)
        return done


def key(**limits: int) -> ApiKey:
    return ApiKey(
        id="k", name="", digest=b"", scopes=frozenset(KeyScope), limits=KeyLimits(**limits), quota_id="k",
        created_at_s=0.0,
    )  # fmt: skip


async def admitted(quotas: Quotas, one: ApiKey, count: int, tokens: int = 0, streams: int = 1) -> int:
    """How many of so many requests at once are let in."""
    done = await asyncio.gather(
        *(quotas.take(one, tokens, streams) for _ in range(count)), return_exceptions=True
    )
    assert all(
        error is None or not isinstance(error, Exception) or isinstance(error, QuotaExceeded)
        for error in done
    )
    return sum(not isinstance(one, Exception) for one in done)


@pytest.mark.parametrize("gateways", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 7, 10, 100])
@pytest.mark.anyio
async def test_gateways_side_by_side_let_in_as_many_requests_as_a_key_may_send(
    gateways: int, limit: int
) -> None:
    ledger = Ledger()
    several = [Quotas(ledger.of(str(number))) for number in range(gateways)]
    one = key(requests_per_minute=limit)
    let_in = 0
    for _ in range(limit):
        for quotas in several:
            let_in += await admitted(quotas, one, 2)
    assert let_in == limit


@pytest.mark.anyio
async def test_one_key_on_many_connections_has_one_quota() -> None:
    quotas = Quotas(Ledger().of("a"))
    assert await admitted(quotas, key(requests_per_minute=50), 500) == 50


@pytest.mark.anyio
async def test_tokens_are_reserved_whole_and_what_was_not_generated_is_given_back() -> None:
    quotas, one = Quotas(Ledger().of("a")), key(tokens_per_minute=100)
    first = await quotas.take(one, 80, 1)
    with pytest.raises(QuotaExceeded, match="tokens a minute") as refused:
        await quotas.take(one, 80, 1)
    assert refused.value.kind == "tokens"
    assert 0 < refused.value.retry_after_s <= 60
    assert first is not None
    first.settle(15)
    second = await quotas.take(one, 80, 1)
    assert second is not None
    second.settle(80)
    with pytest.raises(QuotaExceeded):
        await quotas.take(one, 80, 1)


@pytest.mark.anyio
async def test_a_prompt_that_was_underestimated_is_owed() -> None:
    quotas, one = Quotas(Ledger().of("a")), key(tokens_per_minute=100)
    taken = await quotas.take(one, 10, 1)
    assert taken is not None
    taken.settle(100)
    with pytest.raises(QuotaExceeded):
        await quotas.take(one, 10, 1)


@pytest.mark.anyio
async def test_streams_are_counted_while_they_last_and_over_all_gateways() -> None:
    ledger, one = Ledger(), key(streams=3)
    here, there = Quotas(ledger.of("a")), Quotas(ledger.of("b"))
    taken = [await here.take(one, 0, 2), await there.take(one, 0, 1)]
    for quotas in (here, there):
        with pytest.raises(QuotaExceeded, match="as many generations under way") as refused:
            await quotas.take(one, 0, 1)
        assert refused.value.kind == "streams"
    for one_taken in taken:
        assert one_taken is not None
        one_taken.settle(0)
    await there.end()
    assert await here.take(one, 0, 3) is not None


@pytest.mark.parametrize(("tokens", "streams", "parameter"), [(101, 1, "max_tokens"), (10, 4, "n")])
@pytest.mark.anyio
async def test_what_could_never_be_granted_is_refused_for_good(
    tokens: int, streams: int, parameter: str
) -> None:
    with pytest.raises(DemandTooLarge) as refused:
        await Quotas(Ledger().of("a")).take(key(tokens_per_minute=100, streams=3), tokens, streams)
    assert refused.value.parameter == parameter


@pytest.mark.anyio
async def test_while_a_slice_lasts_the_database_is_not_asked() -> None:
    ledger, one = Ledger(), key(requests_per_minute=8000, tokens_per_minute=8_000_000)
    quotas = Quotas(ledger.of("a"))
    await quotas.take(one, 100, 1)
    asked = ledger.asked
    ledger.fails = True
    assert await admitted(quotas, one, 400, tokens=100) == 400
    assert ledger.asked == asked


@pytest.mark.anyio
async def test_who_is_refused_does_not_have_the_database_asked_again_and_again() -> None:
    ledger, one = Ledger(), key(requests_per_minute=2)
    quotas = Quotas(ledger.of("a"))
    assert await admitted(quotas, one, 1000) == 2
    assert ledger.asked < 10


@pytest.mark.anyio
async def test_without_the_database_only_what_is_leased_is_spent() -> None:
    ledger, one = Ledger(), key(requests_per_minute=80)
    quotas = Quotas(ledger.of("a"))
    await quotas.take(one, 0, 1)
    ledger.fails = True
    leased = int(80 - ledger.levels[QuotaKind.REQUESTS].left)
    assert await admitted(quotas, one, leased - 1) == leased - 1
    with pytest.raises(AccountsUnavailable):
        await quotas.take(one, 0, 1)


@pytest.mark.anyio
async def test_at_the_end_everything_is_given_back() -> None:
    ledger, one = Ledger(), key(requests_per_minute=80, tokens_per_day=800, streams=8)
    quotas = Quotas(ledger.of("a"))
    taken = await quotas.take(one, 100, 2)
    assert taken is not None
    taken.settle(30)
    await quotas.end()
    assert {kind: level.left for kind, level in ledger.levels.items()} == {
        QuotaKind.REQUESTS: 79,
        QuotaKind.DAY_TOKENS: 770,
    }
    assert ledger.streams == {"a": 0}


@pytest.mark.anyio
async def test_at_the_end_what_is_leased_ahead_at_that_moment_keeps_nothing_from_being_given_back() -> None:
    ledger, one = Ledger(), key(tokens_per_day=8000, streams=8)
    quotas = Quotas(ledger.of("a"))
    taken = await quotas.take(one, 900, 2)
    assert taken is not None
    ledger.answers.clear()
    ledger.asks.clear()
    async with asyncio.timeout(DEADLINE_S):
        await ledger.asks.wait()  # for the next slice
    taken.settle(10)
    ending = asyncio.create_task(quotas.end())
    await asyncio.sleep(0)
    ledger.answers.set()
    await ending
    assert ledger.levels[QuotaKind.DAY_TOKENS].left == 7990
    assert ledger.streams == {"a": 0}


@pytest.mark.anyio
async def test_what_lies_idle_goes_back_and_what_is_under_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molink.client.gateway.accounts.key_quota.RETURNS_AFTER_S", -1.0)
    ledger = Ledger()
    quota = KeyQuota("k", KeyLimits(tokens_per_minute=800, streams=40), ledger.of("a"))
    await quota.take({QuotaKind.TOKENS: 10}, 2)
    assert ledger.levels[QuotaKind.TOKENS].left == 700
    assert ledger.streams["a"] > 2
    await quota.tend()
    assert ledger.levels[QuotaKind.TOKENS].left == 790
    assert ledger.streams["a"] == 2
    assert not quota.is_idle
    quota.give_back({QuotaKind.TOKENS: 10}, 2)
    await quota.tend()
    assert ledger.levels[QuotaKind.TOKENS].left == 800
    assert ledger.streams["a"] == 0
    assert quota.is_idle


async def cancelled_once_done(ledger: Ledger, work: Coroutine[Any, Any, None]) -> None:
    """Cancels work after what it asks for is done, and before it is told so."""
    ledger.commits.clear()
    ledger.confirms.clear()
    working = asyncio.create_task(work)
    async with asyncio.timeout(DEADLINE_S):
        await ledger.commits.wait()
        working.cancel()
        await asyncio.sleep(0)
        ledger.confirms.set()
        with pytest.raises(asyncio.CancelledError):
            await working


@pytest.mark.anyio
async def test_whoever_is_cancelled_as_a_slice_goes_back_does_not_give_it_back_again() -> None:
    ledger = Ledger()
    quota = KeyQuota("k", KeyLimits(tokens_per_day=8000), ledger.of("a"))
    other = KeyQuota("k", KeyLimits(tokens_per_day=8000), ledger.of("b"))
    await other.take({QuotaKind.DAY_TOKENS: 5000}, 1)
    await quota.take({QuotaKind.DAY_TOKENS: 10}, 1)
    await cancelled_once_done(ledger, quota.tend(ends=True))
    await quota.tend(ends=True)
    await other.tend(ends=True)
    assert ledger.levels[QuotaKind.DAY_TOKENS].left == 8000 - 5010


@pytest.mark.anyio
async def test_what_was_granted_to_somebody_who_was_cancelled_is_the_next_ones() -> None:
    ledger = Ledger()
    quota = KeyQuota("k", KeyLimits(tokens_per_day=8000), ledger.of("a"))
    await cancelled_once_done(ledger, quota.take({QuotaKind.DAY_TOKENS: 10}, 1))
    ledger.fails = True
    await quota.take({QuotaKind.DAY_TOKENS: 10}, 1)
    ledger.fails = False
    await quota.tend(ends=True)
    assert ledger.levels[QuotaKind.DAY_TOKENS].left == 8000 - 10


@pytest.mark.parametrize("beyond", [0, 3000])
@pytest.mark.anyio
async def test_what_may_have_gone_back_or_been_charged_is_not_given_back_or_charged_again(
    beyond: int,
) -> None:
    ledger = Ledger()
    quota = KeyQuota("k", KeyLimits(tokens_per_day=8000), ledger.of("a"))
    other = KeyQuota("k", KeyLimits(tokens_per_day=8000), ledger.of("b"))
    await other.take({QuotaKind.DAY_TOKENS: 2000}, 1)
    await quota.take({QuotaKind.DAY_TOKENS: 10}, 1)
    quota.give_back({QuotaKind.DAY_TOKENS: -beyond}, 0)
    ledger.is_silent = True
    with pytest.raises(AccountsUnavailable):
        await quota.tend(ends=True)
    ledger.is_silent = False
    await quota.tend(ends=True)
    await other.tend(ends=True)
    assert ledger.levels[QuotaKind.DAY_TOKENS].left == 8000 - 2010 - beyond


steps = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["take", "settle", "tend", "end"]), st.integers(1, 60)),
    max_size=30,
)


@given(st.integers(1, 100), steps)
def test_whatever_gateways_do_no_more_tokens_are_reserved_than_there_are(
    limit: int, moves: list[tuple[int, str, int]]
) -> None:
    asyncio.run(move_by_move(limit, moves))


async def move_by_move(limit: int, moves: list[tuple[int, str, int]]) -> None:
    ledger = Ledger()
    gateways = [
        KeyQuota("k", KeyLimits(tokens_per_minute=limit), ledger.of(str(number))) for number in range(2)
    ]
    held: list[list[int]] = [[], []]
    used = 0
    for number, move, amount in moves:
        quota = gateways[number]
        if move == "take":
            try:
                await quota.take({QuotaKind.TOKENS: amount}, 1)
            except QuotaExceeded:
                continue
            held[number].append(amount)
        elif move == "settle" and held[number]:
            reserved = held[number].pop()
            spent = min(amount, reserved)
            used += spent
            quota.give_back({QuotaKind.TOKENS: reserved - spent}, 1)
        elif move in ("tend", "end"):
            await quota.tend(ends=move == "end")
        assert used + sum(map(sum, held)) <= limit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0114, "12ms"), (8.642, "8.642s"), (60, "1m0s"), (360, "6m0s"), (7322.5, "2h2m3s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
