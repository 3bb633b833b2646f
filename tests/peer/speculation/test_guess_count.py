"""How many guesses travel: as many as pay, none where engines are full, and never far from the best fixed number."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.pipelines import pipelines, roofline, stage

from molink.peer.scheduling.in_flight_rules import iteration_ms, molink
from molink.peer.scheduling.trip_load import BatchLoad, TripLoad
from molink.peer.speculation.guess_count import BYSTANDERS_WAIT, CircuitCosts, guess_count
from molink.peer.speculation.session_guesses import Guess, SessionGuesses
from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage
from molink.simnet.core.generations import GenerationTape

MOST = 8
chances = st.lists(st.floats(0, 1), max_size=MOST)
batch_loads = st.integers(1, 32).flatmap(
    lambda rows: st.builds(BatchLoad, st.just(rows), st.floats(1, 100), st.integers(0, rows - 1))
)
loads = st.builds(
    TripLoad,
    st.none() | batch_loads,
    st.lists(batch_loads, max_size=4).map(tuple),
    st.floats(0, 100),
    st.booleans(),
    st.floats(1, 8),
)


@given(chances, pipelines(), loads)
def test_what_travels_is_among_what_was_guessed(
    right: list[float], stages: list[PipelineStage], load: TripLoad
) -> None:
    assert 0 <= guess_count(right, CircuitCosts(stages), load) <= len(right)


@given(chances, pipelines())
def test_alone_no_other_number_is_predicted_to_bring_a_token_sooner(
    right: list[float], stages: list[PipelineStage]
) -> None:
    costs = CircuitCosts(stages)
    expected = [1.0]
    together = 1.0
    for one in right:
        together *= one
        expected.append(expected[-1] + together)
    times = [costs.trip_ms(1 + guesses) / expected[guesses] for guesses in range(len(right) + 1)]
    assert times[guess_count(right, costs)] == min(times)


@given(pipelines(), st.integers(1, 16), st.integers(1, 4))
def test_a_trip_takes_what_the_rule_for_micro_batches_predicts(
    stages: list[PipelineStage], rows: int, batches: int
) -> None:
    predicted = CircuitCosts(stages).trip_ms(rows, [rows] * (batches - 1))
    assert predicted == pytest.approx(iteration_ms(stages, rows * batches, batches))


@given(chances, pipelines(), loads)
def test_who_has_no_guesses_waits_a_tenth_longer_at_most_for_those_of_others(
    right: list[float], stages: list[PipelineStage], load: TripLoad
) -> None:
    costs = CircuitCosts(stages)
    load = replace(load, waited_ms=0.0, has_bystanders=True)
    longer_ms = (BYSTANDERS_WAIT - 1) / load.lengthens
    beside = load.beside or BatchLoad(0, 0.0)
    guesses = guess_count(right, costs, load)
    without_ms = costs.trip_ms(beside.sessions + 1, [one.sessions for one in load.others])
    with_ms = costs.trip_ms(beside.rows + 1 + guesses, [one.rows for one in load.others])
    assert not guesses or with_ms <= (1 + longer_ms) * without_ms * (1 + 1e-9)


def test_who_has_no_guesses_lets_fewer_travel_where_they_lengthen_a_trip() -> None:
    near = CircuitCosts([stage(1.0, 0.2, link_ms=5)] * 3)
    seven = BatchLoad(7, 7.0)
    alike, beside = (TripLoad(seven, has_bystanders=one) for one in (False, True))
    assert guess_count([0.9] * 8, near, alike) > guess_count([0.9] * 8, near, beside) > 0


@given(chances, pipelines())
def test_guesses_that_are_never_right_do_not_travel(right: list[float], stages: list[PipelineStage]) -> None:
    assert guess_count([0.0] * len(right), CircuitCosts(stages)) == 0


def test_over_distance_even_unlikely_guesses_travel() -> None:
    far = CircuitCosts([stage(1.0, 0.01, link_ms=30)] * 3)
    assert guess_count([0.3, 0.3, 0.3], far) == 3


def test_a_thin_uplink_lets_few_guesses_travel() -> None:
    thin = CircuitCosts([stage(1.0, 0.01, link_ms=5, uplink_mbps=5)] * 3)
    wide = CircuitCosts([stage(1.0, 0.01, link_ms=5, uplink_mbps=1000)] * 3)
    assert guess_count([0.5] * 4, thin) < guess_count([0.5] * 4, wide) == 4


def test_where_sessions_fill_the_engines_nothing_is_guessed() -> None:
    full = CircuitCosts([stage(1.0, 1.0, link_ms=1)] * 3)
    assert guess_count([0.6] * 4, full, TripLoad(BatchLoad(7, 7), (BatchLoad(8, 8),) * 3)) == 0
    assert guess_count([0.6] * 4, CircuitCosts([stage(1.0, 1.0, link_ms=100)] * 3)) > 0


def test_where_guesses_were_seen_to_lengthen_trips_more_than_predicted_fewer_travel() -> None:
    costs = CircuitCosts([stage(2.0, 0.5, link_ms=10)] * 3)
    seven = BatchLoad(7, 7.0)
    for has_bystanders in (False, True):
        loads = (TripLoad(seven, has_bystanders=has_bystanders, lengthens=times) for times in (1, 2, 8))
        counts = [guess_count([0.8] * 8, costs, load) for load in loads]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] < counts[0]


def test_the_time_that_guesses_take_their_head_counts_and_that_for_others_who_wait_for_it_too() -> None:
    far = CircuitCosts([stage(1.0, 0.01, link_ms=30)] * 3)
    alone = [guess_count([0.6] * 8, far, guess_ms=taken_ms) for taken_ms in (0.0, 1.0, 10.0, 100.0)]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] == 8 > alone[-1] == 0
    # where many sessions travel together each guess makes all of them wait
    beside = TripLoad(BatchLoad(15, 15.0, guessing_ms=30.0))
    assert guess_count([0.6] * 8, far, beside, 2.0) < guess_count([0.6] * 8, far, guess_ms=2.0)
    # and where a head guesses all the time there is none to guess more in
    busy = TripLoad(others=(BatchLoad(4, 4.0, guessing_ms=60.0),) * 3)
    idle = TripLoad(others=(BatchLoad(4, 4.0),) * 3)
    assert guess_count([0.6] * 8, far, busy, 5.0) < guess_count([0.6] * 8, far, idle, 5.0)


def test_trips_that_wait_for_engines_of_others_guess_less() -> None:
    costs = CircuitCosts([stage(2.0, 0.5, link_ms=10)] * 3)
    counts = [
        guess_count([0.7, 0.5, 0.3, 0.3], costs, TripLoad(waited_ms=waited)) for waited in (0, 50, 5000)
    ]
    assert counts[0] > 0
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


@dataclass(slots=True)
class _Session:
    """One that generates a recorded text."""

    guesses: SessionGuesses
    tape: GenerationTape
    generated: int = 0
    proposed: tuple[int, ...] = ()
    expected: float = 1.0
    """Tokens of the trip on its way."""


Chooser = Callable[[_Session, TripLoad, CircuitCosts], Sequence[Guess]]


def automatic(session: _Session, load: TripLoad, costs: CircuitCosts) -> Sequence[Guess]:
    found = session.guesses.candidates(MOST)
    return found[: guess_count([one.chance for one in found], costs, load)]


def always(number: int) -> Chooser:
    def chosen(session: _Session, load: TripLoad, costs: CircuitCosts) -> Sequence[Guess]:
        return session.guesses.candidates(number)

    return chosen


def token_ms(stages: Sequence[PipelineStage], sessions: int, temperature: float, choose: Chooser) -> float:
    """The mean time per output token of sessions that go round a circuit together, event by event.

    Stages have a device and an uplink each, first come, first served. Sessions travel in as many micro-batches as the
    rule says, and each generates another recorded text.
    """
    costs = CircuitCosts(stages)
    there = [
        _Session(SessionGuesses(drawing=tape.drawing()), tape)
        for tape in [GenerationTape(number, temperature) for number in range(sessions)]
    ]
    for one in there:
        one.guesses.extend(one.tape.prompt)
    batches = [there[number :: molink(stages, sessions, 64).micro_batches] for number in range(sessions)]
    batches = [one for one in batches if one]
    order = count()
    events = [(0.0, next(order), batch, 0) for batch in range(len(batches))]
    free_ms = [0.0] * (2 * len(stages))
    rows = [0] * len(batches)
    now_ms = 0.0
    while sum(one.generated for one in there) < TOKENS * sessions:
        now_ms, _, batch, resource = heapq.heappop(events)
        if resource == 0:
            rows[batch] = 0
            others = [load_of(one) for one, size in zip(batches, rows, strict=True) if size]
            begin_trips(batches[batch], others, costs, choose)
            rows[batch] = sum(1 + len(one.proposed) for one in batches[batch])
        one = stages[resource // 2]
        device = resource % 2 == 0
        taken_ms = one.decode_ms(rows[batch]) + STEP_OVERHEAD_MS if device else one.transfer_ms(rows[batch])
        free_ms[resource] = max(now_ms, free_ms[resource]) + taken_ms
        after_ms = 0.0 if device else one.link_ms
        following = (resource + 1) % len(free_ms)
        heapq.heappush(events, (free_ms[resource] + after_ms, next(order), batch, following))
    return now_ms * sessions / sum(one.generated for one in there)


def load_of(sessions: Sequence[_Session]) -> BatchLoad:
    guesses = sum(len(one.proposed) for one in sessions)
    return BatchLoad(len(sessions) + guesses, sum(one.expected for one in sessions), guesses)


def begin_trips(
    batch: Sequence[_Session], others: Sequence[BatchLoad], costs: CircuitCosts, choose: Chooser
) -> None:
    """Ends the trips of a micro-batch's sessions, and decides their next ones, one after the other."""
    for one in batch:
        came = one.tape.tokens(one.generated, len(one.proposed) + 1)
        right = next((n for n, token in enumerate(one.proposed) if token != came[n]), len(one.proposed))
        one.guesses.extend(came[: right + 1])
        one.generated += right + 1
        one.proposed, one.expected = (), 1.0
    for one in batch:
        beside = [other for other in batch if other is not one]
        chosen = choose(one, TripLoad(load_of(beside) if beside else None, tuple(others)), costs)
        one.proposed = tuple(guess.token_id for guess in chosen)
        one.expected += sum(accumulate((guess.chance for guess in chosen), mul))


TOKENS = 60
SETTINGS = {
    "loopback, 1 session": ([stage(1.2, 0.15)] * 3, 1, 0.0),
    "loopback, 32 sessions": ([stage(1.2, 0.3)] * 3, 32, 0.0),
    "15 ms, 4 sessions": ([roofline(8.0, 0.4, 8, link_ms=15, uplink_mbps=100)] * 3, 4, 0.0),
    "30 ms, 1 session, sampled": ([stage(4.0, 0.1, link_ms=30, uplink_mbps=100)] * 3, 1, 0.8),
    "30 ms, 16 sessions": ([roofline(12.0, 0.5, 16, link_ms=30, uplink_mbps=50)] * 8, 16, 0.0),
    "100 ms, 32 sessions, sampled": ([roofline(12.0, 0.5, 16, link_ms=100, uplink_mbps=50)] * 4, 32, 0.8),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_decision_per_trip_is_within_5_percent_of_the_best_fixed_number(setting: str) -> None:
    stages, sessions, temperature = SETTINGS[setting]
    fixed = {number: token_ms(stages, sessions, temperature, always(number)) for number in (0, 1, 2, 4, 8)}
    decided = token_ms(stages, sessions, temperature, automatic)
    assert decided <= 1.05 * min(fixed.values()), (decided, fixed)


@pytest.mark.full
def test_sessions_that_fill_the_engines_lose_no_throughput_to_guesses() -> None:
    for row_ms in (0.5, 1.0, 2.0):
        stages = [stage(1.0, row_ms, link_ms=1, uplink_mbps=1000)] * 3
        off, auto = (token_ms(stages, 32, 0.8, one) for one in (always(0), automatic))
        assert off / auto >= 0.98, (off, auto)
