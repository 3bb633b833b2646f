"""Tensors on their way between the host and the device, through pinned memory: no copy waits for what is computed."""

import torch
from torch import Tensor


class Staging:
    """A tensor on the device that the host writes anew for each step. On a CPU a plain copy."""

    __slots__ = ("_host", "_left", "on_device")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.on_device = torch.zeros(shape, dtype=dtype, device=device)
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self._left = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call] # torch's

    def host(self) -> Tensor:
        """The host's side, for the next `send`. Waits only while the last one has not been copied."""
        if self._left is not None:
            self._left.synchronize()
        return self._host

    def send(self, count: int | None = None) -> None:
        """The first `count` of the host's side, or all, go to the device before whatever is computed next there."""
        self.on_device[:count].copy_(self._host[:count], non_blocking=True)
        self._sent()

    def send_row(self, row: int, values: Tensor) -> None:
        """The beginning of one row alone."""
        self.host()[row, : len(values)] = values
        self.on_device[row, : len(values)].copy_(self._host[row, : len(values)], non_blocking=True)
        self._sent()

    def _sent(self) -> None:
        if self._left is not None:
            self._left.record()


class Transfers:
    """Copies between a device and the host on a stream of their own, which go on while the device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        apart = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if apart else None  # type: ignore[no-untyped-call] # torch's

    def to_device(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in `dtype` on the device, where what is computed from now on may use it."""
        if self._copies is None or tensor.device == self._device:
            return tensor.to(self._device, dtype)
        pinned = tensor.to(dtype).pin_memory()
        with torch.cuda.stream(self._copies):
            copied = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._copies)
        copied.record_stream(computing)
        return copied
