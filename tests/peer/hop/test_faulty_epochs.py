"""Owners, hops, standbys and moves among faults of every kind, over the cores that the product runs: no token comes
twice or is lost, an old holder computes nothing in a new epoch, and all comes to its end while each span has a copy."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.faulty_ring import FaultyRing, choices, ring_of
from support.properties import examples

from molink.client.epochs.patience import MOST_FRUITLESS

KINDS = ("all", "latest", "whole", "nothing")


def faults(ring: FaultyRing) -> list[tuple[str, Any]]:
    """What may go wrong next."""
    alive = [peer for peer in range(2 * ring.hops) if peer not in ring.dead]
    running = [] if ring.run is None else [peer for peer in alive if ring.run.has(f"{peer}")]
    found: list[tuple[str, Any]] = [("lose", peer) for peer in alive if ring.other(peer) not in ring.dead]
    found += [("suspect", peer) for peer in running]
    found += [("give up", None)] if running else []
    found += [("refuse", None)] if ring.asked else []
    found += [("cut", ends) for ends, link in ring.links.items() if link]
    found += [("repeat", ends) for ends, link in ring.links.items() if link and link[0][0] != "update"]
    return found


def play(ring: FaultyRing, rng: Any, left: int, moves: int, *, guesses: bool) -> None:  # noqa: ANN401 - a Random of hypothesis
    """Until the client has all tokens."""
    one = ring.one
    ring.chance = rng if guesses else None
    ring.start(one)
    end, wrongs = one.prompt_tokens + one.new_tokens, left
    while ring.history < end:
        may_fail = left and ring.fruitless < MOST_FRUITLESS - 2
        wrong = faults(ring) if may_fail and rng.random() < 0.1 else []
        turns = wrong or choices(ring, moves)
        if not turns:
            assert ring.run is not None, "nobody can go on"
            ring.stalls += 1
            ring.suspect(None)  # what the client does when no token has come in time
            continue
        what, which = rng.choice(turns)
        left -= bool(wrong)
        moves -= what == "want_move"
        if what == "reserve":
            ring.reserve(one, which, rng.choice(KINDS))
        elif what in ("take_token", "refuse"):
            getattr(ring, what)()
        elif what == "give up":
            ring.suspect(None)
        else:
            getattr(ring, what)(which)
    assert not ring.failed
    assert ring.stalls <= wrongs, "nobody waits in vain where nothing went wrong"


@settings(deadline=None, max_examples=examples(400))
@given(
    st.integers(1, 3),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
)
def test_whatever_goes_wrong_every_token_comes_once_and_the_generation_comes_to_its_end(
    hops: int, prompt_tokens: int, rng: object, left: int, moves: int, guesses: bool
) -> None:
    play(ring_of(hops, prompt_tokens), rng, left, moves, guesses=guesses)


@pytest.mark.parametrize("wrong", [0, 2])
def test_guesses_right_and_wrong_among_moves_and_faults_cost_no_token(wrong: int) -> None:
    trips: list[tuple[int, int]] = []
    moved = 0
    for seed in range(100):
        ring = ring_of(1 + seed % 3, 1 + seed % 50)
        play(ring, random.Random(seed), wrong, 3, guesses=True)
        trips += ring.trips
        moved += ring.moved
    accepted, guessed = sum(right for _, right in trips), sum(count for count, _ in trips)
    assert 0 < accepted < guessed
    assert moved > 0


@pytest.mark.full
@settings(deadline=None, max_examples=examples(4000))
@given(
    st.integers(1, 3),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
    st.integers(1, 12),
    st.integers(1, 6),
    st.booleans(),
)
def test_whatever_goes_wrong_again_and_again_every_token_comes_once(
    hops: int, prompt_tokens: int, rng: object, left: int, moves: int, guesses: bool
) -> None:
    play(ring_of(hops, prompt_tokens), rng, left, moves, guesses=guesses)
