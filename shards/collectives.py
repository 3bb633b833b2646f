"""Sums over the ranks of one peer, by torch.distributed: gloo between processors, NCCL between NVIDIA GPUs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from molink.shards.device import Device

HOST = "127.0.0.1"
"""Ranks are processes of one machine: nobody else may reach them."""
TIMED_SUMS = 8


def collectives_refusal(device: str) -> str | None:
    """Why ranks on devices of this kind cannot work together here, or None."""
    if not dist.is_available():
        return f"the installed torch {torch.__version__} has no torch.distributed"
    if device.startswith("cuda"):
        return None if dist.is_nccl_available() else f"the installed torch {torch.__version__} has no NCCL"
    if device != "cpu":
        return f"ranks cannot be on {device}"
    return None if dist.is_gloo_available() else f"the installed torch {torch.__version__} has no gloo"


class RankGroup:
    """One rank's end of the group. Sums are made on the thread that is `stepping`, elsewhere there are none: a stage
    that is tried while it is loaded must not wait for other ranks."""

    def __init__(self, rank: int, ranks: int, device: str, rendezvous: Path, timeout_s: float) -> None:
        """`rendezvous` is a file that does not exist yet, in a folder of this peer's own."""
        self.reductions = 0
        self.reduced_bytes = 0
        """Payload of all sums so far."""
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._rendezvous = rendezvous
        self._timeout = timedelta(seconds=timeout_s)
        self._sum: Callable[[Tensor], None] | None = None
        self._thread: int | None = None

    def open(self) -> None:
        """Waits for the other ranks.

        Raises:
            RuntimeError: they did not come in time.
        """
        store = dist.FileStore(str(self._rendezvous), self._ranks)  # type: ignore[attr-defined] # it is public
        store.set_timeout(self._timeout)
        self._sum = self._nccl(store) if self._device.startswith("cuda") else self._gloo(store)
        with self.stepping():
            self.all_reduce(torch.zeros(1, device=self._device))
        self.reductions = self.reduced_bytes = 0

    def _gloo(self, store: Any) -> Callable[[Tensor], None]:  # noqa: ANN401 - torch does not export its type
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001 - the only way to bind to one address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001 - as above
        options._timeout = self._timeout  # noqa: SLF001 - as above
        group: Any = dist.ProcessGroupGloo(store, self._rank, self._ranks, options)
        return lambda partial: group.allreduce([partial]).wait()

    def _nccl(self, store: Any) -> Callable[[Tensor], None]:  # noqa: ANN401 - torch does not export its type
        device = Device(self._device)
        device.enter()
        dist.init_process_group(
            "nccl",
            store=store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=self._timeout,
            device_id=device.place,
        )
        return dist.all_reduce

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """This thread makes a step that all ranks make."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of what all ranks give, in place. Outside a step it is what this rank gives.

        Raises:
            RuntimeError: a rank has gone, or did not come in time.
        """
        if self._thread != threading.get_ident() or self._sum is None:
            return partial
        partial = partial.contiguous()
        self._sum(partial)
        self.reductions += 1
        self.reduced_bytes += partial.nbytes
        return partial

    def all_reduce_s(self, payload_bytes: int) -> float:
        """Seconds of a sum of so many bytes, the fastest of TIMED_SUMS. All ranks call it together."""
        payload = torch.zeros(payload_bytes, dtype=torch.uint8, device=self._device)
        times_s = []
        for _ in range(TIMED_SUMS):
            self._synchronize()
            started_s = time.perf_counter()
            with self.stepping():
                self.all_reduce(payload)
            self._synchronize()
            times_s.append(time.perf_counter() - started_s)
        return min(times_s)

    def _synchronize(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)
