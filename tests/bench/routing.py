"""How long circuit search takes and how good its circuits are: `python tests/bench/routing.py [--quick]`.

Times are medians of one process on one core; quality is the mean TPOT over 16 seeds. Every algorithm that is
registered takes part in the comparison on the testbeds. `--optimum SECONDS` sets the searches beside the best
circuit known and the bound below all circuits that the compact integer program proves in that time.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # Before numpy is loaded: the numbers are those of one core.

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.this_machine import processor

from molink.routing import ALGORITHMS, CircuitProblem, TimeLimitReached, plan_circuit, solve_compact_ilp
from molink.simnet.papers.scheduling import testbeds

SEEDS = 16
REPEATS = 3
GOALS_MS = {
    "21, testbed 1": (2, 10),
    "21, testbed 4": (10, 40),
    "42, testbed 2": (6, 20),
    "1000": (100, 300),
    "10000, coordinates": (1000, 3000),
}
LIMITS_S = {"ilp": 4.0}
SEARCHES = ("refined", "augmented", "greedy")
FURTHER_SEEDS = range(1, 9)
"""Seeds with which `refined` searches again, for a second, for the best circuit known."""
PROVEN = 1e-6
"""Part of the TPOT that the bound may be below it, the solver's tolerance, for a circuit to count as proven."""


def measured(problem: CircuitProblem, algorithm: str) -> tuple[float, float]:
    """Median milliseconds and the TPOT."""
    times, tpot = [], 0.0
    for _ in range(REPEATS):
        begin = time.perf_counter()
        tpot = plan_circuit(problem, algorithm, LIMITS_S.get(algorithm)).tpot_ms
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times), tpot


def speed(quick: bool) -> None:
    """The table of times, with the goals beside them."""
    settings: dict[str, tuple[Callable[[int], CircuitProblem], int]] = {
        "21, testbed 1": (lambda seed: testbeds.testbed(1, seed), SEEDS),
        "21, testbed 4": (lambda seed: testbeds.testbed(4, seed), SEEDS),
        "42, testbed 2": (lambda seed: testbeds.testbed(2, seed), SEEDS),
        "1000": (lambda seed: testbeds.place_random_swarm(1000, seed).problem, 2 if quick else 5),
        "10000, coordinates": (
            lambda seed: testbeds.place_random_swarm(10_000, seed).problem,
            1 if quick else 3,
        ),
    }
    print(f"{'machines':<20}{'augmented ms':>14}{'goal':>6}{'refined ms':>12}{'goal':>6}{'TPOT ms':>20}")
    for name, (make, seeds) in settings.items():
        problems = [make(seed) for seed in range(seeds)]
        cells, tpots = [], []
        for algorithm, goal in zip(("augmented", "refined"), GOALS_MS[name], strict=True):
            results = [measured(problem, algorithm) for problem in problems]
            cells.append(f"{statistics.median(took for took, _ in results):>12.1f}{goal:>6}")
            tpots.append(f"{statistics.mean(tpot for _, tpot in results):.2f}")
        print(f"{name:<22}{cells[0]}{cells[1]}{' / '.join(tpots):>20}", flush=True)
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def quality(algorithms: list[str]) -> None:
    """Mean TPOT over the seeds, each testbed, each algorithm, and relative to refined."""
    print(f"\n{'mean TPOT ms':<14}" + "".join(f"{'testbed ' + str(number):>24}" for number in (1, 2, 3, 4)))
    means: dict[tuple[str, int], float] = {}
    for algorithm in algorithms:
        row = f"{algorithm:<14}"
        for number in (1, 2, 3, 4):
            results = []
            for seed in range(SEEDS):
                problem = testbeds.testbed(number, seed)
                begin = time.perf_counter()
                tpot = plan_circuit(problem, algorithm, LIMITS_S.get(algorithm)).tpot_ms
                results.append((tpot, (time.perf_counter() - begin) * 1000))
            mean = means[algorithm, number] = statistics.mean(tpot for tpot, _ in results)
            beside = (mean / means["refined", number] - 1) * 100
            took = statistics.median(took for _, took in results)
            row += f"{mean:>9.2f}{beside:>+6.2f}%{took:>6.0f} ms"
        print(row, flush=True)


def against_bound(problem: CircuitProblem, limit_s: float) -> dict[str, float]:
    """TPOT in ms of each search, of the integer program (`ilp`), of the best of them all, and the bound."""
    found = {name: plan_circuit(problem, name).tpot_ms for name in SEARCHES}
    further = min(plan_circuit(problem, "refined", 1.0, seed).tpot_ms for seed in FURTHER_SEEDS)
    try:
        outcome = solve_compact_ilp(problem, limit_s)
        found["ilp"], bound_ms = outcome.circuit.tpot_ms, outcome.bound_ms
    except TimeLimitReached as error:
        found["ilp"], bound_ms = float("inf"), max(error.bound_ms, 0.0)
    best_ms = min(further, *found.values())
    return {**found, "best": best_ms, "bound": min(bound_ms, best_ms)}


def optimum(limit_s: float, testbed: int, seeds: int) -> None:
    """Each seed's circuits, then the means beside those of the best circuits known and of the bounds."""
    names = (*SEARCHES, "ilp", "best", "bound")
    print(f"testbed {testbed}, at most {limit_s:g} s a problem\nseed" + "".join(f"{n:>11}" for n in names))
    rows = []
    for seed in range(seeds):
        rows.append(against_bound(testbeds.testbed(testbed, seed), limit_s))
        print(f"{seed:>4}" + "".join(f"{rows[-1][name]:>11.4f}" for name in names), flush=True)
    total = {name: sum(row[name] for row in rows) for name in names}
    proven = sum(row["best"] - row["bound"] <= PROVEN * row["best"] for row in rows)
    print(
        f"proven optimal: {proven} of {seeds}; best known above bound: {total['best'] / total['bound'] - 1:.3%}"
    )
    for name in (*SEARCHES, "ilp"):
        beside = [row[name] / row["best"] - 1 for row in rows]
        print(
            f"{name:<10} mean {total[name] / seeds:.3f} ms, above best known {total[name] / total['best'] - 1:.3%}"
            f" (worst seed {max(beside):.3%}, equal on {sum(part <= PROVEN for part in beside)}), "
            f"above bound {total[name] / total['bound'] - 1:.3%}"
        )
    behind = [
        seed for seed, row in enumerate(rows) if row["refined"] > min(row[name] for name in SEARCHES) + 1e-9
    ]
    print(f"seeds on which refined is behind augmented or greedy: {behind or 'none'}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer large swarms, no ilp")
    parser.add_argument("--speed", action="store_true", help="only the table of times")
    parser.add_argument("--optimum", type=float, metavar="SECONDS", help="compare with the compact ilp")
    parser.add_argument("--testbed", type=int, nargs="+", default=[1, 2, 3, 4], help="only with --optimum")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="only with --optimum")
    arguments = parser.parse_args()
    print(f"{processor()}\npython {' '.join(sys.argv)}\n")
    if arguments.optimum is not None:
        for number in arguments.testbed:
            optimum(arguments.optimum, number, arguments.seeds)
        return
    speed(arguments.quick)
    if not arguments.speed:
        left_out = {"refined"} | ({"ilp"} if arguments.quick else set())
        quality(["refined", *sorted(set(ALGORITHMS) - left_out)])


if __name__ == "__main__":
    main()
