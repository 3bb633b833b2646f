"""Comparing circuit searches: many problems, several algorithms, averages beside the paper's own."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from molink.routing import CircuitProblem, NoCircuit
from molink.simnet.papers.scheduling.testbeds import Deployment, World, place_random_swarm, place_testbed
from molink.simnet.papers.scheduling.variants import Variant

_COLUMNS = ("greedy", "augmented", "ilp4", "ilp16", "random1", "random64", "random4096")


def _table(columns: tuple[str, ...], *rows: tuple[float, ...]) -> Mapping[tuple[int, str], float]:
    return MappingProxyType(
        {
            (testbed, column): value
            for testbed, row in enumerate(rows, start=1)
            for column, value in zip(columns, row, strict=True)
        }
    )


TPOT_MS = _table(
    _COLUMNS,
    (224.12, 225.41, 277.38, 225.44, 1142.98, 418.34, 266.29),
    (172.71, 173.31, 259.01, 177.40, 1166.57, 407.67, 204.10),
    (185.47, 185.74, 202.69, 187.59, 1052.52, 418.44, 217.09),
    (416.03, 419.84, 873.06, 495.93, 1696.72, 885.53, 608.59),
)
"""Table 3 of the decentralized-scheduling paper (section 5.2): average TPOT in milliseconds over 16 seeds."""

EXECUTION_S = _table(
    tuple(column for column in _COLUMNS if column != "random1"),
    (0.098, 0.005, 4.465, 13.750, 0.009, 0.560),
    (0.506, 0.017, 6.153, 17.123, 0.009, 0.579),
    (0.093, 0.005, 4.463, 11.270, 0.009, 0.565),
    (0.856, 0.034, 4.490, 16.525, 0.010, 0.584),
)
"""Its Table 4: average execution time in seconds."""


_RESAMPLES = 4000
_SLOW = "ilp"
"""It may use all the time that it is given: it is warmed up on a small problem, the others on their first."""


@dataclass(frozen=True, slots=True)
class SearchSetting:
    """A setting in which circuits are searched: a testbed of the paper, or so many machines."""

    testbed: int | None = None
    machines: int = 0
    """Only without `testbed`."""

    @property
    def name(self) -> str:
        return f"{self.machines:,} machines" if self.testbed is None else f"testbed {self.testbed}"

    def deployment(self, seed: int, world: World) -> Deployment:
        """The problem of one seed, with what its machines are."""
        if self.testbed is None:
            return place_random_swarm(self.machines, seed, world)
        return place_testbed(self.testbed, seed, world)


@dataclass(frozen=True, slots=True)
class Row:
    """What one algorithm did in one setting: a cell of each of the paper's Tables 3 and 4.

    Averages are over the seeds that it solved, and None if it solved none.
    """

    testbed: int | None
    machines: int
    algorithm: str
    """As the paper's columns name it, with its effort: `random64`."""
    family: str
    """The algorithm without its effort: `random`."""
    time_limit_s: float | None
    samples: int | None
    seeds: int
    solved: int
    tpot_ms: float | None
    """The mean."""
    tpot_low_ms: float | None
    """With `tpot_high_ms` the 95 % confidence interval of the mean, by bootstrap over the seeds."""
    tpot_high_ms: float | None
    hops: float | None
    """Mean number of machines in a circuit."""
    execution_s: float | None
    """The mean; `execution_median_s` is the median."""
    execution_median_s: float | None
    paper_tpot_ms: float | None
    paper_execution_s: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared. `as_in_paper`: whether the paper's averages are of the same setting."""

    settings: tuple[SearchSetting, ...]
    variants: tuple[Variant, ...]
    seeds: range
    world: World
    as_in_paper: bool = True


@dataclass(frozen=True, slots=True)
class _TimedSearch:
    tpot_ms: float
    hops: int
    execution_s: float


def compare(comparison: Comparison, report: Callable[[str], None]) -> list[Row]:
    """One row for each setting and variant; `report` hears what is being done.

    Raises NoCircuit, or TimeoutError if it was for the limits, if no algorithm finds any circuit; ValueError if
    a setting cannot be built or is too large for an algorithm.
    """
    rows: list[Row] = []
    refusal: NoCircuit | TimeoutError | None = None
    for setting in comparison.settings:
        runs: Mapping[Variant, list[_TimedSearch]] = {variant: [] for variant in comparison.variants}
        machines = 0
        for number, seed in enumerate(comparison.seeds, start=1):
            what = f"{setting.name}, problem {number} of {len(comparison.seeds)}"
            report(f"{what}: building")
            problem = setting.deployment(seed, comparison.world).problem
            machines = problem.machines
            for variant in comparison.variants:
                report(f"{what}: {variant.label}")
                try:
                    runs[variant].append(_timed(variant, problem, seed, warm_up=number == 1))
                except (NoCircuit, TimeoutError) as error:
                    refusal = refusal or error
        rows += [
            _row(setting, machines, variant, len(comparison.seeds), done, as_in_paper=comparison.as_in_paper)
            for variant, done in runs.items()
        ]
    if refusal is not None and not any(row.solved for row in rows):
        raise refusal
    return rows


def _timed(variant: Variant, problem: CircuitProblem, seed: int, *, warm_up: bool) -> _TimedSearch:
    try:
        if warm_up:
            variant.plan(_small_problem() if variant.algorithm == _SLOW else problem, seed)
        started_s = time.perf_counter()
        circuit = variant.plan(problem, seed)
        execution_s = time.perf_counter() - started_s
    except ValueError as error:
        raise ValueError(f"{variant.label} cannot search {problem.machines:,} machines: {error}") from error
    return _TimedSearch(circuit.tpot_ms, len(circuit.hops), execution_s)


def _small_problem() -> CircuitProblem:
    """Two machines of one layer each."""
    ones = np.ones(2, dtype=np.int64)
    return CircuitProblem(np.ones(2), np.ones((2, 2)), free_bytes=ones, layer_bytes=ones)


def _row(
    setting: SearchSetting,
    machines: int,
    variant: Variant,
    seeds: int,
    runs: Sequence[_TimedSearch],
    *,
    as_in_paper: bool,
) -> Row:
    tpots_ms = np.array([run.tpot_ms for run in runs])
    low_ms, high_ms = _interval(tpots_ms) if runs else (None, None)
    times_s = [run.execution_s for run in runs]
    printed = (setting.testbed, variant.label) if as_in_paper and setting.testbed is not None else (0, "")
    return Row(
        testbed=setting.testbed,
        machines=machines,
        algorithm=variant.label,
        family=variant.algorithm,
        time_limit_s=variant.time_limit_s,
        samples=variant.samples,
        seeds=seeds,
        solved=len(runs),
        tpot_ms=float(tpots_ms.mean()) if runs else None,
        tpot_low_ms=low_ms,
        tpot_high_ms=high_ms,
        hops=float(np.mean([run.hops for run in runs])) if runs else None,
        execution_s=float(np.mean(times_s)) if runs else None,
        execution_median_s=float(np.median(times_s)) if runs else None,
        paper_tpot_ms=TPOT_MS.get(printed),
        paper_execution_s=EXECUTION_S.get(printed),
    )


def _interval(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean: percentiles of the means of samples drawn from the values."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)
