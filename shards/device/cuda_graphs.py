"""Recordings of what a step launches on a CUDA device, made so that one which fails changes nothing."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from molink.shards.device.device import Device


class Recorder(Protocol):
    """Makes a function that does again what `step` does, on the same memory."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`step` is called at least once; what comes back has not run yet. Raises whatever goes wrong; then
        the device is as it was before."""
        ...


class CudaGraphs:
    """Records what a step launches on a CUDA device and replays it in one launch. All recordings share one stream, and
    so the libraries' workspaces there, and one pool of memory: they never run beside each other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._aside: Any = None  # torch has no public names for the types
        self._pool: Any = None
        self._recorded: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Those that somebody may still replay. They hold the pool: when none is left, it is gone."""
        self._broken: list[torch.cuda.CUDAGraph] = []
        """Those that could not be ended: allocators may still ask them which memory is theirs."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Kernels are compiled and libraries opened by a first call, which is not recorded.

        Torch's own context for captures leaves the thread on the capture's stream, and the allocator in the belief
        that a capture goes on, if the capture cannot be ended. So here each is put back by itself.
        """
        if self._aside is None:
            self._aside = self._device.new_stream()
        if not self._recorded:
            self._pool = torch.cuda.graph_pool_handle()
        aside, computing = self._aside, torch.cuda.current_stream(self._device.place)
        aside.wait_stream(computing)
        try:
            with torch.cuda.stream(aside):
                step()
                torch.cuda.synchronize(self._device.place)
                torch.cuda.empty_cache()  # what the first call took, the recording takes once more
                graph, result = self._captured(step)
        finally:
            computing.wait_stream(aside)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _captured(self, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        capturing = False
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            capturing = True
            result = step()
            capturing = False
            graph.capture_end()
        except BaseException:
            self._abandon(graph, capturing=capturing)
            raise
        self._recorded.add(graph)
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, *, capturing: bool) -> None:
        """Ends what a capture began on the stream and in the allocator. Another one would begin with new ones."""
        pool, index = self._pool, self._device.place.index or 0
        self._aside = self._pool = None
        self._recorded = WeakSet()
        if capturing:
            with suppress(Exception):  # it says what is known already
                graph.capture_end()
        try:
            torch._C._cuda_endAllocateToPool(index, pool)  # noqa: SLF001 - the only way, also for torch.cuda.use_mem_pool
        except RuntimeError:
            return  # the graph got so far by itself, and gives the pool back
        torch._C._cuda_releasePool(index, pool)  # noqa: SLF001 - as above
        self._broken.append(graph)
