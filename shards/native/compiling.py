"""Compiling of `few_rows.c` for the processor that it runs on, if gcc is installed; kept for later starts.

Other compilers bring an OpenMP of their own, whose threads would wait beside those of torch for the same processors;
the library uses torch's. On other systems than Linux nothing is compiled.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

COMPILER: Final = "gcc"
COMPILED_WITHIN_S: Final = 60.0
_DIGEST_LENGTH: Final = 32
_SOURCE: Final = Path(__file__).with_name("few_rows.c")
_PARTS: Final = (_SOURCE, _SOURCE.with_name("products.h"), _SOURCE.with_name("steps.h"))
_OPTIONS: Final = (
    "-std=gnu11", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC",
    "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip
"""Sums may be taken in any order, as everywhere in steps that need not be bitwise."""


@functools.cache
def compiled_library(folder: Path | None) -> ctypes.CDLL | None:
    """The library, from `folder` if it was kept there, else compiled and kept; without a folder, or where others could
    write into it, compiled for this process alone. None where it cannot be had: what it computes is then computed by
    torch."""
    openmp = _openmp()
    if sys.platform != "linux" or platform.machine() != "x86_64" or openmp is None:
        return None
    private = None if folder is None else _private(folder / "native")
    name = f"few-rows-{_name(openmp)}"
    for kept in () if private is None else sorted(private.glob(f"{name}-*.so")):
        with suppress(OSError):
            if kept.stem == f"{name}-{_digest(kept)}":
                return ctypes.CDLL(str(kept))
            kept.unlink()  # cut short by a full disk
    compiler = shutil.which(COMPILER)
    if compiler is None:
        return None
    try:
        with tempfile.TemporaryDirectory(dir=private) as folder_name:
            made = _compile(compiler, openmp, Path(folder_name))
            if private is not None:
                made = made.replace(private / f"{name}-{_digest(made)}.so")
            return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info(
            "decode steps use torch's products alone: %s could not compile others: %s", COMPILER, error
        )
        return None


def _private(folder: Path) -> Path | None:
    """The folder, made if it is not there; None if it is another user's or others may write into it: what lies there
    is executed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return folder if is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _openmp() -> Path | None:
    """GNU's OpenMP as torch brings it, so that both have the same threads."""
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


def _name(openmp: Path) -> str:
    """Of all that a library depends on: another processor, source or torch needs another one."""
    flags = next((line for line in _processor().splitlines() if line.startswith("flags")), "")
    sources = [path.read_text(encoding="utf-8") for path in _PARTS]
    what = (sources, _OPTIONS, openmp.name, torch.__version__, flags)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _digest(library: Path) -> str:
    """Part of a kept library's name: a file of which the end is missing would end the process that calls into it."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:_DIGEST_LENGTH]


def _processor() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def _compile(compiler: str, openmp: Path, folder: Path) -> Path:
    """Raises OSError or SubprocessError. Linked apart: `-fopenmp` would bring the compiler's own OpenMP."""
    unlinked, linked = folder / "few_rows.o", folder / "few_rows.so"
    for command in (
        (compiler, *_OPTIONS, "-c", _SOURCE, "-o", unlinked),
        (compiler, "-shared", unlinked, openmp, "-lm", "-o", linked),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILED_WITHIN_S)  # noqa: S603 - ours
    return linked
