"""This machine as its operator sees it: what it is, and what it does now. What cannot be told here is None.

The system tells by psutil, NVIDIA's cards by NVML where that is installed. Nothing here names a program or a user.
"""

import platform
import socket
from contextlib import suppress
from typing import Any, Final

import psutil

from molink.peer.device.device import free_memory_bytes, machine_memory_bytes, processor_count
from molink.peer.device.graphics_cards import seen_cards
from molink.peer.device.machine import network_addresses
from molink.peer.device.temperature import read_temperatures_c

CPU_WINDOW_S: Final = 0.2
"""Over which the processors' load is measured."""


def describe_machine() -> dict[str, Any]:
    """Returns what this machine is, JSON-ready: host, system, hardware, drivers, network."""
    return {
        "hostname": socket.gethostname(),
        "system": platform.system(),
        "system_version": platform.version(),
        "release": platform.release(),
        "machine": platform.machine(),
        "processor": platform.processor() or None,
        "processors": processor_count(),
        "memory_bytes": machine_memory_bytes(),
        "gpus": [{"maker": card.maker, "name": card.name, "driver": card.driver} for card in seen_cards()],
        "addresses": [one.address for one in network_addresses() if not one.loopback],
    }


def read_machine_status() -> dict[str, Any]:
    """Returns what this machine does now, JSON-ready: load, memory, temperatures, power. Blocks for CPU_WINDOW_S."""
    total_bytes = machine_memory_bytes()
    return {
        "cpu_percent": psutil.cpu_percent(interval=CPU_WINDOW_S),
        "memory_used_bytes": total_bytes - free_memory_bytes("cpu"),
        "memory_total_bytes": total_bytes,
        "process_bytes": psutil.Process().memory_info().rss,
        "temperatures_c": read_temperatures_c() or None,
        "gpus": _nvidia_status(),
    }


def _nvidia_status() -> list[dict[str, Any]] | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu_status(pynvml, handle) for handle in handles]
    except (pynvml.NVMLError, OSError):
        return None
    finally:
        pynvml.nvmlShutdown()


def _gpu_status(nvml: Any, handle: object) -> dict[str, Any]:  # noqa: ANN401 - a module
    """What one card tells; a card need not have every sensor."""
    status: dict[str, Any] = dict.fromkeys(
        ("name", "gpu_percent", "memory_used_bytes", "memory_total_bytes", "power_w", "temperature_c")
    )
    with suppress(nvml.NVMLError):
        name = nvml.nvmlDeviceGetName(handle)
        status["name"] = name.decode(errors="replace") if isinstance(name, bytes) else name
    with suppress(nvml.NVMLError):
        status["gpu_percent"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        status["memory_used_bytes"], status["memory_total_bytes"] = int(memory.used), int(memory.total)
    with suppress(nvml.NVMLError):
        status["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with suppress(nvml.NVMLError):
        status["temperature_c"] = float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return status
