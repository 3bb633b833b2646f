"""Abilities of this machine's processor, asked of the system: libraries that are compiled for more die of it."""

import ctypes
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

_WINDOWS_FEATURES: Final = {
    "sse4_2": 38,
    "avx": 39,
    "avx2": 40,
    "avx512f": 41,
}
"""Numbers that Windows' `IsProcessorFeaturePresent` takes; it knows no others that matter here."""
_ASKED_WITHIN_S: Final = 10


def is_x86() -> bool:
    """True if the processor is of AMD's or Intel's kind, with 64 bits."""
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def processor_flags() -> frozenset[str] | None:
    """The processor's abilities as Linux calls them, such as `avx2`; None: the system does not say."""
    known = {"Linux": _of_linux, "Windows": _of_windows, "Darwin": _of_macos}.get(platform.system())
    return None if known is None else known()


def _of_linux() -> frozenset[str] | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(value.split())
    except OSError:
        pass
    return None


def _of_windows() -> frozenset[str] | None:
    kernel: Any = vars(ctypes)["windll"].kernel32
    return frozenset(
        name for name, number in _WINDOWS_FEATURES.items() if kernel.IsProcessorFeaturePresent(number)
    )


def _of_macos() -> frozenset[str] | None:
    names = ["machdep.cpu.features", "machdep.cpu.leaf7_features"] if is_x86() else ["hw.optional"]
    try:
        asked = subprocess.run(  # noqa: S603 - nothing of it comes from outside
            ["/usr/sbin/sysctl", *names], capture_output=True, text=True, timeout=_ASKED_WITHIN_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return macos_flags(asked.stdout) or None


def macos_flags(said: str) -> frozenset[str]:
    """The abilities in what macOS's `sysctl` prints: a list of names on Intel's, one line for each on Apple's."""
    flags: set[str] = set()
    for line in said.splitlines():
        name, _, value = line.partition(":")
        if name.startswith("hw.optional."):
            flags.update([name.rpartition(".")[2].lower()] if value.strip() == "1" else ())
        else:
            flags.update(
                word.lower().replace("sse4.", "sse4_").replace("avx1.0", "avx") for word in value.split()
            )
    return frozenset(flags)
