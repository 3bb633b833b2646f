"""Does decode wait for a prefill on a thin uplink? `make bench-link`, or `python tests/bench/link [--only CASES]`.

Sender, receiver and the emulated line (`molink.simnet.lines.shaping`) are processes of their own. All ways of sending
take turns in every round, over the same line, each with a new connection and one prefill that is not counted. A decode
message counts if it was scheduled while a counted prefill was on its way. Bars are relative to what the same run
measured: idle delay, bare rate. Delays are one way, on the monotonic clock that all processes of a Linux machine share.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.link.link_runs import Bench, Run, Shape, Work, median, p99
from bench.tables import Table
from bench.this_machine import processor

OURS = "policy:molink"
RIVALS = ("fifo", "concurrent", "zeromq", "policy:paper")
OTHERS = ("policy:fixed-chunk", "policy:concurrent", "policy:fifo", "policy:zeromq", "policy:molink+expected")
IDLE = "fifo"
"""Decode alone is measured on one plain gRPC stream."""
MB = 1024 * 1024
IDLE_BARS = (1.2, 1.6)
"""Decode's median and p99 beside a prefill, over those of an idle link."""
CONTROL_BARS = (1.1, 1.3)
"""The same over those of the control, which is told the window."""
PREFILL_BAR = 1.05
"""Over the bare minimum that the decode traffic leaves."""
HALVED_BAR, RECOVERY_BAR_S = 1.3, 2.0
"""Decode's median over idle, and by when it is that again after the rate halved."""
SHARE_BAR = 0.08
"""Of the line's rate, for prefill, while decode fills 90 % of it."""
TWO_LINKS_BAR = 1.5
"""Decode's median over idle while another link carries a prefill."""
CPU_BAR_CORES, ADDED_BAR_MS = 0.15, 0.35


def told_window(shape: Shape) -> int:
    """What the control sender is told: the rate times the round trip, a sixth more and 3 ms."""
    return int(shape.rate_mbps * 125_000 * (2 * shape.delay_ms / 1000 * 33.3 / 30 + 0.003))


async def delays(
    bench: Bench, shape: Shape, ways: tuple[str, ...], work: Work, *, ends: int = 1
) -> dict[str, Run]:
    """Every way in turn, in every round; idle delay before each round, under the way `idle`."""
    found: dict[str, Run] = {}
    for number in range(bench.rounds):
        idle = await bench.run(IDLE, shape, Work(lead_s=3.0, prefills=0))
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


def judge_decode(table: Table, found: dict[str, Run], over: str, bars: tuple[float, float]) -> None:
    """Ours over an idle link or over another way: median and p99."""
    ours, base = found[OURS].decode_ms, found[over].idle_ms if over == "idle" else found[over].decode_ms
    table.judge(f"decode median over {over}'s", median(ours) / median(base), "times", bars[0])
    table.judge(f"decode p99 over {over}'s", p99(ours) / p99(base), "times", bars[1])


def beside_rivals(table: Table, found: dict[str, Run]) -> None:
    """Every other way over ours: above 1 is slower."""
    ours = found[OURS]
    for way, run in found.items():
        if way in ("idle", OURS) or not run.decode_ms:
            continue
        times = median(run.decode_ms) / median(ours.decode_ms)
        tail = p99(run.decode_ms) / p99(ours.decode_ms)
        prefill = median(run.prefill_s) / median(ours.prefill_s)
        table.note(
            f"{way} over ours", f"p50 {times:.2f}, p99 {tail:.2f}, prefill {prefill:.2f} times",
            p50_times=times, p99_times=tail, prefill_times=prefill,
        )  # fmt: skip


async def least_prefill_s(bench: Bench, table: Table, shape: Shape, work: Work) -> float:
    """The time of a prefill over raw TCP without decodes, and from it the least beside them."""
    alone = Work(
        interval_s=0.0, prefill_bytes=work.prefill_bytes, prefills=work.prefills, limit_s=work.limit_s
    )
    raw_s = [(await bench.run("raw", shape, alone)).prefill_s for _ in range(bench.rounds)]
    bare_s = median([one for round_s in raw_s for one in round_s])
    way_s = shape.delay_ms / 1000
    bytes_per_s = work.prefill_bytes / (bare_s - way_s)
    least_s = way_s + work.prefill_bytes / (bytes_per_s - work.decode_bytes / work.interval_s)
    table.note(
        "raw TCP, prefill alone", f"{bare_s:.3f} s, {bytes_per_s * 8e-6:.1f} Mbps", bare_s=bare_s,
        mbps=bytes_per_s * 8e-6,
    )  # fmt: skip
    table.note("least prefill beside that decode (computed)", f"{least_s:.3f} s", least_s=least_s)
    return least_s


def judge_prefill(table: Table, found: dict[str, Run], least_s: float) -> None:
    table.judge(
        "prefill over the bare minimum", median(found[OURS].prefill_s) / least_s, "times", PREFILL_BAR
    )


async def main_case(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """100 Mbps, 30 ms: 16 MB prefill while 32 KB decode messages leave every 40 ms."""
    work = Work(prefills=3)
    least_s = await least_prefill_s(bench, table, Shape(), work)
    found = await delays(bench, Shape(), ("control", *RIVALS, OURS, *extra), work)
    show(table, found)
    judge_decode(table, found, "idle", IDLE_BARS)
    judge_decode(table, found, "control", CONTROL_BARS)
    judge_prefill(table, found, least_s)
    beside_rivals(table, found)


async def halving(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """The rate falls from 100 to 50 Mbps under a prefill: until the median of 5 decodes is under 1.3 times idle."""
    half = Shape(rate_mbps=50)
    idle_ms = median((await bench.run(IDLE, half, Work(lead_s=4.0, prefills=0))).idle_ms)
    table.note("idle at 50 Mbps", f"p50 {idle_ms:.1f} ms", p50_ms=idle_ms)
    for way in ("policy:paper", OURS, *extra):
        recovered = []
        for _ in range(bench.rounds):
            work = Work(prefills=0, prefill_for_s=7.0, tail_s=0.0)
            run = await bench.run(way, Shape(), work, change=(2.5, "rate 50"))
            recovered.append(run.recovered_s(HALVED_BAR * idle_ms))
        name = f"{way}: decode recovered after"
        if way == OURS:
            table.judge(f"{name}, worst", max(recovered), "s", RECOVERY_BAR_S, all_s=recovered)
        else:
            table.note(f"{name}, median", f"{median(recovered):.2f} s", all_s=recovered)


async def crowded(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """Decode fills 90 % of the line, 32 KB each 2.9 ms, while 1 MB prefills go on for 6 s."""
    work = Work(
        interval_s=0.0029, prefill_bytes=MB, prefills=0, prefill_for_s=6.0, limit_s=9.0, skip_prefills=0
    )
    for way in (*RIVALS, OURS, *extra):
        runs = [await bench.run(way, Shape(), work) for _ in range(bench.rounds)]
        ms = [one for run in runs for one in run.decode_ms]
        share = sum(run.prefill_bytes for run in runs) / sum(run.prefilling_s for run in runs) / 12.5e6
        table.note(way, f"p50 {median(ms):.1f} p99 {p99(ms):.1f} ms of {len(ms)}, prefill {share:.1%} of the rate",
                   p50_ms=median(ms), p99_ms=p99(ms), share=share, trouble=runs[-1].trouble)  # fmt: skip
        if way == OURS:
            table.judge("prefill's share of the rate", share, "", SHARE_BAR, least=True)


async def two_links(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """Prefill on one link, decode on another, both behind one uplink of 100 Mbps."""
    ways = ("concurrent", "policy:paper", OURS, *extra)
    found = await delays(bench, Shape(), ways, Work(prefills=3), ends=2)
    show(table, found)
    table.judge(
        "decode median over idle's", median(found[OURS].decode_ms) / median(found["idle"].idle_ms), "times",
        TWO_LINKS_BAR,
    )  # fmt: skip
    beside_rivals(table, found)


async def thin(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """An uplink of 20 Mbps: 4 MB prefill, and 8 KB decode messages; without bars."""
    shape = Shape(rate_mbps=20)
    work = Work(prefills=2, prefill_bytes=4 * MB, decode_bytes=8192, limit_s=20.0)
    await least_prefill_s(bench, table, shape, work)
    await without_bars(bench, table, shape, work, extra)


async def jitter(bench: Bench, table: Table, extra: tuple[str, ...]) -> None:
    """The delay wanders by up to 5 ms; without bars."""
    await without_bars(bench, table, Shape(jitter_ms=5), Work(prefills=3), extra)


async def without_bars(bench: Bench, table: Table, shape: Shape, work: Work, extra: tuple[str, ...]) -> None:
    """All ways beside ours."""
    found = await delays(bench, shape, ("control", *RIVALS, OURS, *extra), work)
    show(table, found)
    beside_rivals(table, found)


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
                table.judge(f"{way} {end}", cores, "cores", CPU_BAR_CORES)
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
    for name, label in (("secure", " with TLS"), ("plain", "")):
        added_ms = (half_us["ours"] - half_us[name]) / 1000
        table.judge(f"added to bare gRPC{label}, per message", added_ms, "ms", ADDED_BAR_MS)


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
    command = f"python tests/bench/link {' '.join(sys.argv[1:])}"
    print(f"{machine}\n{command}\nline: molink.simnet.lines.shaping, {Shape()}", flush=True)
    cases = asyncio.run(measure(options))
    if options.json:
        document = {"machine": machine, "command": command, "line": str(Shape()), "cases": cases}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    missed = [
        f"{name}: {row['name']}" for name, rows in cases.items() for row in rows if row.get("held") is False
    ]
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
