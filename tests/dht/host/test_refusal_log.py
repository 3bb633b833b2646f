"""Refusals are counted and told once a minute, whoever they come from and whatever they call themselves."""

import logging
import tracemalloc

import pytest

from molink.dht.refusals import INTERVAL_S, RefusalLog


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(clock: Clock) -> RefusalLog:
    return RefusalLog(logging.getLogger("molink.test"), clock)


def test_the_first_refusal_is_told_at_once(refusals: RefusalLog, caplog: pytest.LogCaptureFixture) -> None:
    refusals.refused("links", "203.0.113.9")
    assert caplog.messages == ["refused: 1 links from 203.0.113.9"]


def test_a_flood_makes_one_line_a_minute_that_counts_it(
    refusals: RefusalLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(130):
        clock.now = float(second)
        for _ in range(100):
            refusals.refused("links", "203.0.113.9")
    assert caplog.messages == [
        "refused: 1 links from 203.0.113.9",
        "refused within 60 s: 6000 links from 203.0.113.9",
        "refused within 60 s: 6000 links from 203.0.113.9",
    ]


def test_a_line_names_the_most_frequent_and_counts_the_others(
    refusals: RefusalLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.refused("links", "first")
    for number in range(10):
        for _ in range(number + 1):
            refusals.refused("links", f"stranger {number}")
    refusals.refused("tables", "last")
    clock.now = INTERVAL_S
    refusals.refused("tables", "last")
    assert caplog.messages[1] == (
        "refused within 60 s: 55 links from stranger 9 (10), stranger 8 (9), stranger 7 (8), others (28); "
        "2 tables from last"
    )


def test_free_names_cost_no_memory_without_end(
    refusals: RefusalLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tracemalloc.start()
    try:
        for number in range(10_000):
            refusals.refused(f"kind {number % 100}", f"peer {number}")
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 100_000  # ten bytes for each name would be as much
    clock.now = INTERVAL_S
    refusals.refused("links", "peer")
    kinds = caplog.messages[1].split(": ", 1)[1].split("; ")
    assert len(kinds) <= 17
    assert sum(int(part.split()[0]) for part in kinds) == 10_000


def test_what_a_terminal_would_obey_is_not_written(
    refusals: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.refused("links", "\x1b[2J\u202eevil\n" + "x" * 1000)
    assert caplog.messages == [f"refused: 1 links from ?[2J?evil?{'x' * 54}"]
