"""A draft on the product's engine guesses what its model would say, batched or alone, wherever a sequence has gone."""

import json
from pathlib import Path

import pytest
from support.models.tiny_models import greedy_reference, make_tiny_model

from molink.peer.drafting.draft_engine import DraftEngine, DraftOrder
from molink.peer.drafting.opening import load_draft, plan_draft
from molink.shards.spec import SamplingParams

PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + 2 * one)] for one in range(8)]
PLACES = 6
VOCABULARY = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("draft"))


def opened(folder: Path, sequences: int = 8) -> DraftEngine:
    return load_draft(plan_draft(folder, "draft", "float32", None, sequences), "cpu", VOCABULARY)[0]


def guessed(draft: DraftEngine) -> dict[int, list[int]]:
    """Of all that wait, by number."""
    found: dict[int, list[int]] = {}
    while draft.waits:
        found |= {number: [token for token, _ in guesses] for number, _, guesses in draft.guess_next()}
    return found


def begin(draft: DraftEngine, number: int, prompt: list[int]) -> None:
    draft.open(number, SamplingParams(), 0)
    draft.take(DraftOrder(number, tuple(prompt), len(prompt)))
    while draft.lacks:
        draft.compute_next()


def ask(draft: DraftEngine, number: int, tokens: list[int], length: int, places: int = PLACES) -> bool:
    return draft.take(DraftOrder(number, tuple(tokens), length, places))


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "gpt2", pytest.param("gemma", marks=pytest.mark.full)])
def test_guesses_are_those_of_transformers_after_whatever_was_accepted(
    architecture: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(architecture, tmp_path)
    draft, sequence = opened(folder), list(PROMPTS[0])
    begin(draft, 0, sequence)
    new = [greedy_reference(folder, sequence, 1)[0]]
    for accepted in (0, PLACES, 2, 1, PLACES - 1):
        sequence += new
        assert ask(draft, 0, new, len(sequence))
        expected = greedy_reference(folder, sequence, PLACES + 1)
        assert guessed(draft)[0] == expected[:PLACES]
        new = [*expected[:accepted], (expected[accepted] + 1) % 256]
    draft.close(0)
    assert draft.engine.pool.tables == 0
    draft.engine.pool.check_integrity()


@pytest.mark.full
def test_eight_sequences_that_join_and_leave_guess_what_each_would_alone(folder: Path) -> None:
    draft = opened(folder)
    for number, prompt in enumerate(PROMPTS):
        begin(draft, number, prompt)
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):  # one more at each place, each for another number of places
        assert ask(draft, number, [5], len(prompt) + 1, 2 + number % 5)
        if number == 4:
            draft.close(2)
        for ended, _, guesses in draft.guess_next():
            found[ended] = [token for token, _ in guesses]
    found |= guessed(draft)
    for number, prompt in enumerate(PROMPTS):
        expected = greedy_reference(folder, [*prompt, 5], 2 + number % 5)
        assert number == 2 or found[number] == expected
        draft.close(number)
    assert draft.engine.pool.tables == 0


def test_beyond_the_window_the_end_is_seen_and_computed_while_nobody_waits(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    draft = opened(folder)
    assert draft.window_tokens == 64
    sequence = [(7 * at + 1) % 60 for at in range(48)]
    begin(draft, 0, sequence)
    draft.part_tokens = 16
    assert not ask(draft, 0, [9, 8], 50)  # it begins anew with 32 tokens
    sequence += [9, 8]
    while draft.lacks:
        draft.compute_next()
    assert ask(draft, 0, [7], 51)
    seen = [*sequence[-32:], 7]
    assert guessed(draft)[0] == greedy_reference(folder, seen, PLACES)


def test_a_token_that_the_draft_does_not_have_is_not_guessed_behind(folder: Path) -> None:
    draft = opened(folder)
    begin(draft, 0, PROMPTS[0])
    assert not ask(draft, 0, [draft.engine.spec.vocabulary_size], 10)
    assert not draft.waits


def test_what_it_takes_is_known_before_and_bounds_its_caches(folder: Path) -> None:
    planned = plan_draft(folder, "draft", "float32", None, 3)
    draft = load_draft(planned, "cpu", VOCABULARY)[0]
    for number in range(3):
        begin(draft, number, PROMPTS[number])
    assert draft.engine.pool.used_bytes <= planned.cache_bytes
    assert draft.engine.weight_bytes + planned.cache_bytes <= 1.05 * planned.needed_bytes
    with pytest.raises(Exception, match="KV cache"):
        draft.open(3, SamplingParams(), 0)


def test_models_that_cannot_go_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="states"):
        plan_draft(make_tiny_model("qwen3_next", tmp_path), "draft", "float32", None, 3)
    with pytest.raises(ValueError, match="sees 8 tokens"):
        plan_draft(make_tiny_model("gemma3", tmp_path), "draft", "float32", None, 3)
