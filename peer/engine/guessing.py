"""Guesses of a session's tokens as token ids: at its head from whoever guesses, at its tail as the head has said."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.steps import StepPayload
from molink.peer.hop.speculation import MOST_GUESSES
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import GUESSES, ModelSpec

WANTS_NONE: Final = "its client wants no guesses"


class TokenGuesses(Protocol):
    """What guesses the tokens of one session."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """The sequence goes on with these for certain; at first these are all that there are."""

    def propose(self, most: int) -> tuple[int, ...]:
        """The tokens that may come next, at most so many."""

    def record(self, guessed: int, accepted: int) -> None:
        """Of so many guesses that travelled so many were right: the first ones."""


GuessesOf: TypeAlias = Callable[[ServedSession], TokenGuesses | None]
"""Who guesses the tokens of a session whose head is here; None: nobody."""


class StepGuesser:
    """A `speculation.Guesser` for the head's core. It keeps the guesses that are on their way."""

    def __init__(self, source: TokenGuesses, vocabulary: int) -> None:
        self.source = source
        self._vocabulary = vocabulary
        self.travelling: tuple[int, ...] = ()

    def record_trip(self, tokens: Sequence[StepPayload], guessed: int) -> None:
        """As `Guesser.record_trip`."""
        self.source.extend([token_id for one in tokens for token_id in one.token_ids or ()])
        if guessed:
            self.source.record(guessed, len(tokens) - 1)
        self.travelling = ()

    def propose(self, last: StepPayload, most: int) -> tuple[StepPayload, int]:
        """As `Guesser.propose`."""
        guesses = self.source.propose(most)[:most] if most else ()
        if not guesses or max(guesses) >= self._vocabulary:
            return last, 0
        self.travelling = guesses
        return StepPayload(token_ids=(*(last.token_ids or ()), *guesses)), len(guesses)


def why_no_guesses(session: ServedSession, spec: ModelSpec) -> str | None:
    """Why no guesses travel with the session's steps; None: they may."""
    plan = session.plan
    if not plan.speculates:
        return WANTS_NONE
    if any(spec.state_bytes):
        return "the model's layers keep states, which do not go back"
    if plan.params.grammar is not None:
        return "what its grammar lets come is known for the next token alone"
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
    guesser, history_tokens = session.progress.guesser, session.progress.history_tokens
    travelling = () if guesser is None else guesser.travelling
    for place, token in enumerate(tokens[:-1]):
        if token.position < history_tokens:
            continue
        if place >= len(travelling) or travelling[place] != token.token_id:
            return f"tokens came behind one at position {token.position} that was not guessed"
    return None
