"""A head's step waits for guesses that take time, alone: others go on, and whatever ends meanwhile leaves nothing."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.swarms.hop_ring import core_of, session_of

from molink.peer.hop import events
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import HopSession
from molink.peer.scheduling.trip_load import NO_GUESSES, TripBegun, TripLoad
from molink.shards.spec import Span

THREE = (("head", Span(0, 2)), ("middle", Span(2, 4)), ("tail", Span(4, 6)))
ONE = (("only", Span(0, 6)),)
BOTH = pytest.mark.parametrize("circuit", [THREE, ONE], ids=["three peers", "one peer"])


class FivePlaces:
    """A guesser, and what decides that its draft is asked for five places."""

    def __init__(self) -> None:
        self.drafter = self
        self.asked: list[int] = []

    def places(self, most: int) -> int:
        self.asked.append(most)
        return 5

    def record_trip(self, tokens: Sequence[None], guessed: int) -> None: ...

    def rests(self) -> bool:
        return False

    def propose(self, last: None, most: int, load: TripLoad) -> tuple[None, TripBegun]:  # noqa: ARG002 - as asked
        return last, NO_GUESSES


Core = HopCore[HopSession, Any]
Effects = Sequence[events.HopEffect[HopSession, Any]]


def begun(circuit: Sequence[tuple[str, Span]], drafted: int) -> tuple[Core, list[HopSession], Effects]:
    """Two sessions whose prompts have been computed and whose first tokens are back; the first so many are drafted."""
    core, sessions = core_of(circuit[0][0]), [session_of(number, circuit, 0) for number in (0, 1)]
    for session in sessions[:drafted]:
        session.progress.guesser = FivePlaces()
    effects: list[events.HopEffect[HopSession, Any]] = []
    for session in sessions:
        core.handle(events.SessionOpened(session), 0.0)
        effects += core.handle(events.PromptStarted(session, 5, 0, range), 0.0)
    computed: list[HopSession] = []
    found: list[events.HopEffect[HopSession, Any]] = []
    while len(computed) < len(sessions):
        (batch,) = [one for one in effects if isinstance(one, events.ComputeBatch)]
        computed += [one.session for one in batch.steps]
        tokens = [(one.session, one.step, 5, False, None, None) for one in batch.steps]
        if circuit is ONE:
            effects = [*core.handle(events.BatchComputed(batch.steps, tokens=tokens), 0.0)]
        else:
            effects = [*core.handle(events.BatchComputed(batch.steps), 0.0)]
            effects += core.handle(events.TokensReturned("tail", tokens), 0.0)
        found += effects
    return core, sessions, found


def asked(effects: Effects) -> list[tuple[HopSession, int]]:
    return [pair for one in effects if isinstance(one, events.AskGuesses) for pair in one.asked]


def stepped(effects: Effects) -> list[HopSession]:
    return [step.session for one in effects if isinstance(one, events.ComputeBatch) for step in one.steps]


@BOTH
def test_a_step_waits_for_its_guesses_and_others_do_not(circuit: Sequence[tuple[str, Span]]) -> None:
    core, (drafted, other), effects = begun(circuit, 1)
    assert asked(effects) == [(drafted, 5)]
    assert stepped(effects)[-1] is other
    assert drafted.progress.next_step == 1
    if circuit is THREE:  # of one circuit one micro-batch is at its head at a time
        batch = [one for one in effects if isinstance(one, events.ComputeBatch)][-1]
        core.handle(events.BatchComputed(batch.steps), 0.1)
    for _ in range(2):  # again has no effect
        core.handle(events.GuessesReady((drafted,)), 0.2)
        core.handle(events.Woken(), 5.0)
        assert drafted.progress.next_step == 2


def test_guesses_that_are_ready_together_are_computed_together() -> None:
    core, sessions, effects = begun(THREE, 2)
    assert asked(effects) == [(one, 5) for one in sessions]
    assert stepped(core.handle(events.GuessesReady(sessions), 0.1)) == sessions


@BOTH
def test_a_session_that_ends_while_it_waits_leaves_nothing(circuit: Sequence[tuple[str, Span]]) -> None:
    core, sessions, _ = begun(circuit, 2)
    for session in sessions:
        core.handle(events.SessionEnded(session), 0.1)
    assert core.handle(events.GuessesReady(sessions), 0.2) == []
    assert core.is_empty


def test_a_tail_that_goes_on_while_the_next_step_waits_is_named() -> None:
    """Hops hold nothing of what it makes up: the next step would begin behind their ends."""
    core, (session, _), _ = begun(THREE, 2)
    again = core.handle(events.TokensReturned("tail", [(session, 0, 5, False, None, None)]), 0.1)
    assert not [one for one in again if isinstance(one, events.FailSession | events.DeliverTokens)]
    effects = core.handle(events.TokensReturned("tail", [(session, 0, 6, False, None, None)]), 0.2)
    (failed,) = [one for one in effects if isinstance(one, events.FailSession)]
    assert (failed.session, failed.peer_id, failed.code) == (session, "tail", "protocol")
    assert not [one for one in effects if isinstance(one, events.DeliverTokens)]


def test_a_session_that_moves_while_it_waits_has_a_last_step_without_guesses() -> None:
    core, (session, _), _ = begun(THREE, 2)
    core.handle(events.MoveAsked(session), 0.1)
    assert stepped(core.handle(events.GuessesReady((session,)), 0.2)) == [session]
    effects = core.handle(events.TokensReturned("tail", [(session, 1, 6, False, None, None)]), 0.3)
    assert [one for one in effects if isinstance(one, events.EpochOver)]
    assert asked(effects) == []
