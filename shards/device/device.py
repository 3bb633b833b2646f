"""The device that an engine computes on, as its threads see it.

CUDA keeps a current device for each thread, which is the first one until the thread says otherwise. Torch's own
operations follow their tensors, but kernels of Triton, new streams and new events go to the current device. So whatever
computes on a thread enters its device there first: `Engine` in each call, `loader.load_stage` before it reads.
"""

from typing import Any

import torch


class Device:
    """Where tensors are, and the one place that enters it, waits for it and makes its streams and events."""

    __slots__ = ("_is_apart", "place")

    def __init__(self, name: str | torch.device) -> None:
        """`name` is as `choose_device` returned it: cpu, cuda:N or mps."""
        place = torch.device(name)
        self.place = torch.device("cuda", place.index or 0) if place.type == "cuda" else place
        self._is_apart = self.place.type == "cuda"

    @property
    def is_apart(self) -> bool:
        """Whether it has memory, streams and events of its own, so that copies go through pinned memory."""
        return self._is_apart

    def enter(self) -> None:
        """This thread's kernels, streams and events are this device's from now on."""
        if self._is_apart:
            torch.cuda.set_device(self.place)

    def new_event(self) -> Any:  # noqa: ANN401 - torch's types differ by device
        """An event of this device, which becomes its own with the first `record`. Only where it is apart."""
        self.enter()
        return torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's

    def new_stream(self) -> Any:  # noqa: ANN401 - as above
        """A stream of this device. Only where it is apart."""
        self.enter()
        return torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call] # torch's

    def wait(self) -> None:
        """Holds up this thread until all that it has launched is done."""
        if self._is_apart:
            torch.cuda.current_stream(self.place).synchronize()
        elif self.place.type == "mps":
            torch.mps.synchronize()
