"""Homes that nobody can dial: links over relays and holes, beside bars (`make bench-reach`).

Linux, as root, with iproute2, nftables and gcc. Homes, their routers, relays and a client are network namespaces; the
Internet between them is a process that delays packets (`tests/support/links/slow_internet.c`): 40 ms there and back
between two homes, 30 ms between a home and a relay. Everything else is the product's own processes.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.reach.reach_links import links, relay
from bench.reach.reach_swarms import join, tpot
from bench.tables import Table
from bench.this_machine import processor

CASES: dict[str, Callable[[Table, int], None]] = {"links": links, "relay": relay, "tpot": tpot, "join": join}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (3)")
    parser.add_argument("--json", type=Path, help="writes every number there")
    options = parser.parse_args()
    machine = f"{processor()}, {platform.system()} {platform.release()}, load {os.getloadavg()[0]:.1f}"
    command = f"python tests/bench/reach {' '.join(sys.argv[1:])}"
    print(f"{machine}\n{command}", flush=True)
    cases = {}
    for name in options.only or CASES:
        print(f"\n{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
        table = Table()
        CASES[name](table, options.rounds)
        cases[name] = table.rows
    if options.json:
        document = {"machine": machine, "command": command, "cases": cases}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    missed = [
        f"{name}: {row['name']}" for name, rows in cases.items() for row in rows if row.get("held") is False
    ]
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
