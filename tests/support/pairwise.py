"""Values and combinations of which every run takes some, those that hold each pair of two, and `make test-full` all."""

from collections.abc import Iterable, Sequence
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


def usually(some: Sequence[object], values: Iterable[object]) -> list[object]:
    """For `pytest.mark.parametrize`: some in every run, the other values in `make test-full`. A tuple has a value for
    each name."""
    others = [one for one in values if one not in some]
    return [
        *some,
        *(pytest.param(*one if isinstance(one, tuple) else (one,), marks=pytest.mark.full) for one in others),
    ]
