"""Tensors on their way between the host and the device, through pinned memory that is kept from step to step."""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from molink.shards.device.device import Device

MOST_KEPT_BYTES = 2**28
"""Pinned memory for results that links have not sent yet. What comes beyond goes to the host's other memory, slower."""
_LEAST_BUFFER_BYTES = 2**14


class Staging:
    """A tensor on the device that the host writes anew for each step. On a CPU a plain copy."""

    __slots__ = ("_host", "_left", "on_device")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> None:
        self.on_device = torch.zeros(shape, dtype=dtype, device=device.place)
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.is_apart)
        self._left = device.new_event() if device.is_apart else None

    def host(self) -> Tensor:
        """The host's side, for the next `send`. Waits only while the last one has not been copied, which it has been
        where the step that it was for has ended."""
        _wait_for(self._left)
        return self._host

    def send(self, count: int | None = None) -> None:
        """The first `count` of the host's side, or all, go to the device before whatever is computed next there."""
        self.on_device[:count].copy_(self._host[:count], non_blocking=True)
        self._sent()

    def send_rows(self, rows: Sequence[tuple[int, Tensor]]) -> None:
        """The beginnings of some rows alone."""
        host = self.host()
        for row, values in rows:
            host[row, : len(values)] = values
            self.on_device[row, : len(values)].copy_(host[row, : len(values)], non_blocking=True)
        self._sent()

    def _sent(self) -> None:
        if self._left is not None:
            self._left.record()


class Transfers:
    """Hidden states between a device and the host, on the stream of what is computed. Used from the engine's thread;
    what `to_host` gives may be used and dropped on any."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up = torch.empty(0, dtype=torch.uint8)
        """Pinned; grows with the largest step."""
        self._left: Any = None
        """When `_up` may be written again."""
        self._free: dict[int, deque[Tensor]] = {}
        """Pinned buffers by size that nothing refers to; appended to on whichever thread drops a result."""
        self._kept_bytes = 0

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype` on the device, where what is computed from now on may use it."""
        if not self._device.is_apart or tensor.device == self._device.place:
            return tensor.to(self._device.place, dtype)
        nbytes = tensor.numel() * dtype.itemsize
        if self._left is None:
            self._left = self._device.new_event()
        _wait_for(self._left)
        if self._up.nbytes < nbytes:
            self._up = _pinned(_buffer_bytes(nbytes))
        pinned = self._up[:nbytes].view(dtype).view(tensor.shape)
        pinned.copy_(tensor)
        copied = torch.empty(tensor.shape, dtype=dtype, device=self._device.place)
        copied.copy_(pinned, non_blocking=True)
        self._left.record()
        return copied

    def numbers(self, values: Sequence[int]) -> Tensor:
        """Integers on the device. Torch keeps pinned memory of such sizes until their copy is done."""
        if not self._device.is_apart:
            return torch.tensor(values, dtype=torch.long, device=self._device.place)
        pinned = torch.tensor(values, dtype=torch.long, pin_memory=True)
        return pinned.to(self._device.place, non_blocking=True)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the host, all there: one wait for the device, after which nothing that was launched on this
        thread is under way. Without tensors the wait alone."""
        if not self._device.is_apart and tensors:
            return [tensor.to("cpu") for tensor in tensors]  # Apple's devices are waited for by a copy
        copies = [self._copy(tensor) for tensor in tensors]
        self._device.wait()
        return copies

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy that has begun, in memory that comes back here when nothing refers to the copy any more."""
        if tensor.is_cpu:
            return tensor
        size = _buffer_bytes(tensor.nbytes)
        free = self._free.setdefault(size, deque())
        try:
            kept = free.popleft()
        except IndexError:
            if self._kept_bytes + size > MOST_KEPT_BYTES:
                return tensor.to("cpu")
            self._kept_bytes += size
            kept = _pinned(size)
        lent = kept.numpy()[: tensor.nbytes]
        weakref.finalize(lent, free.append, kept).atexit = False
        copy = torch.from_numpy(lent).view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=True)


def _wait_for(event: Any) -> None:  # noqa: ANN401 - torch's
    """Until the device has come to the event, which it mostly has."""
    if event is not None and not event.query():
        event.synchronize()


def _buffer_bytes(nbytes: int) -> int:
    """The size of the buffer for so much: powers of two, so that there are few sizes."""
    return max(_LEAST_BUFFER_BYTES, 1 << max(0, nbytes - 1).bit_length())


def _pinned(nbytes: int) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
