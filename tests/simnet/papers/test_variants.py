"""Which algorithms a list of names stands for."""

import re

import pytest

from molink.simnet.papers.scheduling.variants import Variant, in_paper_order, parse_variants

OFFERED = ("random", "ilp", "augmented", "greedy")
LIMITS_S = {"ilp": (4.0, 16.0)}
SAMPLES = (1, 64)


def labels(*names: str) -> list[str]:
    return [variant.label for variant in parse_variants(names, OFFERED, LIMITS_S, SAMPLES)]


def test_a_bare_name_is_multiplied_by_its_limits_or_samples() -> None:
    assert labels("greedy", "ilp", "random") == ["greedy", "ilp4", "ilp16", "random1", "random64"]


def test_a_number_sets_seconds_and_for_random_permutations() -> None:
    assert parse_variants(["ilp0.5", "random7"], OFFERED, LIMITS_S, SAMPLES) == (
        Variant("ilp", time_limit_s=0.5),
        Variant("random", samples=7),
    )


def test_what_is_named_twice_is_run_once() -> None:
    assert labels("ilp16", "ilp", "ilp16") == ["ilp16", "ilp4"]


def test_algorithms_come_in_the_papers_order_and_new_ones_after() -> None:
    assert in_paper_order([*OFFERED, "annealed"]) == ["greedy", "augmented", "ilp", "random", "annealed"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("dijkstra", "there is no algorithm 'dijkstra': choose from greedy, augmented, ilp, random"),
        ("4", "there is no algorithm '4': choose from greedy, augmented, ilp, random"),
        ("ilp--1", "there is no algorithm 'ilp--1': choose from greedy, augmented, ilp, random"),
        ("ilp0", "'ilp0': the seconds of ilp must be above 0, got 0"),
        ("ilp-1", "'ilp-1': the seconds of ilp must be above 0, got -1"),
        ("random0", "'random0': the permutations of random must be a whole number, 1 or more, got 0"),
        ("random-4", "'random-4': the permutations of random must be a whole number, 1 or more, got -4"),
        ("random1.5", "'random1.5': the permutations of random must be a whole number, 1 or more, got 1.5"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        labels(name)
