"""Few cases in which every two values of any two parameters meet (Cohen et al., "The AETG system", 1997). Pure."""

import itertools
from collections.abc import Sequence
from typing import Any

Pair = tuple[tuple[int, int], tuple[int, int]]
"""Two parameters, each with the index of a value."""


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each case has one value of every parameter, and is begun with a pair that no case has yet; its other values are
    those that bring the most new pairs. The same cases in every run."""
    sizes = [len(values) for values in parameters]
    missing: dict[Pair, None] = {
        ((one, a), (other, b)): None
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for a, b in itertools.product(range(sizes[one]), range(sizes[other]))
    }
    cases = []
    while missing:
        chosen = dict(next(iter(missing)))
        for place in (place for place in range(len(sizes)) if place not in chosen):
            chosen[place] = max(
                range(sizes[place]),
                key=lambda value, at=place: sum(pair in missing for pair in _with(chosen, at, value)),  # type: ignore[misc]
            )
        for pair in itertools.combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        cases.append(tuple(values[chosen[place]] for place, values in enumerate(parameters)))
    return cases


def _with(chosen: dict[int, int], place: int, value: int) -> list[Pair]:
    """The pairs that this value makes with those chosen."""
    return [
        ((other, at), (place, value)) if other < place else ((place, value), (other, at))
        for other, at in chosen.items()
    ]
