"""The case `tests`: what `make test` says of paged steps, prefixes, windows, swapping and pieces, on the device."""

import re
import subprocess
import sys
import time

from gpu.gpu_findings import Context, Findings
from gpu.gpu_machine import CHECKOUT

FILES = (
    "test_paged_decode.py",
    "test_prefix_cache.py",
    "test_kv_pressure.py",
    "test_kv_windows.py",
    "test_partial_steps.py",
    "test_session_states.py",
)
SMALL_FILES = ("test_paged_decode.py", "test_partial_steps.py")
PROCESSOR_ONLY = ("test_a_full_recorded_step_is_equal_bit_for_bit",)
"""Compare paged with other kernels bit for bit; the case `recorded` compares those that must be equal."""
_SUMMARY = re.compile(r"(\d+) (passed|failed|error|errors|skipped)")
_OPTIONS = ("-q", "-x", "-m", "not full", "-p", "no:cacheprovider")
_RESERVE_S = 5.0


def existing_tests(context: Context, findings: Findings) -> None:
    """One row for each file. Tests heed MOLINK_TEST_DEVICE, which is set here."""
    deadline_s = time.monotonic() + context.budget_s - _RESERVE_S
    dropped = [] if context.small else ["-k", " and ".join(f"not {name}" for name in PROCESSOR_ONLY)]
    for name in SMALL_FILES if context.small else FILES:
        path = next((CHECKOUT / "tests" / "shards").rglob(name))
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *_OPTIONS, *dropped, str(path)],
            capture_output=True, text=True, cwd=CHECKOUT, check=False, timeout=max(1.0, deadline_s - began_s),
        )  # fmt: skip
        counts = {what: int(count) for count, what in _SUMMARY.findall(done.stdout)}
        text = f"{counts.get('passed', 0)} passed in {time.monotonic() - began_s:.0f} s"
        if done.returncode != 0:
            print(done.stdout, done.stderr)
            text = _first_fault(done.stdout) or f"pytest ended with {done.returncode}"
        findings.hold(name, done.returncode == 0 and counts.get("passed", 0) > 0, text, **counts)


def _first_fault(told: str) -> str | None:
    return next((line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))), None)
