"""Libraries that are mapped while other modules are imported are those that torch then uses."""

import subprocess
import sys

from support.deadline import DEADLINE_S

PROGRAM = """
import ctypes, os, sys, threading
from molink.shards.loading.early_libraries import begin_loading_torch
begin_loading_torch()
assert "torch" not in sys.modules
for thread in threading.enumerate():
    if thread is not threading.current_thread():
        thread.join(60)
if sys.platform == "linux":
    print("libtorch_cpu.so" in open("/proc/self/maps").read())
else:
    print(True)
import torch
print(torch.ones(2, 2).matmul(torch.ones(2, 2)).sum().item(), torch.zeros(1).numpy().sum())
begin_loading_torch()
print(threading.active_count())
"""


def test_torch_computes_with_libraries_that_were_mapped_before_it_was_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "8.0 0.0", "1"]


def test_a_process_that_ends_at_once_ends_without_a_crash() -> None:
    program = PROGRAM.split("assert", maxsplit=1)[0] + "sys.exit(3)"
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert (done.returncode, done.stderr) == (3, "")
