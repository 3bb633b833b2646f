"""What a head says to whoever guesses of what shares the circuit with a trip."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.swarms.hop_ring import core_of, session_of

from molink.peer.hop import events
from molink.peer.hop.session import HopSession
from molink.peer.scheduling.trip_load import NO_GUESSES, BatchLoad, TripBegun, TripLoad
from molink.shards.spec import Span

THREE = (("head", Span(0, 2)), ("middle", Span(2, 4)), ("tail", Span(4, 6)))
ONE = (("only", Span(0, 6)),)


class WatchedLoads:
    """A guesser that guesses nothing."""

    drafter = None

    def __init__(self) -> None:
        self.loads: list[TripLoad] = []

    def record_trip(self, tokens: Sequence[None], guessed: int) -> None:
        assert len(tokens) == 1 + guessed == 1

    def rests(self) -> bool:
        return False

    def propose(self, last: None, most: int, load: TripLoad) -> tuple[None, TripBegun]:  # noqa: ARG002 - as asked
        self.loads.append(load)
        return last, NO_GUESSES


@pytest.mark.parametrize("circuit", [THREE, ONE], ids=["three peers", "one peer"])
@pytest.mark.parametrize("guessed", [1, 2])
def test_a_guesser_is_told_whether_tokens_of_others_are_not_guessed(
    circuit: Sequence[tuple[str, Span]], guessed: int
) -> None:
    core, watched = core_of(circuit[0][0]), WatchedLoads()
    sessions = [session_of(number, circuit, 0) for number in (0, 1)]
    for session in sessions[:guessed]:
        session.progress.guesser = watched
    effects: list[events.HopEffect[HopSession, Any]] = []
    for session in sessions:
        core.handle(events.SessionOpened(session), 0.0)
        effects += core.handle(events.PromptStarted(session, 5, 0, range), 0.0)
    for _ in range(8):
        (begun,) = [one for one in effects if isinstance(one, events.ComputeBatch)]
        tokens = [
            (one.session, one.step, one.session.progress.history_tokens, False, None, None)
            for one in begun.steps
        ]
        if len(circuit) == 1:
            effects = [*core.handle(events.BatchComputed(begun.steps, tokens=tokens), 0.0)]
        else:
            effects = [*core.handle(events.BatchComputed(begun.steps), 0.0)]
            effects += core.handle(events.TokensReturned("tail", tokens), 0.0)
    assert watched.loads[-1] == TripLoad(BatchLoad(1, 1.0), has_bystanders=guessed == 1)
