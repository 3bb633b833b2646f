"""However words and copies travel, and whoever is lost meanwhile: a session that goes over to standbys of its hops
loses no token, has none twice, and comes to its end while one copy of each span lives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.move_ring import MoveRing
from support.swarms.hop_ring import Generation, core_of

from molink.peer.scheduling.microbatch import BatchLimits

LIMITS = BatchLimits(40, 4)
NEW_TOKENS = 6
KINDS = ("all", "latest", "whole", "nothing")


def ring_of(hops: int, prompt_tokens: int) -> MoveRing:
    """A generation on peers 0, 1, ..., whose standbys follow them."""
    cores = [core_of(f"{peer}", LIMITS, chunk_tokens=16) for peer in range(2 * hops)]
    generation = Generation(0, list(range(hops)), prompt_tokens, NEW_TOKENS)
    return MoveRing(hops, [generation], cores, (1000, 32), 1000)


def choices(ring: MoveRing, losses: int, moves: int) -> list[tuple[str, Any]]:
    """All that may happen next."""
    one = ring.one
    turns: list[tuple[str, Any]] = [("copy", peer) for peer in ring.copying()]
    turns += [("begin", peer) for peer in ring.beginning()]
    turns += [("prepare", peer) for peer in ring.asked]
    turns += [("word", at) for at in range(len(ring.moves))]
    turns += [("token", None)] if ring.delivered else []
    turns += [("reserve", hop) for hop in ring.forming.get(0, ())]
    turns += [("take", turn) for turn in ring.turns()]
    is_calm = not ring.forming and not ring.asked and ring.before is None
    if moves and is_calm and not ring.dead and ring.history > one.prompt_tokens:
        turns += [("move", (hop,)) for hop in range(ring.hops)] + [("move", tuple(range(ring.hops)))]
    if losses and not ring.dead and not ring.forming:
        turns += [("lose", peer) for peer in ring.held]
    return turns


def play(ring: MoveRing, rng: Any, losses: int, moves: int, *, guesses: bool) -> None:  # noqa: ANN401 - a Random of hypothesis
    """Until the client has all tokens."""
    one = ring.one
    ring.chance = rng if guesses else None
    ring.start(one)
    end = one.prompt_tokens + one.new_tokens
    while ring.history < end:
        turns = choices(ring, losses, moves)
        if not turns:
            # the next epoch has not begun in time: what the client does then
            assert ring.before is not None, "nobody can go on"
            ring.recover(None)
            continue
        what, which = rng.choice(turns)
        if what == "move":
            moves -= 1
            ring.want_move(which)
        elif what == "lose":
            losses -= 1
            ring.lose(which)
        elif what == "reserve":
            ring.reserve(one, which, rng.choice(KINDS))
        elif what == "token":
            ring.take_token()
        else:
            act = {"copy": ring.copy, "begin": ring.begin, "prepare": ring.prepare, "word": ring.carry_move}
            act.get(what, ring.take)(which)
    assert not ring.failed


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
    st.integers(0, 1),
    st.integers(0, 3),
    st.booleans(),
)
def test_sessions_go_over_and_every_token_comes_once(
    hops: int, prompt_tokens: int, rng: object, losses: int, moves: int, guesses: bool
) -> None:
    play(ring_of(hops, prompt_tokens), rng, losses, moves, guesses=guesses)


@pytest.mark.full
@settings(deadline=None, max_examples=1000)
@given(
    st.integers(1, 3), st.integers(1, 50), st.randoms(use_true_random=False), st.integers(1, 3), st.booleans()
)
def test_sessions_go_over_among_losses_in_any_order(
    hops: int, prompt_tokens: int, rng: object, moves: int, guesses: bool
) -> None:
    play(ring_of(hops, prompt_tokens), rng, 1, moves, guesses=guesses)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_who_goes_over_computes_nothing_again(hops: int) -> None:
    ring = ring_of(hops, 30)
    ring.start(ring.one)
    moves = 2
    while ring.history < 30 + NEW_TOKENS:
        turns = choices(ring, 0, moves)
        what, which = next((turn for turn in turns if turn[0] == "copy"), turns[0])
        moving = [turn for turn in turns if turn[0] == "move"]
        if moving and ring.history == 32 + 2 * (2 - moves):
            moves -= 1
            ring.want_move(moving[-1][1])
        elif what == "token":
            ring.take_token()
        else:
            act = {"copy": ring.copy, "begin": ring.begin, "prepare": ring.prepare, "word": ring.carry_move}
            act.get(what, ring.take)(which)
    assert ring.moved == 2
    assert ring.core.runs == 1
    stepped = [sum(ring.held[peer].stepped for peer in (hop, hop + hops)) for hop in range(hops)]
    assert stepped == [30 + NEW_TOKENS - 1] * hops
