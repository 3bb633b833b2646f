"""What simulated swarms cost: `python tests/bench/simnet/simnet_swarm.py [--quick]`.

Each run is a process of its own on one core. Prints the machine, the command, seconds and memory beside the bars:
10,000 peers, a session a second, an hour of virtual time in under 10 minutes and under 4 GB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.this_machine import processor

BAR_S, BAR_MB = 600.0, 4000.0
FULL = (("1000", "1"), ("10000", "1"))
QUICK = (("1000", "0.1"), ("10000", "0.1"))


def swarm(peers: str, hours: str) -> None:
    """One run of `molink-simnet swarm` with that many peers, at its other defaults."""
    command = [
        sys.executable,
        "-m",
        "molink.simnet.cli",
        "swarm",
        "--peers",
        peers,
        "--hours",
        hours,
        "--json",
    ]
    one_core = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun_s = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, env={**os.environ, **one_core}, check=True)
    wall_s = time.perf_counter() - begun_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = json.loads(done.stdout)["rows"][0]
    print(f"molink-simnet swarm --peers {peers} --hours {hours}")
    print(
        f"  {wall_s:.1f} s, of which {cpu_s:.1f} s of processor time (bar for 10,000 peers and an hour: {BAR_S:g} s)"
    )
    print(f"  most memory of a run so far: {after.ru_maxrss / 1000:.0f} MB (bar: {BAR_MB:g} MB)")
    for name in ("sessions", "success_rate", "tpot_p50_ms", "tpot_p95_ms", "ttft_p50_ms", "ttft_p95_ms",
                 "tokens_per_s", "hops", "attempts_per_session", "losses", "recomputed_tokens", "traffic_kbit_s",
                 "busiest_minute_kbit_s", "traffic_by_kind_kbit_s", "largest_state_bytes", "announced_at_end",
                 "leases_refused", "moves", "moves_called_off", "looks", "looks_left_out"):  # fmt: skip
        print(f"    {name:<24} {row[name]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of an hour")
    parser.add_argument("--peers", help="only so many, instead")
    parser.add_argument("--hours", default="1", help="with --peers")
    arguments = parser.parse_args()
    print(f"{processor()}\npython {' '.join(sys.argv)}\n", flush=True)
    runs = QUICK if arguments.quick else FULL
    for peers, hours in ((arguments.peers, arguments.hours),) if arguments.peers else runs:
        swarm(peers, hours)


if __name__ == "__main__":
    main()
