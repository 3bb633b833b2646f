"""Where a peer computes, and how much of the machine it may take."""

import ctypes
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil

from molink.configuration import SettingsError
from molink.dht.records.records import DeviceProperties
from molink.peer.device.control_groups import ROOT, read_group_limits
from molink.peer.device.graphics_cards import hidden_cards, seen_cards
from molink.peer.device.torch_builds import TorchBuild, unusable_gpus, why_not_used
from molink.peer.memory.memory import format_bytes
from molink.shards.device.garbage import collect_garbage

CPU_SHARE = 0.5
"""Part of the memory available now that a peer takes by default: the rest is the volunteer's."""
GPU_SHARE = 0.9
LOW_NICENESS = 10
"""Of 0 to 19: a program of normal priority gets nine times as much of a processor that both want."""


def choose_device(name: str) -> str:
    """The torch device that `--device name` means: `cpu`, `cuda:N` or `mps`.

    `auto` is the first GPU that torch has kernels for, or the processor where there is none; `why_not_others` says why.

    Raises:
        SettingsError: this machine has no such device, or cannot use it; it says why, and what to type instead.
    """
    there, unusable = _available(), _unusable()
    if name == "auto":
        return next((device for device in there[1:] if device not in unusable), there[0])
    wanted = "cuda:0" if name == "cuda" else name
    if "," in wanted:
        raise SettingsError(f"--device {name}: here only one device at a time; name one of them")
    if wanted in unusable:
        raise SettingsError(f"--device {name}: {unusable[wanted]}; until then type --device cpu")
    if wanted not in there:
        raise SettingsError(_not_there(name, wanted, there))
    return wanted


def why_not_others(name: str, device: str) -> str | None:
    """Which GPU of this machine `--device name` leaves unused, why, and what to do; None where it uses what there is,
    or was told to use `device`."""
    if name != "auto":
        return None
    unusable = _unusable()
    reason = next(iter(unusable.values()), None)
    if reason is None and device == "cpu":
        reason = why_not_used(seen_cards(), _torch_build(), hidden_cards(), platform.system())
    place = "on the processor" if device == "cpu" else f"on {device}"
    return None if reason is None else f"Computing {place}: {reason}"


def _not_there(name: str, wanted: str, there: tuple[str, ...]) -> str:
    """One sentence on a device that is not there."""
    has = f"{', '.join(there[:-1])} and {there[-1]}" if len(there) > 1 else there[0]
    why = f"this machine has {has}"
    if wanted == "mps" and platform.system() != "Darwin":
        why = f"mps is the GPU of a Mac, and {why}"
    elif len(there) == 1:
        reason = why_not_used(seen_cards(), _torch_build(), hidden_cards(), platform.system())
        why += f", and {reason or 'no graphics card is seen'}"
    return f"--device {name} is not there: {why}; type --device {there[-1]}"


def choose_devices(name: str) -> tuple[str, ...]:
    """The devices of `--device name`: as `choose_device`, or the several GPUs of `cuda:0,1`, which share every layer.

    Raises:
        SettingsError: this machine has not all of them, or they cannot work together; it says why.
    """
    kind, _, indices = name.partition(":")
    if "," not in indices:
        return (choose_device(name),)
    numbers = indices.split(",")
    if (
        kind != "cuda"
        or not all(number.isdecimal() for number in numbers)
        or len(set(numbers)) < len(numbers)
    ):
        raise SettingsError(f"--device {name}: several GPUs are named once each, such as cuda:0,1")
    devices = tuple(choose_device(f"cuda:{number}") for number in numbers)
    refusal = ranks_refusal(devices[0])
    if refusal is not None:
        raise SettingsError(
            f"--device {name}: {refusal}; start one peer for each GPU, each with a --state-dir of its own"
        )
    return devices


def ranks_refusal(device: str) -> str | None:
    """Why several devices of this kind cannot share layers here, or None."""
    from molink.shards.batching.collectives import collectives_refusal

    return collectives_refusal(device)


def describe_device(device: str) -> DeviceProperties:
    """What peers are told about `device`, as `choose_device` returned it."""
    kind, _, index = device.partition(":")
    return DeviceProperties(
        kind=kind,
        name=_gpu_name(int(index)) if kind == "cuda" else processor_name(),
        count=1,
        memory_bytes=total_memory_bytes(device),
        system=f"{platform.system()} {platform.machine()}",
        processors=processor_count(),
    )


def free_memory_bytes(device: str, root: Path = ROOT) -> int:
    """Memory of the device that nobody uses now; of a container, no more than its limit leaves."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)  # Apple GPUs share the machine's memory
    return _least(available, read_group_limits(root).free_bytes)


def keep_gpu_memory_whole(system: str, environment: MutableMapping[str, str]) -> None:
    """Has torch keep a GPU's memory in segments that grow, so that what is freed in one size can be used in another
    (`expandable_segments`; on Windows torch has none). Before torch is imported; what the owner has set stays."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if system == "Linux" and not any(name in environment for name in names):
        environment[names[0]] = "expandable_segments:True"
        environment[names[1]] = "expandable_segments:True"  # torch 2.8 and older know no other name


def default_memory_bytes(device: str) -> int:
    """What a peer takes without `--memory`: half of the available memory, or 90 % of a GPU's free memory."""
    return int(free_memory_bytes(device) * (GPU_SHARE if device.startswith("cuda") else CPU_SHARE))


def check_memory(devices: tuple[str, ...], wanted_bytes: int | None) -> None:
    """Raises:
    SettingsError: the devices together do not have as much memory as `--memory` says.
    """
    there_bytes = len(devices) * min(map(total_memory_bytes, devices))
    if wanted_bytes is not None and wanted_bytes > there_bytes:
        raise SettingsError(
            f"--memory {format_bytes(wanted_bytes)} is more than {' and '.join(devices)} of this machine can have, "
            f"{format_bytes(there_bytes)}: give less, or leave it out for "
            f"{format_bytes(len(devices) * min(map(default_memory_bytes, devices)))}"
        )


def cap_gpu_memory(device: str, cap_bytes: int) -> None:
    """No more than so much of that GPU's memory can be allocated from now on. Of processors nothing is capped here: see
    `memory_guard.py`."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_memory_bytes(device)), device)
    elif device == "mps":
        most_bytes = (
            torch.mps.recommended_max_memory()
        )  # what Metal gives to one process; less than the machine has
        torch.mps.set_per_process_memory_fraction(min(1.0, max(0.01, cap_bytes / most_bytes)))


def give_back_memory(device: str) -> None:
    """What nobody uses any more goes back to the system, though allocators would keep it, and though it belongs to
    cycles of objects that were frozen."""
    collect_garbage()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()
    elif device == "mps":
        import torch

        torch.mps.empty_cache()
    elif sys.platform == "linux":
        with suppress(OSError, AttributeError):  # other C libraries have no such call
            ctypes.CDLL(None).malloc_trim(0)


def lower_priority() -> None:
    """Other programs go first. Threads that are there already may stay as they were."""
    process = psutil.Process()
    if sys.platform == "win32":
        process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        process.nice(max(LOW_NICENESS, process.nice()))


def processor_count(root: Path = ROOT) -> int:
    """Processors that this process may use: those it is bound to, and no more than its container's share is worth."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    share = read_group_limits(root).processors
    return bound if share is None else max(1, min(bound, int(share)))


def machine_memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use, of all that the machine has."""
    return _least(int(psutil.virtual_memory().total), read_group_limits(root).memory_bytes)


def processor_name() -> str:
    """The processor's name for people, such as `AMD Ryzen 7 7800X3D`."""
    known = {"Linux": _linux_processor, "Darwin": _mac_processor}.get(platform.system(), platform.processor)
    return (known() or platform.processor() or platform.machine() or "processor").strip()


def _available() -> tuple[str, ...]:
    import torch

    devices = ["cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `_torch_build`
        if torch.cuda.is_available():
            devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return tuple(devices)


def _unusable() -> dict[str, str]:
    """GPUs that torch names although it has no kernels for them, each with a sentence that says so."""
    return {f"cuda:{index}": reason for index, reason in unusable_gpus(_torch_build()).items()}


def _torch_build() -> TorchBuild:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of drivers and cards is said here, with the remedy
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return TorchBuild(
            torch.__version__,
            torch.version.cuda,
            torch.version.hip,
            tuple(torch.cuda.get_arch_list()) if count else (),
            tuple(torch.cuda.get_device_capability(index) for index in range(count)),
            tuple(torch.cuda.get_device_name(index) for index in range(count)),
            torch.backends.mps.is_available(),
        )


def _gpu_name(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_name(index))


def total_memory_bytes(device: str) -> int:
    """All memory of the device; of a container, its limit."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return machine_memory_bytes()


def _least(size_bytes: int, limit_bytes: int | None) -> int:
    return size_bytes if limit_bytes is None else min(size_bytes, limit_bytes)


def _linux_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")), ""
    )


def _mac_processor() -> str:
    command = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=2.0, check=True)  # noqa: S603 - fixed
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout
