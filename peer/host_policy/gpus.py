"""How much of a GPU other programs use, as its maker's library tells. What cannot be told here is None."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from types import ModuleType

WINDOW_S = 5.0
"""GPU use is averaged over about so long."""

OwnProcesses = Callable[[], Collection[int]]
"""The processes of this peer: itself, and its ranks."""


def this_process() -> tuple[int, ...]:
    """Of a peer without ranks."""
    return (os.getpid(),)


class GpuUse(Protocol):
    """Of one GPU, or of several: the share of its time that programs other than this one have lately used."""

    def share_of_others(self) -> float | None: ...


def gpus_of(devices: Sequence[str], own: OwnProcesses = this_process) -> GpuUse | None:
    """The GPUs that torch calls `devices`; None where nobody can tell what others do on any of them."""
    found = [gpu for device in devices if (gpu := NvidiaGpu.of(device, own) or AmdGpu.of(device, own))]
    return BusiestGpu(found) if found else None


class BusiestGpu:
    """Several GPUs: others are in the way of a peer, or it in theirs, as much as on the one where they do most."""

    def __init__(self, gpus: Sequence[GpuUse]) -> None:
        self._gpus = gpus

    def share_of_others(self) -> float | None:
        """The largest of those that can be told."""
        shares = [share for gpu in self._gpus if (share := gpu.share_of_others()) is not None]
        return max(shares, default=None)


class NvidiaGpu:
    """A GPU as NVML sees it. Where it cannot tell processes apart, as in containers, nothing is known."""

    def __init__(self, nvml: "ModuleType", handle: object, own: OwnProcesses = this_process) -> None:
        self._nvml = nvml
        self._handle = handle
        self._own = own
        self._seen: list[tuple[float, float]] = []

    @classmethod
    def of(cls, device: str, own: OwnProcesses = this_process) -> "NvidiaGpu | None":
        """The GPU that torch calls `device`; None if it is none of NVIDIA's, or NVML does not work here."""
        if not device.startswith("cuda"):
            return None
        import torch

        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()), own)
        except (ImportError, AttributeError, OSError):
            return None
        except pynvml.NVMLError:
            return None

    def share_of_others(self) -> float | None:
        """The mean over the last WINDOW_S, as far as it was asked."""
        now_s = time.monotonic()
        try:
            share = self._share_now()
        except self._nvml.NVMLError:
            return None
        if share is None:
            return None
        self._seen = [*((at_s, one) for at_s, one in self._seen if now_s - at_s < WINDOW_S), (now_s, share)]
        return sum(one for _, one in self._seen) / len(self._seen)

    def _share_now(self) -> float | None:
        """Raises NVMLError where the driver cannot tell."""
        nvml, own = self._nvml, self._own()
        running = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        if running.isdisjoint(own):  # it names processes by other numbers than we do
            return None
        since_us = int((time.time() - WINDOW_S) * 1e6)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, since_us)
        except nvml.NVMLError_NotFound:  # nobody has used it
            return 0.0
        return share_of(((sample.pid, sample.smUtil) for sample in samples), own)


class AmdGpu:
    """A GPU as AMD's management library sees it, which counts the time that each process has used. Where it counts
    none for this peer either, nothing is known."""

    def __init__(
        self,
        amdsmi: Any,  # noqa: ANN401 - a module without types
        handle: object,
        own: OwnProcesses = this_process,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._amdsmi = amdsmi
        self._handle = handle
        self._own = own
        self._clock_s = clock_s
        self._seen: list[tuple[float, Mapping[int, int]]] = []

    @classmethod
    def of(cls, device: str, own: OwnProcesses = this_process) -> "AmdGpu | None":
        """The GPU that torch calls `device`; None if it is none of AMD's, or the library (`molink[amd]`) is not here or
        does not know it."""
        if not device.startswith("cuda"):
            return None
        import torch

        if torch.version.hip is None:
            return None
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            bus = bus_of(torch.cuda.get_device_properties(device))
            for handle in amdsmi.amdsmi_get_processor_handles():
                if str(amdsmi.amdsmi_get_gpu_device_bdf(handle)).lower().startswith(bus):
                    return cls(amdsmi, handle, own)
        except Exception:  # noqa: BLE001 - foreign code at the process' edge: a reading that fails stops no peer
            return None
        return None

    def share_of_others(self) -> float | None:
        """Over the last WINDOW_S, as far as it was asked: the time of others' kernels in it."""
        now_s = self._clock_s()
        try:
            used_ns = self._used_ns()
        except Exception:  # noqa: BLE001 - as above
            return None
        self._seen = [*(one for one in self._seen if now_s - one[0] < WINDOW_S), (now_s, used_ns)]
        at_s, before_ns = self._seen[0]
        own = set(self._own())
        if now_s <= at_s or own.isdisjoint(used_ns) or not any(used_ns[pid] for pid in own & used_ns.keys()):
            return None
        others_ns = sum(
            max(0, used - before_ns.get(pid, used)) for pid, used in used_ns.items() if pid not in own
        )
        return min(1.0, others_ns / 1e9 / (now_s - at_s))

    def _used_ns(self) -> dict[int, int]:
        """By process: how long it has kept the GPU's processors busy since it began."""
        processes = self._amdsmi.amdsmi_get_gpu_process_list(self._handle)
        return {int(one["pid"]): int(one["engine_usage"]["gfx"]) for one in processes}


def bus_of(properties: Any) -> str:  # noqa: ANN401 - torch has no public name for the type
    """Where a GPU is on the bus, without its function: `0000:03:00`."""
    domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def share_of(samples: Iterable[tuple[int, int]], own: Collection[int]) -> float:
    """Of (process id, percent) samples: the share of all processes but `own`, each counted with its largest."""
    largest: dict[int, int] = {}
    for pid, percent in samples:
        if pid not in own:
            largest[pid] = max(largest.get(pid, 0), percent)
    return min(1.0, sum(largest.values()) / 100)
