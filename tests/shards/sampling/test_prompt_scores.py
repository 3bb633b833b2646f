"""Scores of a prompt: log-softmax of the logits, in any pieces, and nothing where something is missing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.sampling import prompt_scores
from molink.shards.sampling.prompt_scores import PromptScores

VOCABULARY, HIDDEN = 50, 6
HEAD = torch.randn(HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(3))


def logits_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[0] @ HEAD


def rows(count: int) -> torch.Tensor:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(count))


def scores_of(tokens: list[int], likeliest: int) -> PromptScores:
    scores = PromptScores(len(tokens), likeliest, VOCABULARY)
    scores.token_ids = tokens
    return scores


@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    st.integers(0, 60),
    st.lists(st.integers(1, 40), max_size=3),
)
def test_pieces_of_any_length_give_the_log_softmax(
    tokens: list[int], likeliest: int, cuts: list[int]
) -> None:
    scores, hidden = scores_of(tokens, likeliest), rows(len(tokens) + 2)
    ends = sorted({cut for cut in cuts if cut < hidden.shape[1]} | {hidden.shape[1]})
    for first, stop in zip([0, *ends], ends, strict=False):
        scores.score(first, hidden[:, first:stop], logits_of)
    found, expected = scores.found(), logits_of(hidden).double().log_softmax(-1).numpy()
    count = min(likeliest, VOCABULARY)
    assert found.shape == (len(tokens) - 1, 1 + 2 * count)
    for at, token in enumerate(tokens[1:]):
        order = np.argsort(-expected[at], kind="stable")[:count]
        assert found[at, 0] == pytest.approx(expected[at, token])
        assert found[at, 1 : 1 + count].tolist() == order.tolist()
        assert found[at, 1 + count :] == pytest.approx(expected[at, order])


def test_no_more_logits_are_there_at_once_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 3 * VOCABULARY + 7)
    seen: list[int] = []

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[1])
        return logits_of(hidden)

    scores = scores_of(list(range(11)), 1)
    scores.score(0, rows(11), watched)
    assert seen == [3, 3, 3, 1]
    assert len(scores.found()) == 10


def test_what_is_missing_or_broken_is_said() -> None:
    scores = PromptScores(5, 1, VOCABULARY)
    with pytest.raises(ValueError, match="behind position 0 are not known"):
        scores.score(0, rows(5), logits_of)
    scores.token_ids = [1, 2, 3, 4, 5]
    scores.score(0, rows(2), logits_of)
    with pytest.raises(ValueError, match="behind position 2 was not scored"):
        scores.found()
    with pytest.raises(ValueError, match="no finite numbers"):
        scores.score(2, rows(2) * float("nan"), logits_of)
    scores.score(2, rows(2), logits_of)
    assert np.isfinite(scores.found()).all()
