"""Speculation: guesses that travel with a decode step's last token, and what comes of them (Leviathan et al. 2023).

Of a step of 1 + k rows the tail draws after the first, and after each guess that it has drawn itself; so a trip round
the circuit yields one token, and one more for each guess that was right. Every hop cuts off what was refused when the
next step begins. Pure.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from molink.peer.hop.session import DrawnToken, HopSession, Payload, Session
from molink.peer.scheduling.trip_load import TripBegun, TripLoad
from molink.shards.spec import MOST_GUESSED_TOKENS

MOST_GUESSES: Final = MOST_GUESSED_TOKENS
"""Of one step."""
PayloadT = TypeVar("PayloadT")


class Drafter(Protocol):
    """What decides whether a session's next step waits until something that takes time has guessed for it."""

    def places(self, most: int) -> int:
        """For how many tokens it is asked, `most` at most; 0: the step waits for nothing."""


class Guesser(Protocol[PayloadT]):
    """What guesses a session's tokens at its head."""

    drafter: Drafter | None
    """None: its steps never wait for guesses."""

    def record_trip(self, tokens: Sequence[PayloadT], guessed: int) -> None:
        """The sequence goes on with these for certain. They came of one step, with which so many guesses travelled: all
        of them but the last are guesses that were right."""

    def rests(self) -> bool:
        """Whether it guesses nothing for the next step, beside whatever load."""

    def propose(self, last: PayloadT, most: int, load: TripLoad) -> tuple[PayloadT, TripBegun]:
        """What the next step computes: the last token and behind it guesses, `most` or fewer, as pays beside that load.
        Asked when the step begins."""


def most_guesses(session: HopSession, most_step_tokens: int) -> int:
    """How many guesses the next decode step of a head's session may have: as many as hops take in a step, and could be
    followed by one more token before the generation is over."""
    place = session.place
    left_tokens = place.last_position - session.progress.history_tokens
    takes = min(stage.facts.step_tokens for stage in place.stages)
    return max(0, min(MOST_GUESSES, left_tokens, most_step_tokens - 1, takes - 1))


def trips_of(
    drawn: Sequence[DrawnToken[Session, Payload]],
) -> list[list[DrawnToken[Session, Payload]]]:
    """The tokens by the step that they were drawn in, where those of one step stand one behind the other."""
    if len(drawn) < 2:
        return [[*drawn]] if drawn else []
    trips: list[list[DrawnToken[Session, Payload]]] = []
    latest: DrawnToken[Session, Payload] | None = None
    for token in drawn:
        if latest is not None and (latest[0], latest[1], latest[2] + 1) == token[:3]:
            trips[-1].append(token)
        else:
            trips.append([token])
        latest = token
    return trips


def fault_of_guesses(tokens: int, draws: int, *, prefill: bool) -> str | None:
    """What is wrong with so many rows of a step, of which so many may be drawn after; None: nothing."""
    guesses = draws - 1
    if guesses > 0 and (prefill or guesses >= tokens or guesses > MOST_GUESSES):
        return f"{guesses} of the {tokens} rows of a step cannot be guesses"
    if not prefill and tokens > 1 + MOST_GUESSES:
        return f"{tokens} rows are no decode step, which has {1 + MOST_GUESSES} at most"
    return None


def fault_of_trip(trip: Sequence[DrawnToken[Session, Payload]]) -> str | None:
    """What is wrong with tokens of one step that have come back to the session's head; None: nothing."""
    session, step, position = trip[0][:3]
    progress = session.progress
    if session.prefill.chunks:
        return "a token came before the whole prompt was sent"
    if (last := position + len(trip) - 1) > progress.history_tokens + progress.guesses:
        return f"a token for position {last} came, which nobody has asked for"
    if last < progress.history_tokens:
        return None  # a repeat
    if step != progress.next_step - 1:
        return f"a token of step {step} came after step {progress.next_step - 1}"
    if position != progress.history_tokens:
        return f"tokens from position {position} on came where those from {progress.history_tokens} on were awaited"
    return None
