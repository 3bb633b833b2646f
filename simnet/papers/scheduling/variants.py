"""The algorithms to compare, as the paper's columns name them: `augmented`, `ilp16`, `random4096`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from molink.routing import CircuitProblem, plan_circuit
from molink.routing.problem.circuit import Circuit

PAPER_ORDER = ("greedy", "augmented", "refined", "ilp", "random", "balanced")
"""The order in which algorithms are shown; what is not named here comes after."""

_NUMBERED = re.compile(r"([a-z][a-z-]*?)(-?\d+(?:\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class Variant:
    """An algorithm with the effort that it may make."""

    algorithm: str
    time_limit_s: float | None = None
    """None: the algorithm's own."""
    samples: int | None = None
    """How many permutations `random` tries. None: its own number."""

    @property
    def label(self) -> str:
        """The paper's name of the column: the algorithm, and its seconds or samples if they were given."""
        if self.samples is not None:
            return f"{self.algorithm}{self.samples}"
        return self.algorithm if self.time_limit_s is None else f"{self.algorithm}{self.time_limit_s:g}"

    def plan(self, problem: CircuitProblem, seed: int) -> Circuit:
        """The circuit that it finds; raises NoCircuit if it finds none."""
        if self.samples is not None:
            return plan_circuit(problem, self.algorithm, samples=self.samples, seed=seed)
        return plan_circuit(problem, self.algorithm, time_limit_s=self.time_limit_s, seed=seed)


def parse_variants(
    names: Sequence[str],
    offered: Iterable[str],
    limits_s: Mapping[str, Sequence[float]],
    random_samples: Sequence[int],
) -> tuple[Variant, ...]:
    """The variants that the names stand for, each once, in the order given.

    A name is an algorithm of `offered`, which `limits_s` and `random_samples` may multiply, or one with its
    effort: seconds (`ilp16`, `refined0.1`), for `random` permutations (`random64`). Raises ValueError with one
    sentence for anything else.
    """
    known = in_paper_order(offered)
    chosen: list[Variant] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None or match[1] not in known:
            raise ValueError(f"there is no algorithm {name!r}: choose from {', '.join(known)}")
        if match[2] is None:
            chosen += _of_algorithm(name, limits_s, random_samples)
        else:
            chosen.append(_with_effort(name, match[1], match[2]))
    return tuple(dict.fromkeys(chosen))


def in_paper_order(algorithms: Iterable[str]) -> list[str]:
    """Sorted as the tables show them."""
    place = {name: number for number, name in enumerate(PAPER_ORDER)}
    return sorted(algorithms, key=lambda name: (place.get(name, len(place)), name))


def _of_algorithm(
    name: str, limits_s: Mapping[str, Sequence[float]], random_samples: Sequence[int]
) -> list[Variant]:
    if name == "random":
        return [Variant(name, samples=samples) for samples in random_samples]
    limits = limits_s.get(name, ())
    return [Variant(name, time_limit_s=limit) for limit in limits] if limits else [Variant(name)]


def _with_effort(name: str, algorithm: str, effort: str) -> Variant:
    if algorithm != "random":
        if float(effort) <= 0:
            raise ValueError(f"{name!r}: the seconds of {algorithm} must be above 0, got {effort}")
        return Variant(algorithm, time_limit_s=float(effort))
    if "." in effort or int(effort) < 1:
        raise ValueError(
            f"{name!r}: the permutations of random must be a whole number, 1 or more, got {effort}"
        )
    return Variant(algorithm, samples=int(effort))
