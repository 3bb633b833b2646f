"""Choosing a circuit: one entry for all algorithms."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from molink.routing.augmented import plan_augmented
from molink.routing.circuit import Circuit
from molink.routing.problem import CircuitProblem

Algorithm = Callable[[CircuitProblem, float | None, int], Circuit]
"""Problem, time limit in seconds (None: the algorithm's own) and seed to circuit; raises NoCircuit."""


def _augmented(problem: CircuitProblem, time_limit_s: float | None, seed: int) -> Circuit:  # noqa: ARG001
    """Neither limit nor seed: the search is bounded by its number of labels and draws nothing."""
    return plan_augmented(problem)


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({"augmented": _augmented})
"""What `plan_circuit` offers, by name."""


def plan_circuit(
    problem: CircuitProblem, algorithm: str = "augmented", time_limit_s: float | None = None, seed: int = 0
) -> Circuit:
    """A circuit through all layers of the problem whose TPOT is as low as the algorithm can make it.

    `time_limit_s` and `seed` are for algorithms that search until a deadline or draw at random; `augmented`
    does neither. Raises NoCircuit with the shortfall if the problem has no circuit, and ValueError for an
    unknown algorithm.
    """
    chosen = ALGORITHMS.get(algorithm)
    if chosen is None:
        raise ValueError(f"algorithm must be one of {', '.join(sorted(ALGORITHMS))}, got {algorithm!r}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise ValueError(f"time_limit_s must be above 0 or None, got {time_limit_s}")
    return chosen(problem, time_limit_s, seed)
