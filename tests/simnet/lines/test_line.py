"""When bytes leave an emulated line: pure, so every property is checked on random arrivals."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.simnet.lines.line import LEAST_QUEUE_BYTES, Line

ARRIVALS = st.lists(
    st.tuples(st.floats(0, 0.05), st.integers(0, 40_000)), min_size=1, max_size=60
)  # pause before it in seconds, bytes
RATES = st.floats(0.5, 2000)
CLOSE = 1e-9


def run(
    line: Line[int], arrivals: list[tuple[float, int]], looks: list[float] = (0.0,)
) -> tuple[list[float], list[tuple[int, float]]]:
    """Offers items 0, 1, 2..., looking at the line late by each of `looks` in turn. Times of coming, and departures."""
    came, left, now_s = [], [], 0.0
    for index, (pause_s, size) in enumerate(arrivals):
        now_s += pause_s
        line.offer(index, size, now_s)
        came.append(now_s)
        left += line.depart(now_s - looks[index % len(looks)])
    return came, left + line.depart(math.inf)


@given(ARRIVALS, RATES)
def test_everything_arrives_once_and_in_order(arrivals: list[tuple[float, int]], rate: float) -> None:
    line: Line[int] = Line(rate, 15)
    _, left = run(line, arrivals)
    assert [item for item, _ in left] == list(range(len(arrivals)))
    assert [there_s for _, there_s in left] == sorted(there_s for _, there_s in left)
    counters = line.counters()
    assert counters.sent_bytes == sum(size for _, size in arrivals)
    assert counters.chunks == len(arrivals)
    assert counters.waiting_bytes == line.waiting_bytes == 0


@given(ARRIVALS, RATES, st.floats(0, 100))
def test_each_departure_follows_from_the_one_before(
    arrivals: list[tuple[float, int]], rate: float, delay_ms: float
) -> None:
    came, left = run(Line(rate, delay_ms), arrivals)
    free_s = 0.0
    for came_s, (_, size), (_, there_s) in zip(came, arrivals, left, strict=True):
        free_s = max(free_s, came_s) + size / (rate * 125_000)
        assert there_s == pytest.approx(free_s + delay_ms / 1000, abs=CLOSE)


@given(ARRIVALS, RATES, st.lists(st.floats(0, 0.2), min_size=1, max_size=5))
def test_looking_late_changes_no_departure(
    arrivals: list[tuple[float, int]], rate: float, looks: list[float]
) -> None:
    assert run(Line(rate, 15), arrivals)[1] == run(Line(rate, 15), arrivals, looks)[1]


@given(ARRIVALS, RATES)
def test_utilisation_is_never_above_one_in_any_stretch(
    arrivals: list[tuple[float, int]], rate: float
) -> None:
    line: Line[int] = Line(rate)
    came, left = run(line, arrivals)
    ends = [there_s for _, there_s in left]
    for first in range(len(ends)):
        sent = 0
        for last in range(first, len(ends)):
            sent += arrivals[last][1]
            begin_s = came[first] if first == 0 else max(came[first], ends[first - 1])
            assert sent / (rate * 125_000) <= ends[last] - begin_s + CLOSE
    counters = line.counters()
    assert counters.busy_s <= ends[-1] - came[0] + CLOSE
    assert counters.busy_s == pytest.approx(counters.sent_bytes / (rate * 125_000))


@given(ARRIVALS, RATES)
def test_a_line_is_never_idle_while_something_waits(arrivals: list[tuple[float, int]], rate: float) -> None:
    line: Line[int] = Line(rate)
    came, left = run(line, arrivals)
    waits = [
        there_s - size / (rate * 125_000) - came_s
        for came_s, (_, size), (_, there_s) in zip(came, arrivals, left, strict=True)
    ]
    assert line.counters().queueing_s == pytest.approx(sum(waits), abs=1e-6)
    for (_, before_s), wait_s, came_s in zip(left, waits[1:], came[1:], strict=False):
        assert wait_s == pytest.approx(max(0.0, before_s - came_s), abs=CLOSE)


@given(RATES, RATES, st.integers(1, 10), st.floats(0.01, 0.99))
def test_another_rate_holds_for_what_has_not_left_yet(
    before: float, after: float, count: int, part: float
) -> None:
    line: Line[int] = Line(before)
    size = 10_000
    for index in range(count):
        line.offer(index, size, 0.0)
    changed_s = part * count * size / (before * 125_000)
    left = line.depart(changed_s)
    line.set_rate(after, changed_s)
    left += line.depart(math.inf)
    assert [item for item, _ in left] == list(range(count))
    rest = count * size - changed_s * before * 125_000
    assert left[-1][1] == pytest.approx(changed_s + rest / (after * 125_000))
    assert line.counters().busy_s == pytest.approx(left[-1][1])


@given(ARRIVALS, st.floats(0.1, 50), st.integers(0, 3))
def test_jitter_only_adds_up_to_its_size_keeps_order_and_is_repeatable(
    arrivals: list[tuple[float, int]], jitter_ms: float, seed: int
) -> None:
    _, plain = run(Line(100, 15), arrivals)
    _, shaken = run(Line(100, 15, jitter_ms, seed=seed), arrivals)
    for (_, without_s), (_, with_s) in zip(plain, shaken, strict=True):
        assert -CLOSE <= with_s - without_s <= jitter_ms / 1000 + CLOSE
    assert all(one_s <= next_s + CLOSE for (_, one_s), (_, next_s) in pairwise(shaken))
    assert shaken == run(Line(100, 15, jitter_ms, seed=seed), arrivals)[1]


@given(RATES, st.floats(0, 500))
def test_a_line_is_full_at_its_queue_and_says_when_it_will_have_room(rate: float, queue_ms: float) -> None:
    line: Line[int] = Line(rate, queue_ms=queue_ms)
    assert line.limit_bytes >= LEAST_QUEUE_BYTES
    while not line.full:
        line.offer(0, 4096, 0.0)
    assert line.waiting_bytes < line.limit_bytes + 4096
    roomy_s = line.roomy_s(0.9)
    line.depart(roomy_s)
    assert line.waiting_bytes <= 0.9 * line.limit_bytes + 4096
    assert not line.full or line.limit_bytes - 0.9 * line.limit_bytes < 4096


def test_an_unlimited_line_only_delays() -> None:
    line: Line[str] = Line(delay_ms=20)
    line.offer("all", 10**9, 1.0)
    assert line.depart(1.0) == [("all", 1.02)]


@pytest.mark.parametrize("wrong", [0, -1, math.nan])
def test_a_rate_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Line(wrong)
    with pytest.raises(ValueError, match="above 0"):
        Line(1).set_rate(wrong, 0.0)


@pytest.mark.parametrize("name", ["delay_ms", "jitter_ms", "queue_ms"])
@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan])
def test_what_is_no_time_is_refused(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Line(100, **{name: wrong})
