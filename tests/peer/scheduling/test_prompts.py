"""Prompts at their head: every token once and in order, a chunk at a time."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.pipelines import stage

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.microbatch import BatchLimits
from molink.peer.scheduling.prefill_chunks import equal_chunks
from molink.peer.scheduling.prompts import PromptQueue

LIMITS = BatchLimits(max_tokens=20, max_sessions=4)


def key(session: int) -> LeaseKey:
    return LeaseKey(session.to_bytes(16), 1)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=5), st.integers(1, 30), st.randoms())
def test_chunks_are_the_prompts_and_leave_room_for_decode(
    lengths: list[int], chunk_tokens: int, rng: random.Random
) -> None:
    prompts = PromptQueue(equal_chunks(chunk_tokens), LIMITS)
    wanted = {key(number): tuple(range(length)) for number, length in enumerate(lengths)}
    for one, token_ids in wanted.items():
        prompts.add_prompt(one, (), token_ids)
    got: dict[LeaseKey, tuple[int, ...]] = dict.fromkeys(wanted, ())
    while len(prompts):
        before = len(prompts)
        one = rng.choice([one for one in wanted if one in prompts])
        chunk = prompts.take_chunk(one)
        assert 1 <= len(chunk) <= min(chunk_tokens, LIMITS.max_tokens - LIMITS.max_sessions)
        assert len(prompts) == before - 1
        got[one] += chunk
    assert got == wanted
    assert not any(one in prompts or prompts.take_chunk(one) for one in wanted)


@pytest.mark.parametrize(
    ("announced", "own", "longest"),
    [((512, 512), 2048, 448), ((2048, 512), 2048, 448), ((2048, 1024), 2048, 960), ((2048, 2048), 512, 448)],
)
def test_chunks_are_as_long_as_the_hop_takes_that_takes_least(
    announced: tuple[int, ...], own: int, longest: int
) -> None:
    hops = [
        replace(one, facts=replace(one.facts, step_tokens=most))
        for one, most in zip((stage(), stage()), announced, strict=True)
    ]
    prompts = PromptQueue(equal_chunks(10_000), BatchLimits(max_tokens=own))
    prompts.add_prompt(key(1), hops, tuple(range(longest * 3)))
    lengths = []
    while key(1) in prompts:
        lengths.append(len(prompts.take_chunk(key(1))))
    assert lengths == [longest] * 3


def test_a_session_that_ends_takes_its_prompt_with_it() -> None:
    prompts = PromptQueue(equal_chunks(1), LIMITS)
    prompts.add_prompt(key(1), (), (5, 6, 7))
    prompts.add_prompt(key(2), (), (8,))
    prompts.forget_session(key(1))
    prompts.forget_session(key(1))
    assert (prompts.take_chunk(key(1)), len(prompts)) == ((), 1)


def test_what_waits_for_a_line_counts_at_its_rate_and_what_no_line_carries_does_not() -> None:
    prompts = PromptQueue(equal_chunks(10), LIMITS)
    prompts.add_prompt(key(1), (stage(), stage()), tuple(range(40)))
    prompts.add_prompt(key(2), (stage(),), tuple(range(40)))
    assert prompts.wait_s(100, None) == 0.0
    assert prompts.wait_s(100, 1000.0) == 4.0
    prompts.take_chunk(key(1))
    assert prompts.wait_s(100, 1000.0) == 3.0
    prompts.forget_session(key(1))
    assert prompts.wait_s(100, 1000.0) == 0.0
