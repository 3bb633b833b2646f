"""A draft model computes what transformers does, goes back, and guesses the larger model's tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.pipelines import stage
from transformers import LlamaConfig, LlamaForCausalLM

from molink.peer.scheduling.trip_load import ALONE, BatchLoad, TripLoad
from molink.peer.speculation.draft_drawing import STRENGTHS, DraftDrawing
from molink.peer.speculation.draft_model import (
    MOST_DRAFTED,
    SEEN_TOKENS,
    DraftCache,
    DraftLookup,
    DraftModel,
    DraftShape,
)
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.shards.spec import SamplingParams

VOCABULARY = 50


def made(tied: bool, positions: int = 512) -> tuple[LlamaForCausalLM, DraftModel]:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=positions, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    shape = DraftShape(4, 2, 8, config.rms_norm_eps, 10_000.0, positions)
    return model, DraftModel.of(shape, 2, tensors)


REFERENCE, MODEL = made(tied=True)


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, tokens: list[int]) -> np.ndarray:
    return model(torch.tensor([tokens])).logits[0, -1].numpy()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_transformers_however_the_tokens_come(tied: bool) -> None:
    reference, model = made(tied)
    tokens = [at * 7 % VOCABULARY for at in range(150)]
    at_once, one_by_one = DraftCache(model), DraftCache(model)
    expected = reference_logits(reference, tokens)
    np.testing.assert_allclose(at_once.step(tokens), expected, atol=1e-4)
    one_by_one.step(tokens[:5])
    for token in tokens[5:]:
        logits = one_by_one.step([token])
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_a_cache_that_went_back_goes_on_as_if_nothing_had_been_refused() -> None:
    cache = DraftCache(MODEL)
    cache.step([1, 2, 3, 4, 5, 6])
    cache.truncate(3)
    np.testing.assert_allclose(cache.step([9, 8]), reference_logits(REFERENCE, [1, 2, 3, 9, 8]), atol=1e-4)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8))
def test_guesses_are_the_models_likeliest_whatever_was_refused_before(trips: list[tuple[int, int]]) -> None:
    lookup, sequence = DraftLookup(MODEL), [3, 1, 4]
    lookup.extend(sequence)
    for came, guessed in trips[: examples(8)]:
        chain = lookup.begin()
        expected = list(sequence)
        for _ in range(guessed):
            guess = chain.guess()
            assert guess is not None
            assert guess[0] == int(reference_logits(REFERENCE, expected).argmax())
            assert 0 <= guess[1] < STRENGTHS
            chain.follow(guess[0])
            expected.append(guess[0])
        tokens = [(len(sequence) * 5 + at) % VOCABULARY for at in range(came)]
        lookup.extend(tokens)
        sequence += tokens


def test_where_tokens_are_drawn_each_place_of_the_sequence_has_its_own_race_however_long_it_grows() -> None:
    reference, model = made(tied=True, positions=128)
    drawing = DraftDrawing.of(SamplingParams(temperature=1.5), 3)
    assert drawing is not None
    lookup, tokens = DraftLookup(model, drawing), [at * 3 % VOCABULARY for at in range(1000)]
    lookup.begin_with(tokens)
    seen = tokens[-SEEN_TOKENS:]
    for _ in range(2):
        chain = lookup.begin()
        for place in range(3):
            guess = chain.guess()
            expected = drawing.ranked(reference_logits(reference, seen), len(tokens) + place, 1)
            assert guess == expected[0]
            chain.follow(guess[0])
            seen.append(guess[0])
        lookup.extend(seen[-3:])
        tokens += seen[-3:]


def test_a_chain_ends_after_as_many_guesses_as_may_be() -> None:
    lookup = DraftLookup(MODEL)
    lookup.extend([1])
    chain = lookup.begin()
    guesses = 0
    while (guess := chain.guess()) is not None:
        chain.follow(guess[0])
        guesses += 1
    assert guesses == MOST_DRAFTED


def test_of_a_long_prompt_the_end_is_seen_and_a_sequence_without_end_goes_on() -> None:
    _, model = made(tied=True, positions=128)
    lookup = DraftLookup(model)
    tokens = [at * 3 % VOCABULARY for at in range(1000)]
    lookup.extend(tokens)
    last = DraftLookup(model)
    last.extend(tokens[-SEEN_TOKENS:])
    assert lookup.begin().guess() == last.begin().guess()
    for token in tokens:
        lookup.extend([token])
        assert lookup.begin().guess() is not None


DRAWINGS = [None, DraftDrawing.of(SamplingParams(temperature=0.8, top_p=0.9), 3)]


@pytest.mark.parametrize("drawing", DRAWINGS, ids=["greedy", "drawn"])
def test_behind_a_token_that_it_does_not_have_nothing_is_guessed(drawing: DraftDrawing | None) -> None:
    """The model that is served may have more tokens, and a prompt or a prediction any of them."""
    lookup = DraftLookup(MODEL, drawing)
    lookup.begin_with([1, 2, VOCABULARY])
    assert lookup.begin().guess() is None
    lookup.extend([3])
    assert lookup.begin().guess() is None
    other = DraftLookup(MODEL, drawing)
    other.begin_with([1, 2, 3])
    chain = other.begin()
    assert chain.guess() is not None
    chain.follow(VOCABULARY + 7)
    assert chain.guess() is None
    other.extend([4])
    assert other.begin().guess() is not None


@pytest.mark.parametrize("drawing", DRAWINGS, ids=["greedy", "drawn"])
def test_where_its_numbers_are_broken_nothing_is_guessed(drawing: DraftDrawing | None) -> None:
    broken = DraftLookup(replace(MODEL, norm=np.full_like(MODEL.norm, np.nan)), drawing)
    broken.begin_with([1, 2, 3])
    assert broken.begin().guess() is None


def test_it_says_what_it_takes() -> None:
    weights = sum(parameter.numel() for parameter in REFERENCE.parameters())
    assert MODEL.size_bytes == 4 * weights
    assert MODEL.cache_bytes == 2 * 2 * 2 * 8 * 512 * 4


def test_a_session_asks_it_for_as_many_guesses_as_pay_their_time_and_now_and_then_for_some() -> None:
    """A guess takes all who travel along a moment: alone over distance that is nothing, in a crowd it is."""
    far = [stage(1.0, 0.01, link_ms=30)] * 3
    asked = []
    for guess_ms, load in (
        (0.1, ALONE),
        (20.0, ALONE),
        (4.0, TripLoad(BatchLoad(15, 15.0, guessing_ms=60.0))),
    ):
        guesses = SessionGuesses(stages=far, draft=replace(MODEL, guess_ms=guess_ms))
        guesses.extend([3, 5, 7, 11, 13])
        made = []
        for token in range(24):
            guesses.propose(8, load)
            made.append(round(guesses.begun.guessing_ms / guess_ms))
            guesses.extend([token])
        asked.append(made)
    alone, slow, crowded = asked
    assert alone[0] > slow[0] > 0 or slow[0] == 0 < alone[0]
    for made in (slow, crowded):
        assert sum(made) < sum(alone)
        assert 0 < sum(one > 0 for one in made) < len(made)
