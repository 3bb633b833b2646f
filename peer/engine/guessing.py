"""Guesses of a session's tokens as token ids: at its head from whoever guesses, at its tail as the head has said."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

from molink.dht.records.records import AnnouncedDraft
from molink.peer.drafting.draft_thread import DraftThread
from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.steps import StepPayload
from molink.peer.hop.events import AskGuesses
from molink.peer.hop.speculation import MOST_GUESSES
from molink.peer.scheduling.trip_load import NO_GUESSES, TripBegun, TripLoad
from molink.peer.speculation.draft_drawing import DraftDrawing
from molink.peer.speculation.draft_model import DraftModel
from molink.peer.speculation.kept_tokens import KeptTokens, place_kept
from molink.peer.speculation.lookup import MOST_TEXT_TOKENS
from molink.peer.speculation.ngram_tables import ClientTables
from molink.peer.speculation.session_guesses import SessionGuesses, SourceCounts
from molink.peer.speculation.told_draft import ToldDraft
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.shards.spec import GUESS_SOURCES, GUESSES, ModelSpec

MOST_KEPT_TOKENS: Final = 512 * 1024
"""Of all sessions' texts and predictions: some 60 MB. Who keeps most makes room for others."""
DRAFTED_SESSIONS: Final = 16
"""For so many a draft model's KV caches are in the peer's memory; others are guessed without."""
MOST_SCOPE_BYTES: Final = 16
MOST_PREDICTION_TOKENS: Final = 64 * 1024
WANTS_NONE: Final = "its client wants no guesses"


class TokenGuesses(Protocol):
    """What guesses the tokens of one session."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these for certain; at first these are all that there are."""

    @property
    def begun(self) -> TripBegun:
        """What was proposed last."""

    def propose(self, most: int, load: TripLoad) -> tuple[int, ...]:
        """The tokens that travel with the next trip, at most so many, beside that load."""

    def record(self, guessed: int, accepted: int) -> None:
        """Of so many guesses that travelled so many were right: the first ones."""

    def expect(self, token_ids: Sequence[int]) -> None:
        """The session's tail says that these probably come next."""


GuessesOf: TypeAlias = Callable[[ServedSession, pb.Start], TokenGuesses | None]
"""Who guesses the tokens of a session whose head is here, and that is started so; None: nobody."""


class StepGuesser:
    """A `speculation.Guesser` for the head's core. It keeps the guesses that are on their way."""

    def __init__(self, source: TokenGuesses, vocabulary: int) -> None:
        self.source = source
        self._vocabulary = vocabulary
        self._sources = source if isinstance(source, SessionGuesses) else None
        self.drafter = source if isinstance(source, SessionGuesses) and source.told is not None else None
        """As `Guesser.drafter`."""
        self.travelling: tuple[int, ...] = ()
        self.latest_sources = b""
        """Where the guesses of the trip that came back last were from, as the client hears of it."""

    def record_trip(self, tokens: Sequence[StepPayload], guessed: int) -> None:
        """As `Guesser.record_trip`."""
        self.source.extend([token_id for one in tokens for token_id in one.token_ids or ()])
        if guessed:
            self.source.record(guessed, len(tokens) - 1)
            sources = () if self._sources is None else self._sources.sources(guessed)
            self.latest_sources = bytes([GUESS_SOURCES.index(one) for one in sources])
        self.source.expect(tokens[-1].expected)
        self.travelling = ()

    def rests(self) -> bool:
        """As `Guesser.rests`."""
        return self._sources is not None and self._sources.rests()

    def propose(self, last: StepPayload, most: int, load: TripLoad) -> tuple[StepPayload, TripBegun]:
        """As `Guesser.propose`."""
        guesses = self.source.propose(most, load)[:most]
        if not guesses:
            return last, self.source.begun
        if max(guesses) >= self._vocabulary:
            return last, NO_GUESSES
        self.travelling = guesses
        trip = replace(self.source.begun, guesses=len(guesses))
        return StepPayload(token_ids=(*(last.token_ids or ()), *guesses)), trip


class AwaitedSequence:
    """A `speculation.Guesser` of a head that a session has moved to: it knows the tokens from the move on, and guesses
    nothing until the client has told those before."""

    drafter = None

    def __init__(self, position: int, token_id: int) -> None:
        """The session goes on here with that token, at that position."""
        self.position = position
        self.tokens = [token_id]
        """From there on, for certain."""

    def record_trip(self, tokens: Sequence[StepPayload], guessed: int) -> None:  # noqa: ARG002 - there were none
        """As `Guesser.record_trip`."""
        self.tokens += [token_id for one in tokens for token_id in one.token_ids or ()]

    def rests(self) -> bool:
        """As `Guesser.rests`."""
        return True

    def propose(self, last: StepPayload, *_: int | TripLoad) -> tuple[StepPayload, TripBegun]:
        """As `Guesser.propose`."""
        return last, NO_GUESSES


class SessionGuessing:
    """Owner of who guesses the tokens of each session whose head is here: from its start, in later epochs of the same
    head, and, once the client has told the sequence, at a head that it has moved to."""

    def __init__(self, spec: ModelSpec, on_guessed: Callable[[Sequence[ServedSession]], None]) -> None:
        """`on_guessed` hears of sessions whose steps need wait for guesses no longer."""
        self._spec = spec
        self._on_guessed = on_guessed
        self._guessed: list[ServedSession] = []
        """Those of which it has not heard yet."""
        self.source_of: GuessesOf = lambda _, __: None

    def begin(self, session: ServedSession, start: pb.Start) -> None:
        """The session begins so."""
        self._begin(session, start, start.token_ids)

    def keep(self, older: ServedSession, session: ServedSession) -> None:
        """The session's epoch before this one is over: where its head stays, so does who guesses its tokens."""
        if older.is_head and session.is_head and why_no_guesses(session) is None:
            session.progress.guesser, older.progress.guesser = older.progress.guesser, None

    def await_sequence(self, session: ServedSession, position: int, token_id: int) -> None:
        """The session goes on here from the epoch before, with that token: of one that was not here before, what comes
        is kept until the client tells what came before."""
        if session.progress.guesser is None and why_no_guesses(session) is None:
            session.progress.guesser = AwaitedSequence(position, token_id)

    def end(self, session: ServedSession) -> None:
        """The session has ended here: unless the next epoch is about to keep who guesses its tokens, nothing is kept
        for that any more."""
        if session.progress.guesser is not None:
            asyncio.get_running_loop().call_soon(_drop_guesser, session)

    def ask(self, effect: AskGuesses[ServedSession]) -> None:
        """Has a draft guess for these sessions, which wait for that."""
        for session, places in effect.asked:
            if (told := _told_of(session)) is not None:
                told.ask(places, partial(self._note_guessed, session))
            else:
                self._note_guessed(session)

    def _note_guessed(self, session: ServedSession) -> None:
        """Those that are guessed together go on together."""
        if not self._guessed:
            asyncio.get_running_loop().call_soon(self._tell_guessed)
        self._guessed.append(session)

    def _tell_guessed(self) -> None:
        guessed, self._guessed = self._guessed, []
        self._on_guessed(guessed)

    def on_history(self, session: ServedSession, link: Link, history: pb.History) -> None:
        """The client tells a head that the session has moved to what the sequence is, and what to guess from. Told to
        another, or again, it has no effect; nor has what is told to a head as the tail that it is as well, which is a
        part of the sequence, or ends before the token that the head goes on with.

        Raises:
            ProtocolError: it is not the client's to say, or cannot be the session's sequence.
        """
        awaited, plan = session.progress.guesser, session.plan
        if not session.is_head or not isinstance(awaited, AwaitedSequence):
            return
        if history.position and session.drawing is not None:
            return
        tokens = history.token_ids
        if session.owner is not link or history.position or len(tokens) > plan.capacity_tokens:
            raise ProtocolError("a sequence is told by the session's client, from its first token on")
        if max(tokens, default=0) >= plan.vocabulary:
            raise ProtocolError(f"token {max(tokens)} is beyond the vocabulary of {plan.vocabulary}")
        hints = self.check_history(history)
        if len(tokens) > awaited.position:
            session.progress.guesser = None
            self._begin(session, hints, (*tokens[: awaited.position], *awaited.tokens))

    def check_history(self, history: pb.History) -> pb.Start:
        """What the client says with it of tokens to come. Raises ProtocolError as `check_hints`."""
        hints = pb.Start(prediction=history.prediction, guess_scope=history.guess_scope)
        check_hints(hints, self._spec)
        return hints

    def _begin(self, session: ServedSession, hints: pb.Start, tokens: Sequence[int]) -> None:
        if why_no_guesses(session) is not None:
            return
        session.progress.guesser = None  # that of the epoch before makes room
        source = self.source_of(session, hints)
        if source is not None:
            source.extend(tokens)
            session.progress.guesser = guesser = StepGuesser(source, session.plan.vocabulary)
            drafter = guesser.drafter
            if drafter is not None and drafter.told is not None and drafter.places(MOST_GUESSES):
                drafter.told.feed()  # where it is expected to pay, it is ready when the first token is there


def _told_of(session: ServedSession) -> ToldDraft | None:
    """What its head knows of the session's sequence at a draft; None: there is none."""
    guesser = session.progress.guesser
    return guesser.drafter.told if isinstance(guesser, StepGuesser) and guesser.drafter is not None else None


def _drop_guesser(session: ServedSession) -> None:
    if (told := _told_of(session)) is not None:
        told.close()
    session.progress.guesser = None


class HeadGuesses:
    """Owns what the tokens of a peer's sessions are guessed from: a `GuessesOf`."""

    def __init__(
        self,
        *,
        tables: bool,
        draft: DraftModel | DraftThread | None = None,
        fixed: int | None = None,
        announced: tuple[AnnouncedDraft, ...] = (),
    ) -> None:
        """`tables`: whether each client's generations are guessed from his earlier ones, beside what a session has
        itself. `draft` guesses too, for DRAFTED_SESSIONS at a time; its thread is opened by who made it. `fixed`:
        always so many travel, to compare with; None: as many as pay. `announced`: what the peer says of all that."""
        self.announced = announced
        self.draft = draft
        self._drafted: WeakSet[SessionGuesses] = WeakSet()
        """Those of sessions that the small draft model guesses for, in whatever epoch these are."""
        self._fixed = fixed
        self._tables = ClientTables() if tables else None
        self._kept: WeakKeyDictionary[SessionGuesses, KeptTokens] = WeakKeyDictionary()
        """Of those that are still there: at most how many tokens are kept to look things up in."""
        self.counts = SourceCounts()
        """Of all sessions, those that have ended too."""

    def __call__(self, session: ServedSession, start: pb.Start) -> SessionGuesses | None:
        """None: as many tokens are kept as may be, and no other client keeps more. Without its prediction where that
        alone is too much."""
        plan = session.plan
        drawing = DraftDrawing.of(plan.params, plan.seed)
        if plan.params.grammar is not None:
            return SessionGuesses.of_grammar(
                plan.stages, drawing=drawing, fixed=self._fixed, totals=self.counts
            )
        tables, owner = self._tables, session.owner.peer_id
        tokens = KeptTokens(owner, min(plan.capacity_tokens, MOST_TEXT_TOKENS), len(start.prediction))
        kept = list(self._kept.items())
        place = place_kept([one for _, one in kept], tokens, MOST_KEPT_TOKENS)
        if place is None:
            return None
        for (other, before), left in zip(kept, place.left, strict=True):
            if left != before:
                other.forget(text=not left.text)
                self._kept[other] = left
        prediction = start.prediction if place.keeps_prediction else ()
        table = None if tables is None else tables.of_client(owner, start.guess_scope)
        draft = self._draft_of(session)
        guesses = SessionGuesses(
            table, prediction, plan.stages, draft, drawing=drawing, fixed=self._fixed, totals=self.counts
        )
        self._kept[guesses] = tokens if prediction else KeptTokens(owner, tokens.text)
        if isinstance(draft, DraftModel):
            self._drafted.add(guesses)
        return guesses

    def rest(self, device: str) -> None:
        """The device's memory is to be free: a draft on it is there no more until `wake`. Again has no effect."""
        if isinstance(self.draft, DraftThread):
            self.draft.rest(device)

    def wake(self) -> None:
        """A draft that rests may be loaded again."""
        if isinstance(self.draft, DraftThread):
            self.draft.wake()

    def _draft_of(self, session: ServedSession) -> DraftModel | ToldDraft | None:
        """The draft that guesses for the session; None: there is none, or for so many others that there is no room."""
        if isinstance(self.draft, DraftThread):
            return self.draft.open(session.owner.peer_id, session.plan.params, session.plan.seed)
        return None if len(self._drafted) >= DRAFTED_SESSIONS else self.draft


def tell_sources(session: ServedSession, token: pb.Token) -> None:
    """Sets where the guesses of that token's step came from, if it is a step's first one with guesses. To be called at
    the session's head before a further step of it comes back."""
    guesser = session.progress.guesser
    token.ClearField("guess_sources")
    if token.guessed and isinstance(guesser, StepGuesser):
        token.guess_sources = guesser.latest_sources[: token.guessed]


def check_hints(start: pb.Start, spec: ModelSpec) -> None:
    """Raises ProtocolError if what a client says of tokens to come is more than may be, or not of the model."""
    if len(start.prediction) > MOST_PREDICTION_TOKENS or len(start.guess_scope) > MOST_SCOPE_BYTES:
        raise ProtocolError(
            f"a start has at most {MOST_PREDICTION_TOKENS} predicted tokens and a scope of {MOST_SCOPE_BYTES} bytes"
        )
    if start.prediction and max(start.prediction) >= spec.vocabulary_size:
        raise ProtocolError(f"a predicted token is beyond the vocabulary of {spec.vocabulary_size}")


def why_no_guesses(session: ServedSession) -> str | None:
    """Why no guesses travel with the session's steps; None: they may."""
    plan = session.plan
    if not plan.speculates:
        return WANTS_NONE
    for hop in plan.hops:
        if GUESSES not in hop.facts.sampling_abilities:
            return f"{hop.peer_id} takes no guesses: it is of an older version"
    return None


def fault_of_told(guess: pb.Guess, session: ServedSession) -> str | None:
    """What is wrong with guesses that the head has told its tail; None: nothing."""
    ids = guess.token_ids
    if not 1 <= len(ids) <= MOST_GUESSES:
        return f"{len(ids)} guesses are not what a step may have"
    if max(ids) >= session.plan.vocabulary:
        return f"guess {max(ids)} is beyond the vocabulary"
    if guess.step > session.progress.next_step:
        return f"guesses for step {guess.step} came before step {session.progress.next_step} did"
    return None


def fault_of_trip(tokens: Sequence[pb.Token], session: ServedSession) -> str | None:
    """What is wrong with the tokens of one step that a tail sends its head; None: nothing. It goes on only behind
    tokens that were guessed, since hops hold these; those of an older step are repeats."""
    if (token_id := max(token.token_id for token in tokens)) >= session.plan.vocabulary:
        return f"token {token_id} is beyond the vocabulary"
    if len(tokens[-1].expected) > MOST_GUESSES:
        return f"{len(tokens[-1].expected)} tokens are said to be expected, more than may be guessed"
    guesser, history_tokens = session.progress.guesser, session.progress.history_tokens
    travelling = guesser.travelling if isinstance(guesser, StepGuesser) else ()
    for place, token in enumerate(tokens[:-1]):
        if token.position < history_tokens:
            continue
        if place >= len(travelling) or travelling[place] != token.token_id:
            return f"tokens came behind one at position {token.position} that was not guessed"
    return None
