"""Whoever asks a draft is answered once, and in time, whatever its thread does."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, until

from molink.peer.drafting.draft_engine import DraftOrder, Guessed
from molink.peer.drafting.draft_thread import MOST_ORDERS, DraftThread
from molink.peer.speculation.told_draft import DraftTimes, ToldDraft
from molink.shards.spec import SamplingParams

SEQUENCES = 3


class StubEngine:
    """Guesses the length of each sequence, a place at a time, while its gate is open."""

    window_tokens = 100
    lacks = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.rests = False
        self.is_at_gate = False
        """Whether a step waits for the gate, or has been through it."""
        self.open_ones: set[int] = set()
        self.steps: list[list[int]] = []
        """Which sequences each step had."""
        self._waiting: dict[int, DraftOrder] = {}
        self._guessed: dict[int, Guessed] = {}

    def cache_bytes_of(self, sequences: int) -> int:
        return 10 * sequences

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def rest(self) -> None:
        self.rests = True

    def wake(self) -> None:
        self.rests = False

    def open(self, number: int, _: SamplingParams, __: int) -> None:
        self.open_ones.add(number)

    def close(self, number: int) -> None:
        self.open_ones.discard(number)
        self._waiting.pop(number, None)

    def take(self, order: DraftOrder) -> bool:
        if order.places:
            self._waiting[order.number], self._guessed[order.number] = order, ()
        return bool(order.places)

    def guess_next(self) -> list[tuple[int, int, Guessed]]:
        self.is_at_gate = True
        self.gate.wait(DEADLINE_S)
        self.steps.append(list(self._waiting))
        through = []
        for number, order in list(self._waiting.items()):
            self._guessed[number] += ((order.length, 0),)
            if len(self._guessed[number]) == order.places:
                del self._waiting[number]
                through.append((number, order.length, self._guessed[number]))
        return through


def thread_of(engine: Any, late_s: float = DEADLINE_S) -> DraftThread:  # noqa: ANN401 - a stand-in
    return DraftThread(engine, DraftTimes(0.1), SEQUENCES, late_s, DEADLINE_S)


def opened(thread: DraftThread, tokens: int = 5) -> ToldDraft:
    told = thread.open("client", SamplingParams(), 0)
    assert told is not None
    told.begin_with(range(tokens))
    return told


def told_tokens(told: ToldDraft) -> list[int]:
    chain, found = told.begin(), list[int]()
    while (guess := chain.guess()) is not None:
        found.append(guess[0])
        chain.follow(guess[0])
    return found


def counted(into: list[int], number: int) -> Callable[[], None]:
    return lambda: into.append(number)


@asynchronous
async def test_all_that_wait_are_in_one_step_and_each_is_answered_once() -> None:
    engine, answered = StubEngine(), list[int]()
    async with thread_of(engine) as thread:
        engine.gate.clear()
        drafts = [opened(thread, 5 + one) for one in range(SEQUENCES)]
        for one, told in enumerate(drafts):
            told.ask(2 + one, counted(answered, one))
        engine.gate.set()
        await until(lambda: len(answered) == SEQUENCES)
        assert [told_tokens(told) for told in drafts] == [[5] * 2, [6] * 3, [7] * 4]
        assert max(engine.steps, key=len) == [told.number for told in drafts]
        assert len(engine.steps) <= 5
    assert answered == [0, 1, 2]


@asynchronous
async def test_there_are_so_many_sequences_and_what_nobody_refers_to_makes_room() -> None:
    engine = StubEngine()
    async with thread_of(engine) as thread:
        drafts = [opened(thread) for _ in range(SEQUENCES)]
        assert thread.open("client", SamplingParams(), 0) is None
        drafts.pop()
        further = opened(thread)
        further.close()
        further.close()
        await until(lambda: engine.open_ones == {told.number for told in drafts})
        assert thread.cache_bytes == 30


@asynchronous
async def test_a_client_with_fewer_sequences_gets_the_latest_of_whoever_has_most() -> None:
    engine, answered = StubEngine(), list[int]()
    async with thread_of(engine) as thread:
        drafts = [opened(thread) for _ in range(SEQUENCES)]
        other = thread.open("another client", SamplingParams(), 0)
        assert other is not None
        assert [told.is_closed for told in drafts] == [False] * (SEQUENCES - 1) + [True]
        for client in ("client", "another client"):
            assert thread.open(client, SamplingParams(), 0) is None, "nobody would have fewer than before"
        await until(lambda: engine.open_ones == {told.number for told in (*drafts[:-1], other)})
        other.begin_with(range(7))
        other.ask(1, counted(answered, 1))
        await until(lambda: answered == [1])
        assert told_tokens(other) == [7]


@asynchronous
async def test_an_answer_that_comes_late_is_not_taken_for_that_of_what_has_been_asked_since() -> None:
    engine, answered = StubEngine(), list[int]()
    async with thread_of(engine, late_s=0.05) as thread:
        told = opened(thread)
        engine.gate.clear()
        told.ask(1, counted(answered, 1))
        await until(lambda: answered == [1])
        assert not thread.times.answers
        told.extend([9])
        assert told_tokens(told) == []
        thread.least_late_s = DEADLINE_S
        engine.gate.set()
        await until(lambda: thread.times.answers)
        assert told_tokens(told) == []
        told.ask(2, counted(answered, 2))
        await until(lambda: answered == [1, 2])
        assert told_tokens(told) == [6, 6]


@asynchronous
async def test_of_two_epochs_that_ask_one_after_the_other_both_are_answered() -> None:
    engine, answered = StubEngine(), list[int]()
    async with thread_of(engine) as thread:
        told = opened(thread)
        engine.gate.clear()
        told.ask(1, counted(answered, 1))
        told.extend([9])
        told.ask(2, counted(answered, 2))
        assert answered == [1]
        engine.gate.set()
        await until(lambda: answered == [1, 2])
        assert told_tokens(told) == [6, 6]


@asynchronous
async def test_who_waits_when_the_thread_ends_is_answered() -> None:
    engine, answered = StubEngine(), list[int]()
    async with thread_of(engine) as thread:
        told = opened(thread)
        engine.gate.clear()

        def answer() -> None:
            answered.append(1)
            engine.gate.set()

        told.ask(1, answer)
        await until(lambda: engine.is_at_gate)
    assert answered == [1]
    assert thread.open("client", SamplingParams(), 0) is None


@asynchronous
async def test_of_orders_that_it_does_not_take_no_more_wait_than_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, answered = StubEngine(), list[int]()
    with caplog.at_level(logging.WARNING):
        async with thread_of(engine) as thread:
            told = opened(thread)
            engine.gate.clear()
            told.ask(1, counted(answered, 1))
            await until(lambda: engine.is_at_gate)  # from now on it takes nothing
            for _ in range(2 * MOST_ORDERS):
                told.feed()
            assert thread.times.is_left_out
            engine.gate.set()
    assert answered == [1]
    assert [one.message for one in caplog.records if "left out" in one.message] == [
        "the draft model is left out until this peer starts again: it does not take what it is told"
    ]


@pytest.mark.full
@asynchronous
async def test_whatever_is_said_while_it_wakes_it_rests_if_that_was_said_last() -> None:
    engine = StubEngine()
    async with thread_of(engine) as thread:
        opened(thread)
        thread.rest("cpu")
        assert thread.open("client", SamplingParams(), 0) is None
        thread.wake()
        thread.rest("cpu")
        for _ in range(2):
            thread.wake()
        thread.rest("cpu")
        await until(lambda: engine.rests and thread.times.is_resting)
        thread.wake()
        await until(lambda: thread.times.answers and not engine.rests)
        opened(thread)
