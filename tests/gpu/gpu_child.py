"""One case, or one part of it, in a process of its own: what it finds is written to a file, whatever happens."""

import argparse
import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.gpu_cases import Case, chosen
from gpu.gpu_findings import CannotRun, Context, Findings
from gpu.gpu_machine import missing_modules

HOPPER = ("H100", "H200")
"""In the names of the cards that the bars of speed are for."""


def judges_speed(case: Case, context: Context) -> bool:
    """Whether the case's bars of speed are this device's."""
    if context.small:
        return False
    return not case.speed or any(part in torch.cuda.get_device_name(context.device) for part in HOPPER)


def outcome(name: str, context: Context) -> dict[str, object]:
    """Rows, and why there are no more of them."""
    (case,) = chosen([name])
    findings = Findings(judges_speed=judges_speed(case, context))
    told: dict[str, object] = {"rows": findings.rows}
    missing = missing_modules(case.needs)
    if missing:
        told["not_run"] = (
            f"{', '.join(missing)} cannot be imported; give --wheels DIR (tests/gpu/wheels/wheels.sh)"
        )
        return told
    module, _, function = case.function.partition(":")
    try:
        getattr(importlib.import_module(module), function)(context, findings)
    except CannotRun as reason:
        told["not_run"] = str(reason)
    except Exception as error:  # noqa: BLE001 - the process's boundary: the table says what was raised
        told["error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        traceback.print_exc()
    if not context.small:
        told["peak_bytes"] = torch.cuda.max_memory_reserved(context.device)
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="molink-gpu-case-", ignore_cleanup_errors=True) as folder:
        context = Context(
            options.device, Path(folder), options.budget_s, part=options.part, parts=options.parts
        )
        told = outcome(options.name, context)
    options.out.write_text(json.dumps(told, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
