"""Tokens are drawn as asked for, by (seed, position) alone, whatever else is in the batch."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices.sampling_by_row import runs_with
from support.pairwise import usually

from molink.shards.sampling.race import KEY_BITS, NUMBER_STEP, race_key, race_numbers
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import BrokenLogits, Sampled, sample
from molink.shards.spec import SamplingParams


def draw(logits: torch.Tensor, params: SamplingParams, seed: int = 7, position: int = 0) -> Sampled:
    return sample(logits[None], [SampleRequest(params, seed, position)])[0]


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> Counter[int]:
    """Tokens drawn at `count` positions of one seed."""
    requests = [SampleRequest(params, 123, position) for position in range(count)]
    return Counter(drawn.token_id for drawn in sample(logits.expand(count, -1), requests))


def chi_square(counts: Counter[int], expected: torch.Tensor, total: int) -> float:
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(expected.tolist()) if p > 0)


KEYS = [124610483232558, 17132955554443, 12504770132047]
NUMBERS = [132009734178184, 847411481882319, 3503457388938574]
LOGITS = torch.tensor([2.0, 0.5, 1.5, -1.0, 0.0, 1.0])


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 1.0], [-5.0, -4.0, -4.0]])
    requests = [SampleRequest(SamplingParams(), 0, 0)] * 3
    assert [drawn.token_id for drawn in sample(rows, requests)] == [1, 0, 1]


def test_greedy_ignores_top_k_top_p_and_seed() -> None:
    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, seed=3)
    assert [draw(LOGITS, params, seed).token_id for seed in range(5)] == [0] * 5


@pytest.mark.parametrize("temperature", usually([0.5], [1.0, 2.0]))
def test_the_distribution_is_the_softmax_at_the_temperature(temperature: float) -> None:
    counts = draws(LOGITS, SamplingParams(temperature=temperature), 20_000)
    expected = torch.softmax(LOGITS.double() / temperature, 0)
    assert chi_square(counts, expected, 20_000) < 20.5  # 5 degrees of freedom, 0.1 %


def test_top_k_keeps_the_most_likely_in_their_proportions() -> None:
    counts = draws(LOGITS, SamplingParams(temperature=1.0, top_k=3), 20_000)
    expected = torch.softmax(torch.where(LOGITS >= 1.0, LOGITS, -math.inf).double(), 0)
    assert set(counts) == {0, 2, 5}
    assert chi_square(counts, expected, 20_000) < 13.8  # 2 degrees of freedom, 0.1 %


def test_top_k_among_equals_keeps_the_lowest_ids() -> None:
    assert set(draws(torch.zeros(6), SamplingParams(temperature=1.0, top_k=2), 500)) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)
    logits = probabilities.log().float()
    for top_p, kept in ((0.39, {1}), (0.5, {1, 3}), (0.69, {1, 3}), (0.8, {1, 3, 4}), (1e-9, {1})):
        counts = draws(logits, SamplingParams(temperature=1.0, top_p=top_p), 2_000)
        assert set(counts) == kept, top_p


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draws(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55), 500)) == {0}
    assert set(draws(logits, SamplingParams(temperature=1.0, top_p=0.55), 500)) == {0, 1}


def test_a_flat_distribution_over_a_large_vocabulary_is_cut_exactly() -> None:
    vocabulary = 5_000
    counts = draws(torch.zeros(vocabulary), SamplingParams(temperature=1.0, top_p=0.5), 400)
    assert max(counts) < vocabulary // 2 + 1
    assert max(counts) > 2_000


@settings(deadline=None)
@given(
    rows=st.integers(2, 5),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    logprobs=st.sampled_from([None, 0, 4]),
)
def test_a_row_does_not_depend_on_the_others(
    rows: int, seed: int, temperature: float, top_k: int, top_p: float, logprobs: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(rows, 50, generator=generator)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, logprobs=logprobs)
    other = SamplingParams(temperature=1.0, logit_bias=((3, 50.0),), logprobs=2)
    mixed = [SampleRequest(params if row % 2 == 0 else other, seed, row) for row in range(rows)]
    together = sample(logits, mixed)
    alone = [sample(logits[row : row + 1], [request])[0] for row, request in enumerate(mixed)]
    assert together == alone
    assert sample(logits, mixed) == together


def test_seeds_and_positions_draw_independently() -> None:
    keys = [race_key(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(300)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**KEY_BITS for key in keys)
    numbers = race_numbers(torch.tensor(keys)[:, None], torch.arange(200)).double() * NUMBER_STEP
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    for along in (0, 1):
        assert float((numbers.mean(along) - 0.5).abs().max()) < 0.1
    correlated = torch.corrcoef(numbers[:, :60].T) - torch.eye(60)
    assert float(correlated.abs().max()) < 0.2
    assert (
        chi_square(
            Counter((numbers * 64).long().flatten().tolist()), torch.full((64,), 1 / 64), numbers.numel()
        )
        < 103
    )


def test_draws_are_the_same_on_every_machine_and_version() -> None:
    keys = [race_key(42, position) for position in range(3)]
    assert keys == KEYS
    assert race_numbers(torch.tensor(keys), torch.tensor([0, 1, 128_255])).tolist() == NUMBERS
    assert race_numbers(np.array(keys), np.array([0, 1, 128_255])).tolist() == NUMBERS


@given(st.integers(0, 2**48 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_tensors_arrays_and_whole_numbers_run_the_same_race(key: int, tokens: list[int]) -> None:
    of_tensors = race_numbers(torch.tensor([[key]]), torch.tensor([tokens]))
    of_arrays = race_numbers(np.array([[key]]), np.array([tokens]))
    assert of_tensors.tolist() == of_arrays.tolist()
    runs = [-math.log1p(-(number + 0.5) * NUMBER_STEP) for number in of_tensors[0].tolist()]
    assert runs == [runs_with(key, token) for token in tokens]


def test_who_knows_the_seed_and_nearly_the_distribution_draws_nearly_always_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2_000, 300, generator=generator)
    near = logits + 0.3 * torch.randn(2_000, 300, generator=generator)
    requests = [SampleRequest(SamplingParams(temperature=0.9), 5, position) for position in range(2_000)]
    ours, theirs = ([one.token_id for one in sample(rows, requests)] for rows in (logits, near))
    first, second = (torch.softmax(rows.double() / 0.9, -1) for rows in (logits, near))
    distance = (first - second).abs().sum(-1) / 2
    agreed = sum(one == other for one, other in zip(ours, theirs, strict=True)) / 2_000
    assert agreed > float(((1 - distance) / (1 + distance)).mean()) - 0.02
    assert agreed > 1.3 * float(first.gather(1, second.argmax(-1, keepdim=True)).mean())


def test_logit_bias_moves_choices_and_forbids() -> None:
    assert draw(LOGITS, SamplingParams(logit_bias=((4, 5.0),))).token_id == 4
    banned = SamplingParams(temperature=1.0, logit_bias=((0, -100.0), (2, -100.0)))
    assert set(draws(LOGITS, banned, 2_000)) == {1, 3, 4, 5}
    before = LOGITS.clone()
    draw(LOGITS, banned)
    assert torch.equal(LOGITS, before)
    with pytest.raises(ValueError, match="token 6"):
        draw(LOGITS, SamplingParams(logit_bias=((6, 1.0),)))


def test_logprobs_are_of_the_model_before_temperature_and_cuts() -> None:
    expected = torch.log_softmax(LOGITS.double(), 0)
    drawn = draw(LOGITS, SamplingParams(temperature=2.0, top_k=2, logprobs=3), seed=1)
    assert drawn.logprob == pytest.approx(float(expected[drawn.token_id]))
    assert [token for token, _ in drawn.top] == [0, 2, 5]
    assert [logprob for _, logprob in drawn.top] == pytest.approx(expected[[0, 2, 5]].tolist())
    assert draw(LOGITS, SamplingParams(logprobs=0)).top == ()
    assert draw(LOGITS, SamplingParams(logprobs=0)).logprob == pytest.approx(float(expected[0]))
    assert draw(LOGITS, SamplingParams()).logprob is None
    assert len(draw(LOGITS, SamplingParams(logprobs=20)).top) == 6


def test_tiny_temperatures_and_enormous_logits_stay_finite() -> None:
    huge = torch.tensor([1e30, -1e30, 3e30, 0.0])
    assert draw(huge, SamplingParams(temperature=1e-30)).token_id == 2
    assert draw(huge, SamplingParams(temperature=100.0, top_p=0.5, top_k=3, logprobs=2)).token_id == 2


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert set(draws(logits, SamplingParams(temperature=1.0), 300)) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_refused_and_named(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    requests = [SampleRequest(SamplingParams(temperature=temperature), 0, 0)] * 3
    with pytest.raises(BrokenLogits, match="row 1") as caught:
        sample(logits, requests)
    assert caught.value.row == 1


def test_rows_and_requests_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 requests"):
        sample(torch.zeros(1, 4), [SampleRequest(SamplingParams(), 0, 0)] * 2)
    assert sample(torch.zeros(0, 4), []) == []
