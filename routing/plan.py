"""Choosing a circuit: one entry for all algorithms."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from molink.routing.baselines.balanced import plan_balanced
from molink.routing.baselines.greedy import plan_greedy
from molink.routing.baselines.ilp import plan_ilp
from molink.routing.baselines.random_search import plan_random
from molink.routing.problem.circuit import Circuit
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.shortfall import unserved
from molink.routing.search.augmented import plan_augmented
from molink.routing.search.refined import plan_refined


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Search effort of an algorithm; each takes from it what it knows."""

    time_limit_s: float | None = None
    """None: the algorithm's own end."""
    seed: int = 0
    samples: int = 4096

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ValueError(f"time_limit_s must be above 0 or None, got {self.time_limit_s}")
        for name, least in (("seed", 0), ("samples", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


Algorithm = Callable[[CircuitProblem, SearchEffort], Circuit]
"""Raises NoCircuit if the problem has no circuit."""

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "augmented": lambda problem, _: plan_augmented(problem),
        "balanced": lambda problem, _: plan_balanced(problem),
        "greedy": lambda problem, effort: plan_greedy(problem, effort.time_limit_s),
        "ilp": lambda problem, effort: plan_ilp(problem, effort.time_limit_s, effort.seed),
        "random": lambda problem, effort: plan_random(problem, effort.samples, effort.seed),
        "refined": lambda problem, effort: plan_refined(problem, effort.time_limit_s, effort.seed),
    }
)
"""What `plan_circuit` offers, by name."""


def plan_circuit(
    problem: CircuitProblem,
    algorithm: str = "augmented",
    time_limit_s: float | None = None,
    seed: int = 0,
    samples: int = 4096,
) -> Circuit:
    """A circuit through all layers of the problem whose TPOT is as low as the algorithm can make it.

    `time_limit_s` is for `greedy`, `ilp` and `refined`, `seed` for `random`, `ilp` and `refined`, `samples` for
    `random`; the others neither stop at a limit nor draw. Only `ilp` looks at a clock, HiGHS's own: `greedy` and
    `refined` count work as time, so that equal problems give equal circuits.

    Raises NoCircuit with the shortfall if the problem has no circuit, TimeLimitReached if `ilp` finds none in
    time, and ValueError for an unknown algorithm, a time limit that is not above 0, a seed below 0 or fewer
    than one sample.
    """
    chosen = ALGORITHMS.get(algorithm)
    if chosen is None:
        raise ValueError(f"algorithm must be one of {', '.join(sorted(ALGORITHMS))}, got {algorithm!r}")
    effort = SearchEffort(time_limit_s, seed, samples)
    if (error := unserved(problem)) is not None:  # clients ask again and again: no search for what cannot be
        raise error
    return chosen(problem, effort)
