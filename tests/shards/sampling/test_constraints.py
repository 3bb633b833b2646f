"""Penalties, masks and min_p make of logits what their formulas say, each row's own, whatever the others ask for."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.devices.sampling_by_row import sample_by_row
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from molink.shards.sampling.constraints import constrain
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import Sampled, sample_each
from molink.shards.sampling.token_history import SeenTokens, TokenHistory
from molink.shards.spec import SamplingParams

VOCABULARY = 67
TOKENS = st.integers(0, VOCABULARY - 1)
PENALTIES = st.builds(
    SamplingParams,
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.05, 20),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    logprobs=st.sampled_from([None, 0, 3]),
)


def logits_of(rows: int, seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def seen(prompt: Sequence[int], generated: Sequence[int]) -> SeenTokens:
    history = TokenHistory(len(prompt))
    history.extend([*prompt, *generated])
    return history.seen()


def constrained(logits: torch.Tensor, *requests: SampleRequest) -> torch.Tensor:
    changed = logits.clone()
    constrain(changed, requests)
    return changed


def bits(allowed: Sequence[int], size: int = -(-VOCABULARY // 8)) -> bytes:
    mask = bytearray(size)
    for token in allowed:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@st.composite
def requests(draw: st.DrawFn) -> SampleRequest:
    params = draw(PENALTIES)
    history = draw(st.none() | st.tuples(st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=9)))
    allowed = draw(st.none() | st.sets(TOKENS, min_size=6))
    left_out = draw(st.sets(TOKENS, max_size=4)) - ({min(allowed)} if allowed else set())
    return SampleRequest(
        params,
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 500)),
        None if history is None else seen(*history),
        tuple(left_out),
        None if allowed is None else bits(sorted(allowed)),
    )


@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, max_size=12), st.floats(0.05, 20))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], generated: list[int], penalty: float
) -> None:
    logits = logits_of(1)
    request = SampleRequest(SamplingParams(repetition_penalty=penalty), 0, 0, seen(prompt, generated))
    ids = torch.tensor([[*prompt, *generated]], dtype=torch.long)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()) if ids.numel() else logits
    assert torch.equal(constrained(logits, request), expected)


@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, max_size=12), st.floats(-2, 2), st.floats(-2, 2))
def test_frequency_and_presence_penalties_are_those_of_openai_over_generated_tokens(
    prompt: list[int], generated: list[int], frequency: float, presence: float
) -> None:
    logits = logits_of(1)
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    changed = constrained(logits, SampleRequest(params, 0, 0, seen(prompt, generated)))
    counts = Counter(generated)
    for token in range(VOCABULARY):
        taken = counts[token] * frequency + (counts[token] > 0) * presence
        assert math.isclose(changed[0, token], logits[0, token] - taken, abs_tol=1e-5)


@given(st.floats(0.001, 1), st.sampled_from([0.3, 1.0, 2.5]))
def test_min_p_leaves_what_transformers_leaves(min_p: float, temperature: float) -> None:
    logits = logits_of(4)
    params = SamplingParams(min_p=min_p, temperature=temperature)
    changed = constrained(logits, *[SampleRequest(params, 0, 0)] * 4)
    expected = MinPLogitsWarper(min_p)(None, logits / temperature)
    close = ((logits - logits.amax(-1, keepdim=True)) / temperature - math.log(min_p)).abs() < 1e-5
    assert torch.equal(changed.isinf() | close, expected.isinf() | close)


@given(st.sets(TOKENS), st.integers(0, 12))
def test_only_what_a_mask_allows_is_left_and_beyond_its_end_nothing(allowed: set[int], size: int) -> None:
    logits = logits_of(1)
    mask = bits(sorted(allowed))[:size]
    (changed,) = constrained(logits, SampleRequest(SamplingParams(), 0, 0, allowed=mask))
    left = {token for token in allowed if token < 8 * size}
    assert set((~changed.isinf()).nonzero()[:, 0].tolist()) == left


@given(st.lists(requests(), min_size=1, max_size=5), st.integers(0, 9))
def test_rows_that_are_drawn_together_have_the_tokens_that_they_have_alone(
    asked: list[SampleRequest], seed: int
) -> None:
    logits = logits_of(len(asked), seed)
    together = sample_each(logits, asked)
    alone = [sample_each(logits[row : row + 1], [one])[0] for row, one in enumerate(asked)]
    by_row = sample_by_row(logits, asked)
    for row, (one, other, defined) in enumerate(zip(together, alone, by_row, strict=True)):
        assert isinstance(one, Sampled), (one, asked[row])
        assert one == other
        assert isinstance(defined, Sampled)
        assert one.token_id == defined.token_id
        assert [token for token, _ in one.top] == [token for token, _ in defined.top]
        if one.logprob is not None:
            assert math.isclose(one.logprob, defined.logprob or 0.0, abs_tol=1e-9)


def test_log_probabilities_are_those_before_penalties_and_masks() -> None:
    logits = logits_of(1)
    best = int(logits.argmax())
    params = SamplingParams(logprobs=2)
    (free,) = sample_each(logits, [SampleRequest(params, 0, 0)])
    (masked,) = sample_each(logits, [SampleRequest(params, 0, 0, left_out=(best,))])
    assert isinstance(free, Sampled)
    assert isinstance(masked, Sampled)
    assert masked.token_id != best
    assert masked.top == free.top
    assert masked.logprob == dict(masked.top)[masked.token_id]


def test_a_row_of_which_nothing_is_left_fails_alone() -> None:
    logits = logits_of(2)
    nothing = SampleRequest(SamplingParams(), 0, 0, allowed=b"")
    failed, drawn = sample_each(logits, [nothing, SampleRequest(SamplingParams(), 0, 0)])
    assert isinstance(failed, ValueError)
    assert drawn == Sampled(int(logits[1].argmax()), None, ())


def test_constraints_read_nothing_on_a_device_that_has_nothing_to_read() -> None:
    params = SamplingParams(temperature=1, min_p=0.1, repetition_penalty=2, frequency_penalty=1)
    request = SampleRequest(params, 0, 0, seen([1, 2], [3]), (4,), bits([5, 6]))
    constrain(torch.empty(3, VOCABULARY, device="meta"), [request] * 3)


@pytest.mark.parametrize("kind", ["penalties", "mask", "min_p"])
def test_sessions_that_ask_for_nothing_are_drawn_from_the_logits_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SampleRequest(SamplingParams(temperature=0.8), 3, 9)
    asked = {
        "penalties": replace(plain, params=SamplingParams(repetition_penalty=2), seen=seen([1, 2], [3])),
        "mask": replace(plain, allowed=bits([4, 5])),
        "min_p": replace(plain, params=SamplingParams(temperature=0.8, min_p=0.5)),
    }[kind]
    logits, rows = logits_of(4), []
    monkeypatch.setattr(
        "molink.shards.sampling.sampling.constrain",
        lambda changed, requests: (rows.append(len(requests)), constrain(changed, requests)),
    )
    before = logits.clone()
    sample_each(logits, [plain, asked, plain, plain])
    sample_each(logits, [plain] * 4)
    assert rows == [1]
    assert torch.equal(logits, before)


HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(TOKENS, max_size=100)),
        st.tuples(st.just("cut"), st.integers(0, 120)),
    ),
    max_size=12,
)


@given(st.integers(0, 40), HISTORY)
def test_a_history_counts_what_it_has_whatever_was_added_and_cut(prompt_tokens: int, changes: list) -> None:
    history, tokens = TokenHistory(prompt_tokens), []
    for what, value in changes:
        if what == "extend":
            history.extend(value)
            tokens += value
        else:
            history.cut(value)
            del tokens[value:]
    assert len(history) == len(tokens)
    found = history.seen()
    everywhere = {token: count for token, count, _ in zip(*found.parts, strict=True) if count}
    generated = {token: count for token, _, count in zip(*found.parts, strict=True) if count}
    assert everywhere == Counter(tokens)
    assert generated == Counter(tokens[prompt_tokens:])
