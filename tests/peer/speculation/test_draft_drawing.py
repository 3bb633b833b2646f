"""A draft model draws in the race that the tail draws in: with the same distribution it guesses every token."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.speculation.draft_drawing import STRENGTHS, DraftDrawing, first_ranked
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import sample
from molink.shards.spec import SamplingParams
from molink.simnet.core.generations import GenerationTape
from molink.simnet.core.guessing import SimulatedSpeculation, TapeGuesser

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 49, 50, 1000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)


def logits_of(seed: int, rows: int, vocabulary: int = 50) -> torch.Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@given(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 4))
def test_of_the_tails_own_logits_it_ranks_the_tails_token_first(
    params: SamplingParams, seed: int, noise: int, count: int
) -> None:
    logits = logits_of(noise, 6)
    requests = [SampleRequest(params, seed, 100 + row) for row in range(6)]
    drawing = DraftDrawing.of(params, seed)
    assert drawing is not None
    for row, one in enumerate(sample(logits, requests)):
        ranked = drawing.ranked(logits[row].numpy(), 100 + row, count)
        assert ranked[0][0] == one.token_id
        assert 1 <= len(ranked) <= count
        assert len({token for token, _ in ranked}) == len(ranked)
        assert all(0 <= strength < STRENGTHS for _, strength in ranked)


def test_greedy_sessions_have_none_and_guess_the_likeliest_tokens() -> None:
    assert DraftDrawing.of(SamplingParams(), 3) is None
    logits = np.array([0.0, 5.0, 1.0, 3.0], np.float32)
    assert [token for token, _ in first_ranked(None, logits, 9, 3)] == [1, 3, 2]
    assert first_ranked(None, logits, 9, 1) == [(1, 6)]


def test_what_won_clearly_is_right_more_often() -> None:
    """Of another distribution that is near it."""
    params = SamplingParams(temperature=0.8, top_p=0.9)
    theirs = logits_of(1, 3000)
    ours = theirs + 0.7 * logits_of(2, 3000) / 2
    drawing = DraftDrawing.of(params, 11)
    assert drawing is not None
    right: list[list[bool]] = [[] for _ in range(STRENGTHS)]
    drawn = sample(theirs, [SampleRequest(params, 11, row) for row in range(3000)])
    for row, one in enumerate(drawn):
        (token, strength), *_ = drawing.ranked(ours[row].numpy(), row, 1)
        right[strength].append(token == one.token_id)
    shares = [np.mean(one) for one in right]
    assert shares[-1] > 0.8
    assert shares[-1] > shares[4] > shares[0]
    likeliest = np.mean([int(ours[row].argmax()) == one.token_id for row, one in enumerate(drawn)])
    assert np.mean([*chain.from_iterable(right)]) > likeliest + 0.15


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 5])
def test_simulated_drafts_race_as_recorded_tokens_did(number: int) -> None:
    """Through a recorded text's end, and the prompt of the next one."""
    tokens_per_trip = []
    for drafts in (False, True):
        guesser = TapeGuesser(SimulatedSpeculation(fixed=4, temperature=0.8, drafts=drafts), number, ())
        generated = trips = 0
        while generated < 400:
            _, begun = guesser.propose(None, 4, load=None)  # type: ignore[arg-type]
            guesser.record_trip([None] * (guesser.right + 1), begun.guesses)
            generated += guesser.right + 1
            trips += 1
        tokens_per_trip.append(generated / trips)
    without, drafted = tokens_per_trip
    assert without < 1.4
    assert drafted > 2.0
    assert GenerationTape(number, 0.0).drawing() is None
