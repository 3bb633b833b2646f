"""However epochs change, hop after hop and at any moment: no token is lost, computed twice in a cache, or in a wrong
place, and in the end nothing is left."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.epoch_ring import EpochRing
from support.swarms.hop_ring import Generation, core_of

from molink.dht.records.records import LayerLatency
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering

PEERS = 4
MOST_TOKENS = 40
LIMITS = BatchLimits(MOST_TOKENS, 4)
SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Slices are the smallest there are: 16 tokens through a layer."""
KINDS = ("all", "latest", "whole", "nothing")

circuits = st.lists(
    st.permutations(range(PEERS)).flatmap(lambda peers: st.integers(1, PEERS).map(lambda hops: peers[:hops])),
    min_size=1,
    max_size=5,
)


@st.composite
def rings(draw: st.DrawFn) -> EpochRing:
    """Peers that do everything a peer may do, or less."""
    generations = [
        Generation(number, peers, draw(st.integers(1, 100)), draw(st.integers(1, 8)))
        for number, peers in enumerate(draw(circuits))
    ]
    slices, gathers = draw(st.booleans()), draw(st.booleans())
    cores = [
        core_of(
            f"{peer}",
            LIMITS,
            chunk_tokens=draw(st.integers(8, MOST_TOKENS)),
            micro_batches=draw(st.integers(1, 3)),
            uses_deadlines=draw(st.booleans()),
            sizer=SliceSizer(StepTimes(SLOW)) if slices else None,
            gathering=PromptGathering(lambda _: 1e6, MOST_TOKENS) if gathers else None,
        )
        for peer in range(PEERS)
    ]
    window = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    return EpochRing(generations, cores, window, draw(st.integers(1, 60)))


def play(ring: EpochRing, rng: Any, changes: int, *, guesses: bool) -> None:  # noqa: ANN401 - a Random of hypothesis
    """Until all generations have all of their tokens."""
    ring.chance = rng if guesses else None
    for one in ring.generations:
        ring.start(one)
    while not all(one.is_over for one in ring.generations):
        turns: list[tuple[str, Any]] = [
            ("reserve", (ring.generations[number], hop))
            for number, hops in ring.forming.items()
            for hop in hops
        ]
        turns += ring.turns()
        live = [one for one in ring.generations if not one.is_over and one.number not in ring.forming]
        if changes and live and (not turns or rng.random() < 0.1):
            changes -= 1
            ring.leave(rng.choice(live), rng.randrange(3))
            continue
        assert turns, "nobody can go on"
        what, which = rng.choice(turns)
        if what == "reserve":
            ring.reserve(*which, rng.choice(KINDS))
        else:
            ring.take((what, which))
    assert not ring.failed
    for one in ring.generations:
        assert one.got == one.new_tokens
        for hop in range(len(one.peers)):
            assert len(ring.caches[one.number, hop].tokens) >= one.prompt_tokens + one.new_tokens - 1
        ring.end(one)
    while turns := ring.turns():
        ring.take(turns[0])
    assert all(core.is_empty for core in ring.cores)
    assert not any(session.waits for one in ring.generations for session in one.sessions)


@settings(deadline=None, max_examples=examples(80))
@given(rings(), st.randoms(use_true_random=False), st.integers(0, 30), st.booleans())
def test_epochs_change_at_any_moment_and_every_cache_holds_each_token_in_its_place(
    ring: EpochRing, rng: object, changes: int, guesses: bool
) -> None:
    play(ring, rng, changes, guesses=guesses)


@pytest.mark.full
@settings(deadline=None, max_examples=examples(300))
@given(rings(), st.randoms(use_true_random=False), st.integers(0, 60), st.booleans())
def test_many_epochs_change_at_any_moment(ring: EpochRing, rng: object, changes: int, guesses: bool) -> None:
    play(ring, rng, changes, guesses=guesses)


@pytest.mark.parametrize("hops", [1, 3])
def test_hops_that_hold_all_compute_only_the_last_token_again(hops: int) -> None:
    generation = Generation(0, list(range(hops)), 50, 20)
    ring = EpochRing([generation], [core_of(f"{peer}", LIMITS) for peer in range(hops)], (1000, 32), 1000)
    ring.start(generation)
    changes = 0
    while not generation.is_over:
        if generation.got > 2 * changes:
            changes += 1
            ring.leave(generation, 0)
            for hop in range(hops):
                ring.reserve(generation, hop, "latest")
            assert ring.positions[-1] == 50 + generation.got - 1
        ring.take(ring.turns()[0])
    assert changes >= 9
    for hop in range(hops):
        assert ring.caches[0, hop].stepped <= 50 + 19 + changes
