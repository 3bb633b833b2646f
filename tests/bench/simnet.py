"""The simulator on this machine: does it agree with emulated peers, and how fast is it?

    python tests/bench/simnet.py --only validation --duration 60
    python tests/bench/simnet.py --only speed

Validation serves the same requests in real time on processes (`emulate`) and in virtual time (`serve`): the machine
must have nothing else to do. Speed simulates Table 2 of the transmission paper, three policies at four rates.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simnet_validation import PEERS, Compared, ValidationLoad, compare, report, scenario

from molink.simnet.model_shapes import QWEN2_7B
from molink.simnet.request_load import LengthLimits, kept
from molink.simnet.serving.served_as import usual
from molink.simnet.serving.simulated import Load, simulate_serving
from molink.simnet.traces import bundled_trace

EVENTS_PER_S = 100_000
TABLE_S = 120.0
SPEED_RPS, SPEED_S = 0.3, 120.0


def validate(arguments: argparse.Namespace) -> dict[str, object]:
    """Each policy in both worlds, printed as soon as it is there."""
    load = ValidationLoad(
        arguments.rate, arguments.warm_up, arguments.duration, 2, arguments.most_new_tokens, arguments.seed
    )
    compared: list[Compared] = []
    for policy in arguments.policies.split(","):
        compared.append(compare(policy, load))
        print(report(compared[-1:]), flush=True)
    return {one.policy: one.differences for one in compared}


def events_per_s(policy: str) -> float:
    """Of one core: processor time, so that other work on the machine counts little."""
    shape = replace(QWEN2_7B, tensors_per_boundary=2)
    trace = kept(bundled_trace(), LengthLimits(), shape.spec())
    load = Load(trace, SPEED_RPS, 60.0, SPEED_S)
    began_s = time.process_time()
    run = simulate_serving(scenario(shape, 0), policy, usual(policy, PEERS), load)
    return run.events / (time.process_time() - began_s)


def measure_speed(arguments: argparse.Namespace) -> dict[str, object]:
    """Events a second for each policy, and the seconds of a whole table in a pool of processes."""
    measured: dict[str, object] = {}
    for policy in arguments.policies.split(","):
        rate = events_per_s(policy)
        measured[policy] = rate
        print(f"{policy:<12}{rate:>10.0f} events/s on one core (bar: {EVENTS_PER_S})", flush=True)
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
    parser.add_argument("--warm-up", type=float, default=5.0)
    parser.add_argument("--most-new-tokens", type=int, default=150, help="longer answers are left out")
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
