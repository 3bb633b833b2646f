"""Successor core: whether a session is begun anew on a better circuit of other spans, and how that goes on, without
input or output: `handle(event)` returns what to do.

A client drives this with asyncio (`client/circuit/successor.py`), the simulator in virtual time.
"""

from dataclasses import dataclass

from molink.routing import Route

STARTS = 2
"""On what there is of the sequence; and, when that is computed, on what has come meanwhile, which is a short chunk."""
WITHIN_S = 20.0
"""A successor that has not come as far by then is given up."""
WORTH = 2.0
"""The tokens that are to come have to gain so many times what the successor takes to compute those before."""
MOST_COMPUTING_S = WITHIN_S / 2
"""A sequence that takes longer is not computed anew: predictions may be wrong by so much."""
MOST_GIVEN_UP = 2
"""Successors of one session: each computes all of it for nothing."""
WORTH_TOKENS = 64
"""A generation of which fewer are to come is not moved to a better circuit."""


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Lengths of a session's sequence, in tokens."""

    prompt_tokens: int
    tokens: int
    """The prompt's, and those that have come."""
    capacity_tokens: int
    """With all that may come."""

    @property
    def left_tokens(self) -> int:
        """That may come."""
        return self.capacity_tokens - self.tokens

    @property
    def is_worth_moving(self) -> bool:
        """Whether a better circuit is looked for at all."""
        return self.left_tokens >= WORTH_TOKENS


def is_worth_computing(lengths: SequenceLengths, standing: Route, measured_s: float, other: Route) -> bool:
    """Returns whether the tokens that are to come gain enough by a route on which those before are computed anew in
    time. Predictions are for the prompt, and a longer sequence takes longer in proportion; `measured_s` is what a token
    of the standing route has really taken, 0 where that is not known."""
    standing_ms = max(standing.tpot_ms, 1000 * measured_s)
    computing_ms = other.ttft_ms * lengths.tokens / max(1, lengths.prompt_tokens)
    gain_ms = (standing_ms - other.tpot_ms) * lengths.left_tokens
    return WORTH * computing_ms < gain_ms and computing_ms <= 1000 * MOST_COMPUTING_S


@dataclass(frozen=True, slots=True)
class SuccessorDrew:
    """Event: a token has come over the successor's circuit."""

    position: int
    length: int
    """Of the session's sequence then."""
    is_same: bool
    """Whether the sequence has that token there, or none yet."""


@dataclass(frozen=True, slots=True)
class SuccessorFailed:
    """Event: a hop has refused or is lost, or the session itself does not want it any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class SuccessorOverdue:
    """Event: the deadline is over."""


@dataclass(frozen=True, slots=True)
class FormSuccessor:
    """Effect: form the circuit, in an epoch of its own, and start it on the sequence as that is then. What an earlier
    start brings counts no more."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Effect: from this token on the session is the one that was begun anew. `SuccessorFailed` answers if it cannot
    be."""


@dataclass(frozen=True, slots=True)
class GiveSuccessorUp:
    """Effect: the session goes on as it is, and what hops have of the successor is given back."""

    reason: str


SuccessorEvent = SuccessorDrew | SuccessorFailed | SuccessorOverdue
SuccessorEffect = FormSuccessor | TakeOver | GiveSuccessorUp


@dataclass(slots=True)
class SuccessorCore:
    """Core of one attempt. Times are those of any one clock."""

    deadline_s: float = 0.0
    """By when the session has gone over, or never."""
    _starts: int = 0
    _is_first: bool = False
    """Whether no token has come since it was started last."""
    _is_over: bool = False

    def begin(self, now_s: float) -> FormSuccessor:
        """The attempt begins now."""
        self.deadline_s = now_s + WITHIN_S
        return self._start()

    def handle(self, event: SuccessorEvent) -> SuccessorEffect | None:
        """Returns what to do; nothing once it is given up."""
        if self._is_over:
            return None
        match event:
            case SuccessorFailed(reason):
                return self._give_up(reason)
            case SuccessorOverdue():
                return self._give_up("its successor does not come as far")
            case SuccessorDrew(position, length, is_same):
                return self._drew(position, length, is_same=is_same)

    def _drew(self, position: int, length: int, *, is_same: bool) -> SuccessorEffect | None:
        is_first, self._is_first = self._is_first, False
        if position > length or not is_same:
            return self._give_up("its successor draws other tokens")
        if position == length:
            return TakeOver()
        return self._start() if is_first and self._starts < STARTS else None

    def _start(self) -> FormSuccessor:
        self._starts, self._is_first = self._starts + 1, True
        return FormSuccessor()

    def _give_up(self, reason: str) -> GiveSuccessorUp:
        self._is_over = True
        return GiveSuccessorUp(reason)
