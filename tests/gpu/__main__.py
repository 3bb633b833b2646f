"""Whether everything holds on this machine's GPU: `make gpu-suite`, `python -m tests.gpu` or `python tests/gpu`.

Prints a table, writes gpu.json, and exits with 0 only if every case that was asked for holds. It needs Python 3.12 or
newer (3.11 does), torch 2.11 or newer with Triton, and what the project depends on: installed, or as a folder of wheels
that tests/gpu/wheels/wheels.sh fetches (`--wheels DIR`). `--device cpu` runs every case in a small form, as a test of
the suite: there the figures of speed are not judged.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.gpu_cases import CASES, chosen, processes_for
from gpu.gpu_machine import CHECKOUT, device_name, environment, link_package, missing_modules, unpack_wheels
from gpu.gpu_run import Machine, Result, run_cases

SUITE_BUDGET_S = 480.0
_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all holds; 1: something does not, or could not run; 2: nothing was run, for the reason printed."""
    options = _options(arguments)
    if options.list:
        for case in CASES:
            print(f"{case.name:<16}{case.says} (at most {case.budget_s:.0f} s)")
        return 0
    with tempfile.TemporaryDirectory(prefix="molink-gpu-", ignore_cleanup_errors=True) as folder:
        try:
            cases = chosen(options.only)
            unpacked = Path(folder, "packages")
            unpacked.mkdir()
            wheels = unpack_wheels(options.wheels, unpacked) if options.wheels is not None else ()
            link_package(unpacked)
            sys.path.insert(0, str(unpacked))
            device = _device(options.device)
        except ValueError as error:
            print(f"{error}", file=sys.stderr)
            return _USAGE
        named = device_name(device)
        cores, memory_bytes = os.cpu_count() or 1, _card_bytes(device)
        interpret = memory_bytes is None and not missing_modules(("triton",))
        machine = Machine(
            device,
            cores,
            environment(device, unpacked, os.environ, interpret=interpret),
            Path(folder),
            time.monotonic() + options.budget_s,
        )
        print(f"{named}, {cores} processors; {len(cases)} cases", flush=True)
        began_s = time.monotonic()
        apart = [] if options.only else [case for case in cases if case.cards > _cards(device, case.cards)]
        asked = [case for case in cases if case not in apart]
        results = asyncio.run(
            run_cases(machine, asked, lambda case: processes_for(case, cores, memory_bytes), _tell)
        )
        took_s = time.monotonic() - began_s
    held = all(result.held for result in results)
    for case in apart:
        reason = f"it needs {case.cards} cards in one machine, and there is {_cards(device, case.cards)}"
        results.append(Result(case.name, "not run", 0.0, reason))
        _tell(results[-1])
    summary = {
        "device": named,
        "system": platform.platform(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m tests.gpu", *(sys.argv[1:] if arguments is None else arguments)]),
        "wheels": wheels,
        "took_s": round(took_s, 1),
        "holds": held,
        "cases": [result.as_json() for result in results],
    }
    options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _summarise(results, took_s, options.json)
    return 0 if held else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone; see --list")
    parser.add_argument("--list", action="store_true", help="the cases, one a line, and run nothing")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 (the default), cuda:N, or cpu")
    parser.add_argument(
        "--wheels", type=_folder, help="packages to use, made by tests/gpu/wheels/wheels.sh DIR"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("gpu.json"), help="where every figure goes (gpu.json)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=SUITE_BUDGET_S, help="of all cases together (480 seconds)"
    )
    return parser.parse_args(arguments)


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is no folder: make it with tests/gpu/wheels/wheels.sh {text}"
        )
    return path


def _device(name: str) -> str:
    """Raises ValueError where there is no such device."""
    import torch

    if name == "cpu":
        return name
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = [f"cuda:{index}" for index in range(count)]
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in there:
        raise ValueError(
            f"--device {name} is not there: torch {torch.__version__} sees {', '.join(there) or 'no GPU'}; "
            "--device cpu runs the suite in its small form"
        )
    return wanted


def _card_bytes(device: str) -> int | None:
    if device == "cpu":
        return None
    import torch

    return int(torch.cuda.get_device_properties(device).total_memory)


def _cards(device: str, wanted: int) -> int:
    """How many cards a case can have; a processor plays any number."""
    if device == "cpu":
        return wanted
    import torch

    return int(torch.cuda.device_count())


def _tell(result: Result) -> None:
    """The rows of a case, as soon as it has ended."""
    peak = f", at most {result.peak_bytes / 1e9:.1f} GB of the card" if result.peak_bytes else ""
    print(f"\n{result.name}: {result.verdict} after {result.took_s:.0f} s{peak}", flush=True)
    for row in result.rows:
        print(f"  {row['name']:<46}{row['bar_text']:>18}  {row['figure_text']:<44} {row['verdict']}".rstrip())
    if result.reason:
        print(textwrap.fill(result.reason, 116, initial_indent="  why: ", subsequent_indent="  "))
    if result.last_words and result.verdict in ("FAILED", "TIMED OUT"):
        print(textwrap.indent(result.last_words, "  | "))


def _summarise(results: Sequence[Result], took_s: float, path: Path) -> None:
    print(f"\n{'case':<18}{'verdict':<12}{'seconds':>8}  why")
    for result in results:
        why = textwrap.shorten(result.reason, 90)
        print(f"{result.name:<18}{result.verdict:<12}{result.took_s:>8.0f}  {why}".rstrip())
    held = sum(result.held for result in results)
    shown = path.resolve()
    where = shown.relative_to(CHECKOUT) if shown.is_relative_to(CHECKOUT) else shown
    print(f"\n{held} of {len(results)} hold, {took_s:.0f} s; all figures are in {where}")


if __name__ == "__main__":
    sys.exit(main())
