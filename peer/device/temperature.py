"""Temperature of the processors, where the system tells it."""

from collections.abc import Mapping, Sequence

import psutil

_PROCESSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "cpu-thermal", "acpitz")
"""Names of sensors of processors (Linux's hwmon), the best first; the last one is often the mainboard's."""


def processor_celsius() -> float | None:
    """The highest temperature of the processors' sensors; None where there are none, or psutil does not read them (on
    Windows and macOS)."""
    read = getattr(psutil, "sensors_temperatures", None)
    if read is None:
        return None
    try:
        sensors = read()
    except (OSError, RuntimeError):  # a sensor that went away while it was read
        return None
    return highest_celsius({name: [one.current for one in found] for name, found in sensors.items()})


def highest_celsius(sensors: Mapping[str, Sequence[float]]) -> float | None:
    """The highest of the best sensors that there are.

    Args:
        sensors: what each sensor's places tell, by its name. What cannot be a temperature of a running machine, as some
            sensors tell that are there and not connected, is left out.
    """
    for name in _PROCESSORS:
        plausible = [celsius for celsius in sensors.get(name, []) if 0 < celsius < 150]
        if plausible:
            return max(plausible)
    return None
