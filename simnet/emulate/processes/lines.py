"""The lines' process of an emulation: homes with an uplink each, and an HTTP proxy into the net for each home.

    python -m molink.simnet.emulate.processes lines CONFIGURATION

The configuration is a JSON object (see LinesConfiguration). It prints a JSON line with the proxies when it is ready and
answers every line on its stdin with one; at the end of stdin it ends (see `child_process`). It is a process of its own,
since Python lets one thread of a process run at a time.
"""

import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from molink.simnet.lines.access import AccessRouter, Neighbourhood
from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.sockets import address
from molink.simnet.lines.transit import Chunk


@dataclass(frozen=True, slots=True)
class LinesConfiguration:
    """So many homes, equal uplinks."""

    homes: int
    rate_mbps: float
    delay_ms: float
    """One way, to any other home."""
    latency_ms: Sequence[Sequence[float]] | None = None
    """One way, from each home to each; None: everywhere `delay_ms`."""


@dataclass(frozen=True, slots=True)
class LinesCounters:
    """What the lines have done since the start."""

    at_s: float
    """On a clock of its own."""
    cpu_s: float
    """The whole process's."""
    busy_s: tuple[float, ...]
    """Of each home's uplink: time in which bytes were leaving."""


def serve(configuration: LinesConfiguration) -> None:
    """Until stdin ends."""
    uplinks = {str(number): Line[Chunk](configuration.rate_mbps) for number in range(configuration.homes)}
    pairs_ms = {
        (str(home), str(other)): one_ms
        for home, row in enumerate(configuration.latency_ms or ())
        for other, one_ms in enumerate(row)
    }
    neighbourhood = Neighbourhood(uplinks, configuration.delay_ms, pairs_ms)
    shaper = Shaper()
    with ExitStack() as stack:
        stack.enter_context(shaper)
        routers = [stack.enter_context(AccessRouter(shaper, neighbourhood, name)) for name in uplinks]
        _print({"proxies": [router.url for router in routers]})
        for line in sys.stdin:
            question = json.loads(line)
            if question == "counters":
                _print(asdict(_counters(shaper, tuple(uplinks.values()))))
            else:
                for name, known in zip(uplinks, question["addresses"], strict=True):
                    for one in known:
                        shaper.call(partial(neighbourhood.place, address(one), name))
                _print({})


def _counters(shaper: Shaper, uplinks: Sequence[Line[Chunk]]) -> LinesCounters:
    busy_s = shaper.call(lambda: tuple(line.counters().busy_s for line in uplinks))
    return LinesCounters(time.perf_counter(), time.process_time(), busy_s)


def _print(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """The process's whole life. A Ctrl-C is its parent's to handle: the end of stdin follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(LinesConfiguration(**json.loads(sys.argv[1])))
