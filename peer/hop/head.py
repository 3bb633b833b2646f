"""What only a circuit's head does: it cuts prompts, lets them wait for each other, and begins decode steps. Pure.

Each method that lets something begin returns it; `HopCore` queues it.
"""

from collections.abc import Iterable
from typing import Generic

from molink.peer.hop.session import GuessedStep, HopSettings, Payload, Session
from molink.peer.hop.speculation import most_guesses
from molink.peer.scheduling.in_flight_limit import InFlightLimit
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.scheduling.trip_load import ALONE, NO_GUESSES, BatchLoad, TripBegun, TripLoad
from molink.routing.cost.prefill_chunks import most_chunk_tokens

MOST_WAIT_S = 30.0
"""A head whose prompts need the line for so long takes no more: clients give up a head that is silent for 60 s."""


class Head(Generic[Session, Payload]):
    """Owns the orders among the sessions whose head is here: of prompts that wait for others, and of decode steps that
    wait for their circuit."""

    def __init__(self, settings: HopSettings, gathering: PromptGathering[Session] | None) -> None:
        """Without `gathering` no prompt waits for another."""
        self._settings = settings
        self._limit: InFlightLimit[Session] = InFlightLimit(settings.rule, settings.limits.max_sessions)
        self._gathering = gathering
        self._gathered: set[Session] = set()
        """Sessions whose prompts wait for others."""
        self._returned: dict[Session, tuple[int, Payload]] = {}
        """The next steps that wait for their circuit."""
        self._prefilling: set[Session] = set()
        """Sessions that wait for their first token."""
        self.has_guessed = False
        """Whether steps have begun with guesses since `take_guessed` was asked last."""
        self._guessed: dict[str, list[GuessedStep[Session, Payload]]] = {}
        """Those steps, by the tail that has not been told of these guesses."""
        self.asked: list[tuple[Session, int]] = []
        """Sessions whose steps wait for guesses, and for how many, since `take_asked` was asked last."""
        self._awaiting: dict[Session, tuple[int, Payload]] = {}
        """The next steps that wait for guesses."""
        self._lone: dict[Session, TripBegun] = {}
        """The latest trips of sessions that this hop is the whole circuit of: they step with whatever waits here."""

    @property
    def has_waiting(self) -> bool:
        """Whether prompts or decode steps wait here."""
        return bool(self._gathered or self._returned)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session."""
        waiting = self._prefilling or self._returned or self._awaiting
        return not (waiting or self._lone or self._limit or self._gathering)

    # -- prompts

    def expect_prompt(self, session: Session, tokens: int, now_s: float) -> None:
        """A prompt of about so many tokens may be on its way."""
        if self._gathering is not None and session.is_head and not session.progress.next_step:
            self._gathering.expect_prompt(session, session.span, tokens, now_s)

    def add_prompt(self, session: Session, tokens: int) -> bool:
        """There are so many tokens to compute. Whether to begin now, and not with a later `prompts_ready`."""
        stages, limits = session.place.stages, self._settings.limits
        takes = (limits.max_tokens, *(stage.facts.step_tokens for stage in stages))
        session.prefill.chunks.extend(
            self._settings.cut(stages, tokens, most_chunk_tokens(takes, limits.max_sessions))
        )
        self._prefilling.add(session)
        if self._gathering is None:
            return True
        self._gathered.add(session)
        self._gathering.add_prompt(session, session.span, tokens)
        return False

    def prompts_ready(self, now_s: float) -> tuple[Session, ...]:
        """The prompts that wait for others no longer. To be asked when the engine is free."""
        if self._gathering is None or not self._gathered:
            return ()
        ready = self._gathering.release_ready(now_s)
        self._gathered.difference_update(ready)
        return ready

    def take_chunk(self, session: Session) -> tuple[int, int, bool] | None:
        """The next chunk of a prompt, if there is one: where in it it begins and ends, and whether it is the last."""
        prefill = session.prefill
        if not prefill.chunks:
            return None
        first = prefill.chunk_begin
        prefill.chunk_begin += prefill.chunks.popleft()
        return first, prefill.chunk_begin, not prefill.chunks

    # -- decode

    def awaits_guesses(self, session: Session, step: int, payload: Payload) -> bool:
        """Whether that next step is kept until somebody has guessed for it."""
        guesser = session.progress.guesser
        if guesser is None or guesser.drafter is None or session.progress.moves:
            return False
        places: int = guesser.drafter.places(most_guesses(session, self._settings.most_step_tokens))
        if places:
            self._awaiting[session] = step, payload
            self.asked.append((session, places))
        return bool(places)

    def take_asked(self) -> list[tuple[Session, int]]:
        """Which steps have begun to wait for how many guesses since this was asked last."""
        asked, self.asked = self.asked, []
        return asked

    def take_awaiting(self, sessions: Iterable[Session]) -> list[tuple[Session, int, Payload]]:
        """The steps of these sessions that waited for guesses, and do so no longer."""
        return [(one, *self._awaiting.pop(one)) for one in sessions if one in self._awaiting]

    def add_return(self, session: Session, step: int, payload: Payload, now_s: float) -> None:
        """The token of a session is back, and there is this next step: it begins with a later `steps_ready`."""
        if session not in self._limit:
            guessed = session.progress.guesser is not None
            self._limit.add_session(session, session.place.circuit, session.place.stages, guessed=guessed)
        self._returned[session] = step, payload
        self._limit.record_return(session, now_s)

    def steps_ready(self, now_s: float) -> list[tuple[Session, int, Payload]]:
        """The next steps that begin now."""
        if not self._returned:
            return []
        return [(one, *self._returned.pop(one)) for one in self._limit.release_ready(now_s)]

    def begin_step(self, session: Session, step: int, payload: Payload) -> Payload:
        """That decode step begins. What it computes: the token, and guesses behind it, as many as the session's
        progress says then; none at an epoch's end, so that hops know what it holds."""
        progress, trip = session.progress, NO_GUESSES
        if progress.guesser is not None and not progress.moves:
            most = most_guesses(session, self._settings.most_step_tokens)
            load = ALONE if progress.guesser.rests() else self._load_of(session)
            payload, trip = progress.guesser.propose(payload, most, load)
            if trip.guesses and not session.is_tail:
                self.has_guessed = True
                self._guessed.setdefault(session.previous_peer_id, []).append((session, step, payload))
        progress.guesses = trip.guesses
        self._prefilling.discard(session)
        if session.is_tail:
            self._lone[session] = trip
        else:
            self._limit.record_begun(session, trip)
        return payload

    def take_guessed(self) -> Iterable[tuple[str, list[GuessedStep[Session, Payload]]]]:
        """By tail: the steps that have begun with guesses since this was asked last."""
        guessed, self._guessed, self.has_guessed = self._guessed, {}, False
        return guessed.items()

    def _load_of(self, session: Session) -> TripLoad:
        """What shares the circuit with the session's decode step that begins now."""
        if not session.is_tail:
            return self._limit.load_of(session, len(self._prefilling))
        others = [trip for other, trip in self._lone.items() if other is not session]
        if not others:
            return ALONE
        guesses = sum([one.guesses for one in others])
        beside = BatchLoad(len(others) + guesses, sum([one.tokens for one in others]), guesses)
        return TripLoad(beside, has_bystanders=any(one.progress.guesser is None for one in self._lone))

    def end_decode(self, session: Session) -> None:
        """No further decode step of the session is to come."""
        self._lone.pop(session, None)
        self._returned.pop(session, None)
        self._awaiting.pop(session, None)
        self._limit.forget_session(session)

    def record_computed(self, sessions: list[Session]) -> None:
        """Steps of these sessions have been computed here: their circuits' next micro-batches may begin."""
        self._limit.record_computed(sessions)

    # -- both

    def end_session(self, session: Session) -> None:
        """The session has ended."""
        self.end_decode(session)
        self._prefilling.discard(session)
        self._gathered.discard(session)
        if self._gathering is not None:
            self._gathering.forget_session(session)

    def due_s(self, now_s: float, *, is_idle: bool) -> float | None:
        """When something that waits is to be asked for again, even if nothing happens; None: never. Prompts are asked
        for when the engine is idle."""
        due_s = self._limit.due_s() if self._returned else None
        if not is_idle or self._gathering is None or not self._gathered:
            return due_s
        gathered_s = self._gathering.due_s(now_s)
        if due_s is None or gathered_s is None:
            return due_s if gathered_s is None else gathered_s
        return min(due_s, gathered_s)
