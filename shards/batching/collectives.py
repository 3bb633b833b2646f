"""What a peer's ranks compute together, by torch.distributed: gloo between processors, NCCL between NVIDIA GPUs."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from molink.shards.device.cuda_graphs import Recorder
from molink.shards.device.device import Device

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
        """Sums so far, but for those of recorded steps: Python does not see them."""
        self.reduced_bytes = 0
        """Their payload."""
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._rendezvous = rendezvous
        self._timeout = timedelta(seconds=timeout_s)
        self._sum: Callable[[Tensor], None] | None = None
        self._gather: Callable[[list[Tensor], Tensor], None] | None = None
        self._thread: int | None = None
        self._failure: str | None = None

    def open(self) -> None:
        """Waits for the other ranks.

        Raises:
            RuntimeError: they did not come in time.
        """
        store = dist.FileStore(str(self._rendezvous), self._ranks)  # type: ignore[attr-defined] # it is public
        store.set_timeout(self._timeout)
        opened = self._nccl(store) if self._device.startswith("cuda") else self._gloo(store)
        self._sum, self._gather = opened
        with self.stepping():
            self.all_reduce(torch.zeros(1, device=self._device))
        self.reductions = self.reduced_bytes = 0

    def _gloo(self, store: Any) -> tuple[Callable[[Tensor], None], Callable[[list[Tensor], Tensor], None]]:  # noqa: ANN401 - torch does not export its type
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # noqa: SLF001 - the only way to bind to one address
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]  # noqa: SLF001 - as above
        options._timeout = self._timeout  # noqa: SLF001 - as above
        group: Any = dist.ProcessGroupGloo(store, self._rank, self._ranks, options)
        return (
            lambda partial: group.allreduce([partial]).wait(),
            lambda parts, part: group.gather(parts, part, 0).wait(),
        )

    def _nccl(self, store: Any) -> tuple[Callable[[Tensor], None], Callable[[list[Tensor], Tensor], None]]:  # noqa: ANN401 - torch does not export its type
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
        return dist.all_reduce, lambda parts, part: dist.gather(part, parts or None, 0)

    @property
    def is_stepping(self) -> bool:
        """Whether this thread makes a step that all ranks make."""
        return self._thread == threading.get_ident()

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
            RuntimeError: a rank has gone, or did not come in time, or this one has left the others.
        """
        if not self.is_stepping or self._sum is None:
            return partial
        if self._failure is not None:
            raise RuntimeError(f"the other ranks have made a step without this one: {self._failure}")
        partial = partial.contiguous()
        self._sum(partial)
        self.reductions += 1
        self.reduced_bytes += partial.nbytes
        return partial

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """On the first rank what all ranks give, [rows, sum of widths] of [rows, own width] each; None on the others.

        All call it together, while stepping. Raises as `all_reduce`.
        """
        if self._gather is None:
            raise RuntimeError("the ranks have not met")
        padded = pad(part, (0, max(widths) - part.shape[1])).contiguous()  # collectives move equal parts
        parts = [torch.empty_like(padded) for _ in widths] if self._rank == 0 else []
        self._gather(parts, padded)
        if not parts:
            return None
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], 1)

    def agree(self, *, is_so: bool) -> bool:
        """Whether it is so on every rank. All call it together, while stepping. Raises as `all_reduce`."""
        reductions, reduced_bytes = self.reductions, self.reduced_bytes
        others = self.all_reduce(torch.tensor([0.0 if is_so else 1.0], device=self._device))
        self.reductions, self.reduced_bytes = reductions, reduced_bytes
        return others.item() == 0

    def leave(self, reason: str) -> None:
        """This rank could not make what the others have made: it takes part in no further sum."""
        self._failure = reason

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


class NotOnAllRanks(RuntimeError):
    """Another rank cannot do what this one can."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRecorder:
    """Records the steps of all ranks: what one of them cannot record, none does, since their sums must meet."""

    recorder: Recorder
    group: RankGroup

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """As `Recorder.record`. All ranks call it together, while stepping.

        Raises:
            NotOnAllRanks: another rank could not record it, or nobody has told all of them to.
        """
        if not self.group.is_stepping:
            raise NotOnAllRanks("a step of ranks is recorded only where all are told to")
        replay, failure = None, None
        try:
            replay = self.recorder.record(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
            failure = error
        if not self.group.agree(is_so=failure is None) or replay is None:
            raise failure or NotOnAllRanks("another rank could not record the step")
        return lambda: self._replayed(replay)

    def _replayed(self, replay: Callable[[], Tensor]) -> Tensor:
        try:
            return replay()
        except Exception as error:
            self.group.leave(f"{type(error).__name__}: {error}")
            raise
