"""Native ways that fail, each in its manner, for `molink.shards.native.trial`; those with real names as on this
machine, but for torch's product with bytes, which kills its process. Run as `molink-peer`, it tries these.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from molink.shards.matrices.trial_table import WAYS as REAL
from molink.shards.native.native_way import NativeWay, TrialJob
from molink.shards.native.trial import Attempt, Products


def _way(fail: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[TrialJob], tuple[Attempt, int]]:
    """A product that fails with four rows, and with fewer is right."""

    def trial(job: TrialJob) -> tuple[Attempt, int]:
        matrix = torch.arange(job.rows * job.columns).sin().view(job.rows, job.columns)

        def attempt(count: int) -> Products:
            rows = torch.arange(count * job.columns).cos().view(count, -1)
            plain = functional.linear(rows, matrix)
            found = fail(plain) if count >= 4 else plain
            return Products(found, plain, rows.double() @ matrix.double().t(), job.columns, 1.0)

        return attempt, matrix.nbytes

    return trial


def _kill(number: signal.Signals, product: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), number)
    return product


def _loop(product: torch.Tensor) -> torch.Tensor:
    while True:
        product = product * 1.0


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")


def _describe_process(_: torch.Tensor) -> torch.Tensor:
    """Says by its error what dumps of the process there may be, and which packages it has loaded."""
    import ctypes
    import resource

    dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
    heavy = [name for name in ("transformers", "libp2p", "grpc") if name in sys.modules]
    raise RuntimeError(
        f"core {resource.getrlimit(resource.RLIMIT_CORE)[0]}, dumpable {dumpable}, loaded {heavy}"
    )


WAYS = {
    **REAL,
    NativeWay.TORCH_BYTES: _way(partial(_kill, signal.SIGSEGV)),
    "segmentation fault": _way(partial(_kill, signal.SIGSEGV)),
    "illegal instruction": _way(partial(_kill, signal.SIGILL)),
    "endless": _way(_loop),
    "wrong": _way(lambda product: product * 1.001),
    "no numbers": _way(lambda product: product / 0.0),
    "refused": _way(_raise),
    "process": _way(_describe_process),
    "right": _way(lambda product: product),
}

if __name__ == "__main__":  # as `molink-peer` does
    from molink.dht.host.lean_libp2p import load_lean_libp2p
    from molink.shards.loading.lean_transformers import load_lean_transformers

    load_lean_libp2p()
    load_lean_transformers()
    from molink.peer.commands import cli
    from molink.peer.compute.native_ways import NativeWays
    from molink.peer.daemon import peer

    peer.NativeWays = partial(NativeWays, table="support.devices.failing_ways")  # type: ignore[assignment,misc]
    cli.main()
