"""Temperatures of the machine, where the system tells them; what `machine_status.py` and a peer's own view show."""

from collections.abc import Mapping

import psutil

_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu-thermal", "acpitz")
"""Names of sensors of processors (Linux's hwmon), the best first; the last one is often the mainboard's."""


def read_temperatures_c() -> dict[str, float]:
    """The hottest of each kind of sensor; empty where there are none, or psutil reads none (on Windows and macOS)."""
    read = getattr(psutil, "sensors_temperatures", None)
    try:
        told = {} if read is None else read()
    except (OSError, RuntimeError):  # a sensor that went away while it was read
        return {}
    return {kind: max(one.current for one in sensors) for kind, sensors in told.items() if sensors}


def processor_c(temperatures_c: Mapping[str, float]) -> float | None:
    """The temperature of the processors, by the best sensor that there is; None: not known. What cannot be that of a
    running machine, as sensors tell that are not connected, is left out."""
    for name in _PROCESSORS:
        if 0 < temperatures_c.get(name, 0.0) < 150:
            return temperatures_c[name]
    return None


def read_processor_c() -> float | None:
    """The temperature of the processors now; None: not known."""
    return processor_c(read_temperatures_c())
