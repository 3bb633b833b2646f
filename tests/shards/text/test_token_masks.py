"""Masks let come what the grammar allows, and a grammar that cannot be followed is an error of it alone, soon."""

import json
import random
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.models.random_schemas import random_schema
from support.properties import examples
from support.swarms.live_swarms import bundled_folder

from molink.shards.checkpoint.store import read_manifest
from molink.shards.grammar import Grammar
from molink.shards.text.token_masks import GrammarFailed, MaskTokenizer, TokenMasks
from molink.shards.text.tokenizer import Tokenizer

VOCABULARY = 1024
STOP = 1
SCHEMA = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.from_folder(bundled_folder())


@pytest.fixture(scope="module")
def tokenizer(plain: Tokenizer) -> MaskTokenizer:
    return MaskTokenizer(plain, VOCABULARY, [STOP])


def allowed(masks: TokenMasks) -> list[int]:
    mask, _ = masks.next()
    return [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]


def generated(tokenizer: MaskTokenizer, plain: Tokenizer, grammar: Grammar, seed: int) -> str:
    """Any tokens that the masks let come, up to the end of the text."""
    rng, masks, tokens = random.Random(seed), TokenMasks(tokenizer, grammar), list[int]()
    while len(tokens) < 2000:
        token = rng.choice(allowed(masks))
        if token == STOP:
            return plain.decode(tokens)
        tokens.append(token)
        masks.follow([token])
    raise AssertionError("the text does not end")


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60) // 3, deadline=None)
def test_whatever_masks_let_come_is_valid_for_the_schema(
    tokenizer: MaskTokenizer, plain: Tokenizer, seed: int
) -> None:
    schema = random_schema(seed)
    text = generated(tokenizer, plain, Grammar.json_schema(schema), seed)
    Draft202012Validator(schema).validate(json.loads(text))


def test_who_follows_the_same_tokens_has_the_same_masks(tokenizer: MaskTokenizer, plain: Tokenizer) -> None:
    text = plain.encode('{"a": 12')
    stepwise, together = TokenMasks(tokenizer, SCHEMA), TokenMasks(tokenizer, SCHEMA)
    for token in text:
        stepwise.next()
        stepwise.follow([token])
    together.follow(text)
    assert stepwise.next() == together.next()


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60) // 3, deadline=None)
def test_behind_tokens_that_are_expected_comes_what_comes_when_they_have_come(
    tokenizer: MaskTokenizer, plain: Tokenizer, seed: int
) -> None:
    """And who asks what is expected has the masks of who does not."""
    rng, grammar = random.Random(seed), Grammar.json_schema(random_schema(seed))
    asks, does_not = TokenMasks(tokenizer, grammar), TokenMasks(tokenizer, grammar)
    text: list[int] = []
    while len(text) < 200:
        found = asks.next()
        assert found == does_not.next()
        expected = asks.expected(rng.randrange(16))
        if expected and rng.random() < 0.7:
            come = [token for token, _, _ in expected[: rng.randint(1, len(expected))]]
            for at, token in enumerate(come):
                does_not.follow([token])
                assert does_not.next() == expected[at][1:]
        else:
            come = [rng.choice([at for at in range(VOCABULARY) if found[0][at // 8] >> at % 8 & 1])]
            if come[0] == STOP:
                return
            does_not.follow(come)
        asks.follow(come)
        text += come


def test_names_are_expected_and_so_is_the_form_that_they_had_before(
    tokenizer: MaskTokenizer, plain: Tokenizer
) -> None:
    one = {name: {"type": "integer"} for name in ("name", "place")}
    items = {"type": "object", "properties": one, "required": [*one], "additionalProperties": False}
    masks = TokenMasks(tokenizer, Grammar.json_schema({"type": "array", "items": items}))
    text = plain.encode(json.dumps([{"name": 12 + at, "place": 34 + at} for at in range(8)]))
    trips, left = 0, text
    while left:
        masks.next()
        expected = [token for token, _, _ in masks.expected(15)]
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(expected, left[:-1], strict=False))
        come = 1 + len(list(pairs))
        masks.follow(left[:come])
        left, trips = left[come:], trips + 1
    assert trips < 0.6 * len(text), (trips, len(text))


def test_a_text_that_can_only_end_says_so(tokenizer: MaskTokenizer, plain: Tokenizer) -> None:
    masks = TokenMasks(tokenizer, Grammar.regex("to be"))
    assert masks.next()[1] is False
    masks.follow(plain.encode("to be"))
    assert masks.next()[1] is True
    assert allowed(masks) == [STOP]


def test_tokens_that_the_grammar_does_not_allow_are_an_error(
    tokenizer: MaskTokenizer, plain: Tokenizer
) -> None:
    masks = TokenMasks(tokenizer, SCHEMA)
    with pytest.raises(GrammarFailed):
        masks.follow(plain.encode("no JSON"))


def test_a_model_without_an_end_serves_no_grammars(plain: Tokenizer) -> None:
    with pytest.raises(GrammarFailed, match="no token that ends a text"):
        MaskTokenizer(plain, VOCABULARY, [])


def test_the_bundled_models_own_stop_tokens_end_a_text(plain: Tokenizer) -> None:
    assert read_manifest(bundled_folder()).content_hash
    masks = TokenMasks(MaskTokenizer(plain, VOCABULARY, [0, STOP]), Grammar.regex("a?"))
    assert {0, STOP} < set(allowed(masks))
