"""Token timeouts: how long a client waits for the next token before it looks for who holds it up. Pure.

What is predicted of a circuit is announced by strangers and may be wrong in either direction. So there is a margin over
it, a least that no honest machine needs, a most that no prediction can exceed by much, and where a circuit has yielded
nothing before and is tried once more, it gets twice the time: a swarm that is slow as a whole is waited for all the
same.

A peer whose machine stands still says nothing, and its connections stay open; one whose device hangs still answers. The
client sees both first by the token that does not come, long before a link is given up. So it asks all hops for a sign
of life: a hop that is silent while the others have answered, or whose engine is at one piece of work for far longer
than a token takes, and than it says that this piece should take, is at fault. An answer is late by what the others'
answers took, so that a client or a machine that is slow as a whole blames nobody. This is an accrual failure detector
(Hayashibara et al. 2004) with a single threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_NEXT_S = 5.0
LEAST_FIRST_S = 10.0
MOST_FIRST_S = 120.0
"""For the first token, unless the prediction itself is about as long."""
MOST_NEXT_S = 60.0
MARGIN = 8.0
"""Times the prediction."""
STEP_S = 60.0
"""For one token all circuits together have so long, or three times as long as the first one had."""
MOST_FRUITLESS = 8
"""Circuits in a row that yield no token."""
ASK_NEXT_S = 0.2
"""After so long hops are asked where a token is missing, at the earliest: a hop that is silent from then on is known to
be within a second of the last token, and has had most of that to answer."""
ASK_FIRST_S = 1.0
"""The same for a circuit's first token: its prompt may take long, and to ask costs next to nothing."""
ASK_LONGEST_S = 4.0
"""From one time that hops are asked to the next."""
ASK_MARGIN = 2.0
"""A token is overdue after so many times what it should take. To ask costs little, and blames nobody who answers."""
MOST_QUEUED = 12
"""Times as long as otherwise a token may take at most while its rows wait behind others', and hops compute: who begins
anew elsewhere throws away what is computed of a prompt, and adds to the load that it waits for."""
LEAST_BEGIN_S = 1.2
"""A prepared epoch, all of whose hops answer, has not begun after so long, at the earliest: a hop that waits for its
copy says so itself within a second."""
SEEN_TOKENS = 24
LEAST_ANSWER_S = 0.8
LATE = 4.0
"""An answer is late after so many times what the slowest of the others took."""
LEAST_STUCK_S = 1.0
"""An engine is stuck at one piece of work after that, at the earliest."""
LEAST_UNPREDICTED_S = 3.0
"""The same where its peer does not say what that piece should take."""
STUCK = 8.0
"""It is stuck after so many times what a token should take, and what the piece should, as its peer predicts it: it may
be a prompt of somebody else's."""


def first_token_s(predicted_s: float, stood_still: int = 0) -> float:
    """Seconds from the start on a circuit to its first token, where it yielded none so many times before."""
    most_s = max(MOST_FIRST_S, 2 * predicted_s)
    return min(most_s, max(LEAST_FIRST_S, MARGIN * predicted_s) * _grown(stood_still))


def next_token_s(predicted_s: float, measured_s: float) -> float:
    """Seconds from one token to the next; `measured_s` is their mean so far, 0 where there is none."""
    return min(MOST_NEXT_S, max(LEAST_NEXT_S, MARGIN * max(predicted_s, measured_s)))


def begin_s(predicted_s: float, measured_s: float) -> float:
    """Seconds from the last token of an epoch to the first one of the next, which was prepared. As `next_token_s`."""
    return max(LEAST_BEGIN_S, MARGIN * max(predicted_s, measured_s))


def step_s(first_s: float) -> float:
    """Seconds for one token over all circuits that are tried, the first of which has `first_s`."""
    return max(STEP_S, 3 * first_s)


def _grown(stood_still: int) -> float:
    return 2.0 ** min(stood_still, MOST_FRUITLESS)


@dataclass(frozen=True, slots=True)
class SignOfLife:
    """Answer of a hop, or that there has been none."""

    peer_id: str
    after_s: float | None
    """From the question to the answer; None: there is none yet."""
    computing_s: float = 0.0
    """For how long its engine has been at its present piece of work, as it says."""
    expected_s: float = 0.0
    """What that piece should take, as it says; 0: it does not."""
    waits: bool = False
    """Whether rows of the session wait there, as it says."""

    @property
    def fault(self) -> str:
        """What is said of a hop that is left for it."""
        return "it did not answer" if self.after_s is None else "its engine stood still"

    def is_stuck(self, token_s: float) -> bool:
        """Whether its engine has been at that piece for far longer than it should; `token_s` is what the next token of
        the circuit should take."""
        least_s = LEAST_STUCK_S if self.expected_s else LEAST_UNPREDICTED_S
        return self.computing_s > max(least_s, STUCK * token_s, STUCK * self.expected_s)


def waits_its_turn(signs: Sequence[SignOfLife]) -> bool:
    """Whether all hops of a circuit have answered, rows of the session wait at one, and one computes: where rows wait
    for room on their way, it is another."""
    answered = all(sign.after_s is not None for sign in signs)
    return answered and any(sign.waits for sign in signs) and any(sign.computing_s for sign in signs)


def queued_times(signs: Sequence[SignOfLife], sessions: int) -> int:
    """Returns how many times as long as otherwise a token may take: more than once if its rows wait their turn. One of
    the hops has so many sessions: what they say of a queue is borne out by the load that they announce, for which they
    are seldom chosen."""
    return max(1, min(MOST_QUEUED, sessions)) if waits_its_turn(signs) else 1


def usual_s(predicted_s: float, measured_s: float, latest_s: Sequence[float]) -> float:
    """Returns what the next token should take. `latest_s` is what the latest of this circuit have taken: once there are
    SEEN_TOKENS of them they count and not what was predicted, which may be many times as much where peers were measured
    while their machines were busy. The second longest of them, since one may be an accident, and tokens of one trip
    come together."""
    return max(predicted_s, measured_s) if len(latest_s) < SEEN_TOKENS else sorted(latest_s)[-2]


def ask_after_s(usual_s: float, asked: int, *, is_first: bool) -> float:
    """Returns after how many seconds without a token hops are asked, the `asked` times before included.

    `usual_s` is what a token takes; `is_first`: none has come over this circuit.
    """
    least_s = ASK_FIRST_S if is_first else max(ASK_NEXT_S, ASK_MARGIN * usual_s)
    return sum(min(ASK_LONGEST_S, least_s * 2.0**turn) for turn in range(asked + 1))


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
    stuck = [sign for sign in signs if sign.is_stuck(token_s)]
    return stuck[0] if len(stuck) == 1 else None
