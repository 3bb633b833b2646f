"""The simulator on this machine: does it agree with emulated peers, and how fast is it?

    python tests/bench/simnet --only validation --duration 60
    python tests/bench/simnet --only validation --policies molink --mbps 1000 --delay-ms 5 --rate 2 --duration 30
    python tests/bench/simnet --only speed

Validation serves the same requests in real time on processes (`emulate`) and in virtual time (`serve`): the machine
must have nothing else to do. Speed serves three virtual minutes of Table 2 of the transmission paper with each policy,
in rounds that take turns, and says how far the core itself varied meanwhile; then it simulates the whole table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.simnet.simnet_validation import (
    PEERS,
    Compared,
    ValidationLines,
    ValidationLoad,
    compare,
    report,
    scenario,
)

from molink.simnet.core.request_load import LengthLimits, kept
from molink.simnet.core.traces import bundled_trace
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.serve.served_as import usual
from molink.simnet.serve.simulated import RequestLoad, simulate_serving

EVENTS_PER_S = 100_000
TABLE_S = 120.0
SPEED_RPS, SPEED_S = 0.3, 120.0
YARDSTICK_STEPS = 1_000_000


def validate(arguments: argparse.Namespace) -> dict[str, object]:
    """Each policy in both worlds, printed as soon as it is there."""
    load = ValidationLoad(
        arguments.rate, arguments.warm_up, arguments.duration, 2, arguments.most_new_tokens, arguments.seed,
        ValidationLines(arguments.mbps, arguments.delay_ms),
    )  # fmt: skip
    compared: list[Compared] = []
    for policy in arguments.policies.split(","):
        compared.append(compare(policy, load))
        print(report(compared[-1:]), flush=True)
    return {one.policy: one.differences for one in compared}


def events_per_s(policy: str) -> float:
    """Of one core: processor time, so that other work on the machine counts little."""
    shape = replace(QWEN2_7B, tensors_per_boundary=2)
    trace = kept(bundled_trace(), LengthLimits(), shape.spec())
    load = RequestLoad(trace, SPEED_RPS, 60.0, SPEED_S)
    began_s = time.process_time()
    run = simulate_serving(scenario(shape, 0), policy, usual(policy, PEERS), load)
    return run.events / (time.process_time() - began_s)


def yardstick_s() -> float:
    """Processor time of a loop that is always the same: a core shared with others takes longer for it."""
    began_s, total = time.process_time(), 0
    for number in range(YARDSTICK_STEPS):
        total += number & 7
    return time.process_time() - began_s


def measure_speed(arguments: argparse.Namespace) -> dict[str, object]:
    """Events a second for each policy, and the seconds of a whole table in a pool of processes.

    The events are the same in every round, so what differs is the machine: whoever shares a core's caches and units
    makes processor time longer, and never shorter. The best round is the nearest to what one core can do.
    """
    rates: dict[str, list[float]] = {policy: [] for policy in arguments.policies.split(",")}
    yardsticks_s: list[float] = []
    for _ in range(arguments.rounds):
        for policy, found in rates.items():
            yardsticks_s.append(yardstick_s())
            found.append(events_per_s(policy))
    measured: dict[str, object] = {}
    print(f"events/s of processor time, {arguments.rounds} rounds in turns (bar: {EVENTS_PER_S} on one core)")
    for policy, found in rates.items():
        best, median = max(found), statistics.median(found)
        measured[policy] = {"best": best, "median": median, "rounds": found}
        print(f"{policy:<12}best {best:>8.0f}   median {median:>8.0f}   worst {min(found):>8.0f}")
    best_s, median_s = min(yardsticks_s), statistics.median(yardsticks_s)
    measured["yardstick_s"] = yardsticks_s
    print(
        f"the same loop before each: best {1000 * best_s:.0f} ms, median {1000 * median_s:.0f}, worst "
        f"{1000 * max(yardsticks_s):.0f}: half of the time the core was up to {median_s / best_s:.2f} times as slow"
    )
    if arguments.table:
        command = [sys.executable, "-m", "molink.simnet.cli", "serve", "--preset", "molink-table2", "--json"]
        began_s = time.monotonic()
        subprocess.run(
            [*command, "--policies", arguments.policies], check=True, stdout=subprocess.DEVNULL, timeout=3600
        )
        measured["table_s"] = time.monotonic() - began_s
        print(f"molink-table2, 31 virtual minutes each: {measured['table_s']:.0f} s (bar: {TABLE_S:.0f})")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("validation", "speed"))
    parser.add_argument("--policies", default="concurrent,paper,molink")
    parser.add_argument("--rate", type=float, default=0.5, help="of the validation, requests/s")
    parser.add_argument("--duration", type=float, default=60.0, help="of the validation, s measured")
    parser.add_argument("--mbps", type=float, default=100.0, help="of the validation, every peer's line")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="of the validation, one way")
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--most-new-tokens", type=int, default=150, help="longer answers are left out")
    parser.add_argument("--rounds", type=int, default=5, help="of speed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-table", dest="table", action="store_false", help="of speed, events a second alone"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, object] = {}
    if arguments.only != "speed":
        result["validation"] = validate(arguments)
    if arguments.only != "validation":
        result["speed"] = measure_speed(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
