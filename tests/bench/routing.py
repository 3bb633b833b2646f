"""How long circuit search takes and how good its circuits are: `python tests/bench/routing.py [--quick]`.

Times are medians of one process on one core; quality is the mean TPOT over 16 seeds. Every algorithm that is
registered takes part in the comparison on the testbeds.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # Before numpy is loaded: the numbers are those of one core.

import argparse
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from molink.routing import ALGORITHMS, CircuitProblem, plan_circuit
from molink.simnet import testbeds

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


def processor() -> str:
    """What the numbers were taken on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


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
        "1000": (lambda seed: testbeds.random_swarm(1000, seed), 2 if quick else 5),
        "10000, coordinates": (lambda seed: testbeds.random_swarm(10_000, seed), 1 if quick else 3),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer large swarms, no ilp")
    quick = parser.parse_args().quick
    print(f"{processor()}\npython {' '.join(sys.argv)}\n")
    speed(quick)
    left_out = {"refined"} | ({"ilp"} if quick else set())
    quality(["refined", *sorted(set(ALGORITHMS) - left_out)])


if __name__ == "__main__":
    main()
