"""Token timeouts: how long a client waits for the next token before it looks for who holds it up. Pure.

What is predicted of a circuit is announced by strangers and may be wrong in either direction. So there is a margin over
it, a least that no honest machine needs, a most that no prediction can exceed by much, and where a circuit has yielded
nothing before and is tried once more, it gets twice the time: a swarm that is slow as a whole is waited for all the
same.
"""

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


def first_token_s(predicted_s: float, stood_still: int = 0) -> float:
    """Seconds from the start on a circuit to its first token, where it yielded none so many times before."""
    most_s = max(MOST_FIRST_S, 2 * predicted_s)
    return min(most_s, max(LEAST_FIRST_S, MARGIN * predicted_s) * _grown(stood_still))


def next_token_s(predicted_s: float, measured_s: float) -> float:
    """Seconds from one token to the next; `measured_s` is their mean so far, 0 where there is none."""
    return min(MOST_NEXT_S, max(LEAST_NEXT_S, MARGIN * max(predicted_s, measured_s)))


def step_s(first_s: float) -> float:
    """Seconds for one token over all circuits that are tried, the first of which has `first_s`."""
    return max(STEP_S, 3 * first_s)


def _grown(stood_still: int) -> float:
    return 2.0 ** min(stood_still, MOST_FRUITLESS)
