"""Which tokens a draft model guesses: the likeliest ones, or the ones that its own distribution draws in the race that
the tail will draw in (`shards/sampling/race.py`). Pure.

A sampled token is often not the likeliest one, but the head knows the session's seed, and so the numbers that tokens
will run with. The draft model cuts its distribution as the tail does and lets it race with the same numbers: of what
the bundled model draws at temperature 0.8 and top_p 0.9 that guesses 0.69, where its likeliest token is right for 0.44
(decision 0064). What a guess won by says how sure it is: the closer the second one came, the sooner another
distribution is won by another token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from molink.shards.sampling.race import NUMBER_STEP, race_key, race_numbers
from molink.shards.spec import SamplingParams

STRENGTHS = 8
"""Of guesses, in equal parts: by the probability that the draft model gives to it where the likeliest is guessed; by
how much it won where it was drawn."""
Logits: TypeAlias = NDArray[np.float32]
Ranked: TypeAlias = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DraftDrawing:
    """How the tokens of a session are drawn, as far as it is known before they are: penalties, biases and grammars are
    left out, for which a draft model is right less often."""

    params: SamplingParams
    """With a temperature above 0."""
    key_at: Callable[[int], int]
    """The race of the token at a position of the sequence."""

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> "DraftDrawing | None":
        """Of a session with that seed; None: it is greedy."""
        return cls(params, partial(race_key, seed)) if params.temperature > 0 else None

    def ranked(self, logits: Logits, position: int, count: int) -> Ranked:
        """At most so many tokens for that position, the winner of the race first, and how strong guesses they are: that
        one by how far ahead it is, the others by how close they come."""
        weights = self._weights(logits)
        numbers = race_numbers(np.array(self.key_at(position)), np.arange(len(logits)))
        shares = weights / -np.log1p(-(numbers + 0.5) * NUMBER_STEP)
        found = self._first(weights, shares, max(2, count))
        most = found[0][1]
        behind = [share / most for _, share in found[1:]]
        measures = [1 - max(behind, default=0.0), *behind]
        return [(token, _strength(one)) for (token, _), one in zip(found[:count], measures, strict=False)]

    def _weights(self, logits: Logits) -> NDArray[np.float64]:
        """Of all tokens, 1 of the likeliest; 0 where min_p or top_k leave it out."""
        params = self.params
        weights: NDArray[np.float64] = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
        if params.min_p:
            weights[weights < params.min_p] = 0
        if 0 < params.top_k < len(weights):
            weights[weights < np.partition(weights, -params.top_k)[-params.top_k]] = 0
        return weights

    def _first(
        self, weights: NDArray[np.float64], shares: NDArray[np.float64], count: int
    ) -> list[tuple[int, float]]:
        """Those with the largest shares that top_p leaves, in order. One is left out if the likelier ones together
        reach top_p, and with it all that are less likely: nothing has to be put in order for that."""
        reach = self.params.top_p * weights.sum()
        found: list[tuple[int, float]] = []
        while len(found) < count and (share := shares[token := int(shares.argmax())]) > 0:
            if self.params.top_p < 1 and weights[weights > weights[token]].sum() >= reach:
                shares[weights <= weights[token]] = 0
            else:
                found.append((token, float(share)))
                shares[token] = 0
        return found


def first_ranked(drawing: DraftDrawing | None, logits: Logits, position: int, count: int) -> Ranked:
    """As `DraftDrawing.ranked`; without a drawing the likeliest tokens, and how likely they are."""
    if drawing is not None:
        return drawing.ranked(logits, position, count)
    tokens = [int(logits.argmax())] if count == 1 else np.argsort(-logits, kind="stable")[:count].tolist()
    weights = np.exp(logits - logits[tokens[0]])
    total = float(weights.sum())
    return [(token, _strength(float(weights[token]) / total)) for token in tokens]


def _strength(part: float) -> int:
    return min(STRENGTHS - 1, int(STRENGTHS * part))
