"""Does decode wait for a prefill on a thin uplink? `make bench-link`, or `python tests/bench/link.py [--only CASES]`.

Sender, receiver and the emulated line (`molink.simnet.shaping`) are processes of their own. All ways of sending take
turns in every round, over the same line, each with a new connection and one prefill that is not counted. A decode
message counts if it was scheduled while a counted prefill was on its way. Bars are relative to what the same run
measured: idle delay, bare rate. Delays are one way, on the monotonic clock that all processes of a Linux machine share.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from link_runs import Bench, Run, Shape, Work, median, p99
from this_machine import processor

OURS = "policy:molink"
RIVALS = ("fifo", "concurrent", "zeromq", "policy:paper")
OTHERS = ("policy:fixed-chunk", "policy:concurrent", "policy:fifo", "policy:zeromq", "policy:molink+expected")
IDLE = "fifo"
"""Decode alone is measured on one plain gRPC stream."""
MB = 1024 * 1024
RTT_S = 0.030
IDLE_BAR, TAIL_BAR, PREFILL_BAR, CPU_BAR, ADDED_BAR_US = 1.3, 2.0, 1.10, 0.15, 300.0
"""Decode's median and p99 beside its idle median; prefill beside the bare minimum; cores; microseconds a message."""
RIVAL_BAR = 1.05
"""Decode's median beside the best rival's: no worse, but for what two measurements of the same differ by."""
RECOVERY_BAR_S = 1.0
SHARE_BAR = 0.03
"""Of the line's rate, for prefill, while decode fills 90 % of it."""


class Table:
    """Rows of bar, figure and verdict, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def note(self, name: str, text: str, **figures: object) -> None:
        """A row without a bar."""
        self._add(name, "", text, "", figures)

    def judge(
        self, name: str, figure: float, unit: str, bar: float, *, least: bool = False, **more: object
    ) -> None:
        """A row with one: the figure must be at most the bar, with `least` at least."""
        held = figure >= bar if least else figure <= bar
        sign = ">=" if least else "<="
        self._add(
            name, f"{sign} {bar:.4g} {unit}", f"{figure:.4g} {unit}", "holds" if held else "MISSED",
            {"figure": figure, "bar": bar, "unit": unit, "held": held, **more},
        )  # fmt: skip

    def _add(self, name: str, bar: str, figure: str, verdict: str, figures: dict[str, object]) -> None:
        self.rows.append({"name": name, **figures})
        print(f"  {name:<44}{bar:>16}  {figure:<40}{verdict}", flush=True)


def told_window(shape: Shape) -> int:
    """What the control sender is told: the rate times the round trip, a sixth more and 3 ms."""
    return int(shape.rate_mbps * 125_000 * (2 * shape.delay_ms / 1000 * 33.3 / 30 + 0.003))


async def delays(
    bench: Bench, shape: Shape, ways: tuple[str, ...], work: Work, *, ends: int = 1
) -> dict[str, Run]:
    """Every way in turn, in every round; idle delay before each round, under the way `idle`."""
    found: dict[str, Run] = {}
    for number in range(bench.rounds):
        idle = await bench.run(IDLE, shape, replace(work, lead_s=3.0, prefills=0))
        found["idle"] = found["idle"].joined(idle) if number else idle
        for way in ways:
            run = await bench.run(way, shape, work, ends=ends, window_bytes=told_window(shape))
            found[way] = found[way].joined(run) if number else run
    return found


def show(table: Table, found: dict[str, Run]) -> None:
    """A line for each way."""
    for way, run in found.items():
        ms = run.idle_ms if way == "idle" else run.decode_ms
        prefill = f", prefill {median(run.prefill_s):.2f} s" if run.prefill_s else ""
        lost = f", {run.unfinished} prefills not done" if run.unfinished else ""
        trouble = f" ({run.trouble})" if run.trouble else ""
        table.note(
            way, f"p50 {median(ms):.1f} p99 {p99(ms):.1f} ms of {len(ms)}{prefill}{lost}{trouble}", p50_ms=median(ms),
            p99_ms=p99(ms), decodes=len(ms), prefill_s=median(run.prefill_s), unfinished=run.unfinished,
            trouble=run.trouble, all_decode_ms=ms, all_prefill_s=run.prefill_s,
        )  # fmt: skip


def judge(table: Table, found: dict[str, Run], least_s: float | None) -> None:
    """Ours against idle and the bare minimum of a prefill, and beside the best rival."""
    idle_ms, ours = median(found["idle"].idle_ms), found[OURS]
    table.judge("decode p50 beside idle p50", median(ours.decode_ms), "ms", IDLE_BAR * idle_ms)
    table.judge("decode p99 beside idle p50", p99(ours.decode_ms), "ms", TAIL_BAR * idle_ms)
    if least_s is not None:
        table.judge("prefill beside the bare minimum", median(ours.prefill_s), "s", PREFILL_BAR * least_s)
    rivals = [way for way in found if way in RIVALS and found[way].decode_ms]
    best = min(rivals, key=lambda way: median(found[way].decode_ms))
    table.judge(f"decode p50 beside the best rival's ({best})", median(ours.decode_ms), "ms",
                RIVAL_BAR * median(found[best].decode_ms))  # fmt: skip
    for way in rivals:
        beside = median(found[way].decode_ms) / median(ours.decode_ms)
        table.note(f"{way} p50 over ours", f"{beside:.1f} times", times=beside)


async def main_case(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """100 Mbps, 30 ms: 16 MB prefill while 32 KB decode messages leave every 40 ms."""
    shape = Shape()
    raw_s = [(await bench.run("raw", shape, Work(interval_s=0.0))).prefill_s for _ in range(bench.rounds)]
    bare_s = median([one for round_s in raw_s for one in round_s])
    rate_mbps = 16 * MB * 8 / 1e6 / (bare_s - shape.delay_ms / 1000)
    table.note(
        "bare rate, raw TCP, 16 MB", f"{bare_s:.3f} s, {rate_mbps:.1f} Mbps", seconds=bare_s, mbps=rate_mbps
    )
    least_s = (bare_s - RTT_S / 2) / (1 - 32 * 1024 * 8 / 0.040 / 1e6 / rate_mbps) + RTT_S / 2
    table.note("least prefill beside that decode (computed)", f"{least_s:.3f} s", seconds=least_s)
    found = await delays(bench, shape, ("control", *RIVALS, OURS, *extra), Work(prefills=3))
    show(table, found)
    judge(table, found, least_s)


async def halving(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """The rate falls from 100 to 50 Mbps: until the running median of decode is under 1.3 times idle for good."""
    half = Shape(rate_mbps=50)
    idle_ms = median((await bench.run(IDLE, half, Work(lead_s=4.0, prefills=0))).idle_ms)
    table.note("idle at 50 Mbps", f"p50 {idle_ms:.1f} ms", p50_ms=idle_ms)
    for way in ("policy:paper", OURS, *extra):
        recovered = []
        for _ in range(bench.rounds):
            work = Work(prefills=0, prefill_for_s=7.0, tail_s=0.0)
            run = await bench.run(way, Shape(), work, change=(2.5, "rate 50"))
            recovered.append(run.recovered_s(IDLE_BAR * idle_ms))
        name = f"{way}: decode recovered after"
        if way == OURS:
            table.judge(name, median(recovered), "s", RECOVERY_BAR_S, all_s=recovered)
        else:
            table.note(name, f"{median(recovered):.2f} s", all_s=recovered)


async def crowded(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """Decode fills 90 % of the line, 32 KB each 2.9 ms, while 1 MB prefills go on for 6 s."""
    work = Work(
        interval_s=0.0029, prefill_bytes=MB, prefills=0, prefill_for_s=6.0, limit_s=9.0, skip_prefills=0
    )
    for way in (*RIVALS, OURS, *extra):
        runs = [await bench.run(way, Shape(), work) for _ in range(bench.rounds)]
        ms = [one for run in runs for one in run.decode_ms]
        share = sum(run.prefill_bytes for run in runs) / sum(run.prefilling_s for run in runs) / 12.5e6
        table.note(way, f"p50 {median(ms):.1f} p99 {p99(ms):.1f} ms, prefill {share:.1%} of the rate",
                   p50_ms=median(ms), p99_ms=p99(ms), share=share, trouble=runs[-1].trouble)  # fmt: skip
        if way == OURS:
            table.judge("prefill's share of the rate", share, "", SHARE_BAR, least=True)


async def two_links(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """Prefill on one link, decode on another, both behind one uplink of 100 Mbps."""
    ways = ("concurrent", "policy:paper", OURS, *extra)
    found = await delays(bench, Shape(), ways, Work(prefills=3), ends=2)
    show(table, found)
    judge(table, found, None)


async def thin(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """An uplink of 20 Mbps: 4 MB prefill, and 8 KB decode messages."""
    work = Work(prefills=3, prefill_bytes=4 * MB, decode_bytes=8192, limit_s=20.0)
    found = await delays(bench, Shape(rate_mbps=20), (*RIVALS, OURS, *extra), work)
    show(table, found)
    judge(table, found, None)


async def jitter(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """The delay wanders by up to 5 ms."""
    found = await delays(bench, Shape(jitter_ms=5), ("control", "concurrent", OURS, *extra), Work(prefills=3))
    show(table, found)
    judge(table, found, None)


async def processor_time(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """Cores that sender and receiver take while 16 MB prefills pass at 100 Mbps; the emulator is not counted."""
    for way in ("fifo", OURS, *extra):
        runs = [await bench.run(way, Shape(), Work(interval_s=0.0, prefills=4)) for _ in range(bench.rounds)]
        sender, receiver = (
            median([run.sender_cores for run in runs]),
            median([run.receiver_cores for run in runs]),
        )
        for end, cores in (("sender", sender), ("receiver", receiver)):
            if way == OURS:
                table.judge(f"{way} {end}", cores, "cores", CPU_BAR)
            else:
                table.note(f"{way} {end}", f"{cores:.3f} cores", cores=cores)


async def no_load(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """What one message of 16 KB costs on loopback beside a bare gRPC stream; half of interleaved round trips."""
    answers = [await bench.echo(16 * 1024, 500) for _ in range(bench.rounds)]
    half_us = {
        name: median([s for answer in answers for s in answer[f"{name}_s"]]) / 2 * 1e6
        for name in ("ours", "plain", "secure")
    }
    for name, label in (
        ("ours", "the product's link"),
        ("plain", "bare gRPC"),
        ("secure", "bare gRPC with TLS"),
    ):
        table.note(label, f"{half_us[name]:.0f} us one way", us=half_us[name])
    table.judge("added to bare gRPC with TLS", half_us["ours"] - half_us["secure"], "us", ADDED_BAR_US)
    table.note("added to bare gRPC", f"{half_us['ours'] - half_us['plain']:.0f} us")


Case = Callable[[Bench, Table, tuple[str, ...]], Awaitable[None]]
CASES: dict[str, Case] = {
    "main": main_case,
    "halving": halving,
    "crowded": crowded,
    "two-links": two_links,
    "thin": thin,
    "jitter": jitter,
    "cpu": processor_time,
    "no-load": no_load,
}


def finite(value: object) -> object:
    """JSON has no infinity: a message that never arrived, a figure that there is not, are null."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All cases that were asked for."""
    extra = tuple(options.also or ())
    cases: dict[str, object] = {}
    async with Bench(options.rounds, verbose=not options.quiet) as bench:
        for name in options.only or CASES:
            print(f"\n{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
            table = Table()
            await CASES[name](bench, table, extra)
            cases[name] = table.rows
    return cases


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of every way (3)")
    parser.add_argument(
        "--also", nargs="+", choices=OTHERS, metavar="WAY", help=f"further: {', '.join(OTHERS)}"
    )
    parser.add_argument("--json", type=Path, help="writes every number there")
    parser.add_argument("--quiet", action="store_true", help="no lines of progress")
    options = parser.parse_args()
    machine = f"{processor()}, {platform.system()} {platform.release()}, load {os.getloadavg()[0]:.1f}"
    command = f"python tests/bench/link.py {' '.join(sys.argv[1:])}"
    print(f"{machine}\n{command}\nline: molink.simnet.shaping, {Shape()}", flush=True)
    cases = asyncio.run(measure(options))
    if options.json:
        document = {"machine": machine, "command": command, "line": str(Shape()), "cases": cases}
        options.json.write_text(json.dumps(finite(document), indent=1) + "\n", encoding="utf-8")
    missed = [
        f"{name}: {row['name']}" for name, rows in cases.items() for row in rows if row.get("held") is False
    ]
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
