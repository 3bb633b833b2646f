"""Values and combinations of which every run takes some, those that hold each pair of two, and `make test-full` all."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest


def pairwise(*factors: Sequence[object]) -> list[object]:
    """All combinations of one value of each factor, for `pytest.mark.parametrize`.

    A list found greedily, the same in every run, holds each pair of values of two factors at least once; what is not in
    it is marked `full`.
    """
    places = list(combinations(range(len(factors)), 2))
    every = list(product(*(range(len(factor)) for factor in factors)))
    held = {one: {(a, b, one[a], one[b]) for a, b in places} for one in every}
    missing, chosen = set().union(*held.values()), set()
    while missing:
        best = max(every, key=lambda one: len(held[one] & missing))
        chosen.add(best)
        missing -= held[best]
    return [
        pytest.param(
            *(factor[at] for factor, at in zip(factors, one, strict=True)),
            marks=() if one in chosen else pytest.mark.full,
        )
        for one in every
    ]


def usually(some: Sequence[object], others: Sequence[object]) -> list[object]:
    """For `pytest.mark.parametrize`: some in every run, the others in `make test-full`; a tuple is a value of each
    name."""
    return [
        *some,
        *(pytest.param(*one if isinstance(one, tuple) else (one,), marks=pytest.mark.full) for one in others),
    ]
