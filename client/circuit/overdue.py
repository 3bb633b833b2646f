"""Overdue tokens: which hop holds up a circuit's next token, by what the hops answer when they are asked. Pure.

A peer whose machine stands still says nothing, and its connections stay open; one whose device hangs still answers. The
client sees both first by the token that does not come, long before a link is given up. So it asks all hops for a sign
of life: a hop that is silent while the others have answered, or whose engine is at one piece of work for far longer
than a token takes, is at fault. An answer is late by what the others' answers took, so that a client or a machine that
is slow as a whole blames nobody. This is an accrual failure detector (Hayashibara et al. 2004) with a single threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_NEXT_S = 0.4
"""After so long hops are asked where a token is missing, at the earliest."""
FIRST_S = 1.0
"""The same for a circuit's first token: its prompt may take long, and to ask costs next to nothing."""
LONGEST_S = 4.0
"""From one time that hops are asked to the next."""
MARGIN = 4.0
"""A token is overdue after so many times what it should take."""
LEAST_ANSWER_S = 0.8
LATE = 4.0
"""An answer is late after so many times what the slowest of the others took."""
LEAST_STUCK_S = 3.0
STUCK = 8.0
"""An engine is stuck at one piece of work after so many times what a token should take."""


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """Answer of a hop, or that there has been none."""

    peer_id: str
    after_s: float | None
    """From the question to the answer; None: there is none yet."""
    computing_s: float = 0.0
    """For how long its engine has been at its present piece of work, as it says."""


def ask_after_s(predicted_s: float, measured_s: float, asked: int, *, is_first: bool) -> float:
    """Returns after how many seconds without a token hops are asked, the `asked` times before included.

    `predicted_s` and `measured_s` are what a token takes; `is_first`: none has come over this circuit.
    """
    least_s = FIRST_S if is_first else max(LEAST_NEXT_S, MARGIN * max(predicted_s, measured_s))
    return sum(min(LONGEST_S, least_s * 2.0**turn) for turn in range(asked + 1))


def answers_until_s(signs: Sequence[SignOfLife], most_s: float) -> float:
    """Returns up to when, from the question on, the hops that have not answered yet are waited for; `most_s` where
    nobody has, or more than one is missing."""
    came_s = [sign.after_s for sign in signs if sign.after_s is not None]
    if len(came_s) < max(1, len(signs) - 1):
        return most_s
    return min(most_s, max(LEAST_ANSWER_S, LATE * max(came_s)))


def hop_at_fault(signs: Sequence[SignOfLife], token_s: float, *, is_over: bool = False) -> SignOfLife | None:
    """Returns the first hop that is silent though others have answered, else the one whose engine is stuck, if it is
    one alone; `token_s` is what the next token should take. If the time for the token `is_over`, silence all around
    is the first hop's fault."""
    silent = [sign for sign in signs if sign.after_s is None]
    if silent:
        return silent[0] if is_over or len(silent) < len(signs) else None
    stuck = [sign for sign in signs if sign.computing_s > max(LEAST_STUCK_S, STUCK * token_s)]
    return stuck[0] if len(stuck) == 1 else None
