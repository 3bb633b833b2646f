"""However circuits cross, links drain and engines take turns: every session's steps are computed in order and once at
every hop, windows hold, and in the end nothing is left."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.hop_ring import Generation, HopRing, core_of

from molink.dht.records.records import LayerLatency
from molink.peer.hop import events
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

circuits = st.lists(
    st.permutations(range(PEERS)).flatmap(lambda peers: st.integers(1, PEERS).map(lambda hops: peers[:hops])),
    min_size=1,
    max_size=6,
)


@st.composite
def rings(draw: st.DrawFn) -> HopRing:
    """Peers that do everything a peer may do, or less."""
    generations = [
        Generation(number, peers, draw(st.integers(1, 100)), draw(st.integers(1, 4)))
        for number, peers in enumerate(draw(circuits))
    ]
    slices, gathers = draw(st.booleans()), draw(st.booleans())
    micro_batches, uses_deadlines = draw(st.integers(1, 3)), draw(st.booleans())
    cores = [
        core_of(
            f"{peer}",
            LIMITS,
            chunk_tokens=draw(st.integers(8, MOST_TOKENS)),
            micro_batches=micro_batches,
            uses_deadlines=uses_deadlines,
            sizer=SliceSizer(StepTimes(SLOW)) if slices else None,
            gathering=PromptGathering(lambda _: 1e6, MOST_TOKENS) if gathers else None,
        )
        for peer in range(PEERS)
    ]
    window = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    return HopRing(generations, cores, window, draw(st.integers(1, 60)))


def check_bounds(ring: HopRing) -> None:
    """What waits at a peer is a window of each session and the step that filled it."""
    for one in ring.generations:
        for session in one.sessions:
            window = session.prefill.receive_window
            assert window.queued_bytes < ring.window[0] + MOST_TOKENS
            assert len(window.steps) <= ring.window[1]
    for core in ring.cores:
        for peer in range(PEERS):
            held = Counter(step.session for frame in core.held_for(f"{peer}") for step in frame.steps)
            assert max(held.values(), default=0) <= 2


def check_computed(one: Generation) -> None:
    """At each hop steps follow each other, each once, and no token is missing."""
    for hop, computed in enumerate(one.computed):
        assert [step for step, _ in computed] == list(range(len(computed)))
        before = one.computed[hop - 1] if hop else computed
        assert computed == before[: len(computed)]


@settings(deadline=None, max_examples=examples(60))
@given(rings(), st.randoms(use_true_random=False))
def test_every_generation_ends_with_each_step_computed_once_and_in_order(ring: HopRing, rng: object) -> None:
    for one in ring.generations:
        ring.start(one)
    while not all(one.is_over for one in ring.generations):
        turns = ring.turns()
        assert turns, "nobody can go on"
        ring.take(rng.choice(turns))  # type: ignore[attr-defined]
        check_bounds(ring)
    assert not ring.failed
    for one in ring.generations:
        check_computed(one)
        tokens = list(accumulate(tokens for _, tokens in one.computed[0]))
        assert tokens[-1] == one.prompt_tokens + one.new_tokens - 1
        assert all(computed == one.computed[0] for computed in one.computed)
        ring.end(one)
    while turns := ring.turns():
        ring.take(turns[0])
    assert all(core.is_empty for core in ring.cores)


@settings(deadline=None, max_examples=examples(60))
@given(rings(), st.data())
def test_sessions_that_end_at_any_moment_leave_nothing_and_hold_up_nobody(
    ring: HopRing, data: st.DataObject
) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    ending = {data.draw(st.integers(0, 60)): one for one in ring.generations[::2]}
    for one in ring.generations:
        ring.start(one)
    for turn in range(100_000):
        if turn in ending:
            ring.end(ending[turn])
        if all(one.is_over for one in ring.generations):
            break
        turns = ring.turns()
        assert turns or any(later > turn for later in ending), "nobody can go on"
        if turns:
            ring.take(rng.choice(turns))
        check_bounds(ring)
    assert not ring.failed
    for one in ring.generations:
        check_computed(one)
        ring.end(one)
    while turns := ring.turns():
        ring.take(turns[0])
    assert all(core.is_empty for core in ring.cores)
    assert not any(session.waits for one in ring.generations for session in one.sessions)


@pytest.mark.parametrize("hops", [1, 3])
def test_sessions_of_one_circuit_step_together(hops: int) -> None:
    generations = [Generation(number, list(range(hops)), 10, 20) for number in range(3)]
    ring = HopRing(generations, [core_of(f"{peer}", LIMITS) for peer in range(hops)], (1000, 32), 1000)
    for one in generations:
        ring.start(one)
    sizes = []
    while not all(one.is_over for one in generations):
        turn = ring.turns()[0]
        if turn[0] == "compute":
            answer = ring.engines[turn[1]]
            assert isinstance(answer, events.BatchComputed)
            sizes.append(len(answer.through))
        ring.take(turn)
    assert sizes.count(3) >= 18 * hops
