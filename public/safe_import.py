"""Packages that end the process where the processor lacks what they were compiled for: tried elsewhere first."""

import ctypes
import importlib
import signal
import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from molink.processor import is_x86, processor_flags

NEEDED_FLAGS: Final = {"numpy": frozenset({"sse4_2"}), "bitsandbytes": frozenset({"avx"})}
"""Abilities with which each package has always been imported; without them an x86 processor may be too old for it."""
_TRIED_WITHIN_S: Final = 300
_ILLEGAL_INSTRUCTION: Final = 0xC000001D
"""Exit status of Windows."""
_SEM_FAILCRITICALERRORS: Final = 0x0001
_SEM_NOGPFAULTERRORBOX: Final = 0x0002
_PR_SET_DUMPABLE: Final = 4


def import_refusal(package: str, remedy: str, flags: Collection[str] | None = None) -> str | None:
    """Why the package must not be imported here, with the `remedy` for it; None: it may be, or is not installed.

    A process of its own imports it where the processor's `flags` (default: this machine's) leave doubt.
    """
    found = processor_flags() if flags is None else flags
    lacks = NEEDED_FLAGS[package].difference(found or NEEDED_FLAGS[package])
    if package in sys.modules or not is_x86() or not lacks:
        return None
    try:
        installed = version(package)
    except PackageNotFoundError:
        return None
    try:
        tried = subprocess.run(  # noqa: S603 - the names are ours
            [sys.executable, "-c", _child(package)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIED_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _sentence(package, installed, "did not end in time", lacks, remedy)
    status = tried.returncode
    if status >= 0 and status != _ILLEGAL_INSTRUCTION:
        return None  # what is wrong beside, its own import says
    name = "SIGILL" if status > 0 else signal.Signals(-status).name
    return _sentence(package, installed, f"ends with {name}", lacks, remedy)


def _child(package: str) -> str:
    """A program that imports the package and leaves no core dump."""
    return f"from molink.safe_import import forbid_core_dumps; forbid_core_dumps(); import {package}"


def forbid_core_dumps() -> None:
    """The process may die without a dump of its memory and without a window that says so."""
    if sys.platform == "win32":
        vars(ctypes)["windll"].kernel32.SetErrorMode(_SEM_FAILCRITICALERRORS | _SEM_NOGPFAULTERRORBOX)
        return
    resource: Any = importlib.import_module("resource")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # the limit does not hold for dumps that are piped to a program
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _sentence(package: str, installed: str, what: str, lacks: Collection[str], remedy: str) -> str:
    return f"importing {package} {installed} {what} on this processor, which lacks {', '.join(sorted(lacks))}: {remedy}"
