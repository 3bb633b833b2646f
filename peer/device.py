"""Where a peer computes, and how much of the machine it may take."""

import ctypes
import gc
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from molink.dht.configuration import SettingsError
from molink.dht.records import Device
from molink.peer.memory import format_bytes

CPU_SHARE = 0.5
"""Part of the memory available now that a peer takes by default: the rest is the volunteer's."""
GPU_SHARE = 0.9
LOW_NICENESS = 10
"""Of 0 to 19: a program of normal priority gets nine times as much of a processor that both want."""
_CGROUP = Path("/sys/fs/cgroup")


def choose_device(name: str) -> str:
    """The torch device that `--device name` means: `cpu`, `cuda:N` or `mps`.

    `auto` is the first GPU, or the processor where there is none.

    Raises:
        SettingsError: this machine has no such device; it names those that there are.
    """
    there = _available()
    if name == "auto":
        return there[min(1, len(there) - 1)]
    wanted = "cuda:0" if name == "cuda" else name
    if "," in wanted:
        raise SettingsError(f"--device {name}: here only one device at a time; name one of them")
    if wanted not in there:
        raise SettingsError(
            f"--device {name} is not there: this machine has {', '.join(there)}{_why_no_gpu(wanted)}"
        )
    return wanted


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
    from molink.shards.collectives import collectives_refusal

    return collectives_refusal(device)


def describe_device(device: str) -> Device:
    """What peers are told about `device`, as `choose_device` returned it."""
    kind, _, index = device.partition(":")
    return Device(
        kind=kind,
        name=_gpu_name(int(index)) if kind == "cuda" else processor_name(),
        count=1,
        memory_bytes=_total_bytes(device),
        system=f"{platform.system()} {platform.machine()}",
        processors=processor_count(),
    )


def free_memory_bytes(device: str) -> int:
    """Memory of the device that nobody uses now; of a container, no more than its limit leaves."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)  # Apple GPUs share the machine's memory
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    return available if limit is None or used is None else max(0, min(available, limit - used))


def default_memory_bytes(device: str) -> int:
    """What a peer takes without `--memory`: half of the available memory, or 90 % of a GPU's free memory."""
    return int(free_memory_bytes(device) * (GPU_SHARE if device.startswith("cuda") else CPU_SHARE))


def check_memory(devices: tuple[str, ...], wanted_bytes: int | None) -> None:
    """Raises:
    SettingsError: the devices together do not have as much memory as `--memory` says.
    """
    there_bytes = len(devices) * min(map(_total_bytes, devices))
    if wanted_bytes is not None and wanted_bytes > there_bytes:
        raise SettingsError(
            f"--memory {format_bytes(wanted_bytes)} is more than {' and '.join(devices)} of this machine can have, "
            f"{format_bytes(there_bytes)}: give less, or leave it out for "
            f"{format_bytes(len(devices) * min(map(default_memory_bytes, devices)))}"
        )


def cap_gpu_memory(device: str, cap_bytes: int) -> None:
    """No more than so much of that GPU's memory can be allocated from now on. Of other devices nothing is capped here:
    see `memory_guard.py`."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / _total_bytes(device)), device)


def give_back_memory(device: str) -> None:
    """What nobody uses any more goes back to the system, though allocators would keep it, and though it belongs to
    cycles of objects that were frozen."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
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


def processor_count() -> int:
    """Processors that this process may use: those it is bound to, and no more than its container's share is worth."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(bound, _cgroup_processors() or bound))


def processor_name() -> str:
    """The processor's name for people, such as `AMD Ryzen 7 7800X3D`."""
    known = {"Linux": _linux_processor, "Darwin": _mac_processor}.get(platform.system(), platform.processor)
    return (known() or platform.processor() or platform.machine() or "processor").strip()


def _available() -> tuple[str, ...]:
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return tuple(devices)


def _why_no_gpu(wanted: str) -> str:
    import torch

    if wanted.startswith("cuda") and torch.version.cuda is None and torch.version.hip is None:
        return f"; the installed torch {torch.__version__} has no GPU support: install a build that has it"
    return ""


def _gpu_name(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_name(index))


def _total_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    total = int(psutil.virtual_memory().total)
    limit = _cgroup_bytes("memory.max")
    return total if limit is None else min(total, limit)


def _cgroup_bytes(name: str) -> int | None:
    """A figure of the container that this process is in; None outside of one, or if it has no limit."""
    try:
        return int((_CGROUP / name).read_text(encoding="ascii"))
    except (OSError, ValueError):  # ValueError: "max"
        return None


def _cgroup_processors() -> int | None:
    """Whole processors that the container's quota is worth, at least one; None where there is no quota."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # ValueError: "max"
        return None


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
