"""Compiling of `few_rows.c` for the processor that it runs on, if gcc is installed; kept for all of a user's later
processes.

Other compilers bring an OpenMP of their own, whose threads would wait beside those of torch for the same processors;
the library uses torch's. On other systems than Linux nothing is compiled. Of processes that want it at the same time
one compiles, and the others wait for it.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

logger = logging.getLogger(__name__)

COMPILER: Final = "gcc"
COMPILED_WITHIN_S: Final = 60.0
_DIGEST_LENGTH: Final = 32
_UNFINISHED: Final = "unfinished-"
_MOST_KEPT: Final = 8
"""Libraries of other versions, the newest."""
_SOURCE: Final = Path(__file__).with_name("few_rows.c")
_PARTS: Final = (_SOURCE, _SOURCE.with_name("products.h"), _SOURCE.with_name("steps.h"))
_OPTIONS: Final = (
    "-std=gnu11", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-fPIC", "-pipe",
    "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros",
)  # fmt: skip
"""Sums may be taken in any order, as everywhere in steps that need not be bitwise."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """What makes the library in a folder that is kept, and is to be done by one process at a time."""

    folder: Path
    lock: Path
    """A file to be locked meanwhile."""
    _compiler: str
    _openmp: Path

    @contextmanager
    def steps(self) -> Iterator[tuple[tuple[str, ...], ...]]:
        """The commands, each to be run when the one before has succeeded; behind them the library is kept. What an
        earlier process left behind is removed. Raises OSError where nothing can be kept."""
        for left in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_UNFINISHED) as name:
            commands, made = _commands(self._compiler, self._openmp, Path(name))
            yield commands
            made.replace(self.folder / f"{_prefix(self._openmp)}-{_digest(made)}.so")
        kept = sorted(self.folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
        for old in kept[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)


def user_folder() -> Path:
    """Where all processes of this user keep the library."""
    return Path(user_cache_dir("molink", appauthor=False)) / "native"


def kept_library(folder: Path) -> ctypes.CDLL | None:
    """The library if it is kept in `folder`, and others cannot write into that. Takes milliseconds."""
    openmp, private = _openmp(), _private(folder)
    if openmp is None or private is None:
        return None
    prefix = _prefix(openmp)
    for kept in sorted(private.glob(f"{prefix}-*.so")):
        with suppress(OSError):
            if kept.stem == f"{prefix}-{_digest(kept)}":
                return ctypes.CDLL(str(kept))
            kept.unlink()  # cut short by a full disk
    return None


def kept_library_name(folder: Path) -> str:
    """Name of the library that `kept_library` would load, by its contents and all that it depends on; empty where there
    is none."""
    openmp, private = _openmp(), _private(folder)
    if openmp is None or private is None:
        return ""
    return next((path.stem for path in sorted(private.glob(f"{_prefix(openmp)}-*.so"))), "")


def compilation(folder: Path) -> Compilation | None:
    """How the library would be made and kept in `folder`; None where it cannot be."""
    openmp, compiler = _openmp(), shutil.which(COMPILER)
    private = None if openmp is None or compiler is None else _private(folder)
    if openmp is None or compiler is None or private is None:
        return None
    return Compilation(private, private / "lock", compiler, openmp)


@functools.cache
def compiled_library(folder: Path) -> ctypes.CDLL | None:
    """The library, from `folder` if it was kept there, else compiled and kept, which takes seconds; where others could
    write into it, compiled for this process alone. None where it cannot be had: what it computes is then computed by
    torch."""
    found, openmp, compiler = kept_library(folder), _openmp(), shutil.which(COMPILER)
    if found is not None or openmp is None or compiler is None:
        return found
    how = compilation(folder)
    try:
        if how is None:
            return _compiled_alone(compiler, openmp)
        with FileLock(how.lock, timeout=COMPILED_WITHIN_S):
            found = kept_library(folder)
            if found is None:
                with how.steps() as commands:
                    _run(commands)
                found = kept_library(folder)
            return found
    except (OSError, subprocess.SubprocessError, Timeout) as error:
        say_not_compiled(error)
        return None


def say_not_compiled(error: Exception) -> None:
    """Writes down why there is no library."""
    logger.info("decode steps use torch's products alone: %s could not compile others: %s", COMPILER, error)


def _compiled_alone(compiler: str, openmp: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as name:
        commands, made = _commands(compiler, openmp, Path(name))
        _run(commands)
        return ctypes.CDLL(str(made))


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


@functools.cache
def _openmp() -> Path | None:
    """GNU's OpenMP as torch brings it, so that both have the same threads; None where nothing is compiled."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    return next(Path(torch.__file__).parent.glob("lib/libgomp*.so*"), None)


@functools.cache
def _prefix(openmp: Path) -> str:
    """Of the names of libraries that serve here."""
    return f"few-rows-{_name(openmp)}"


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


def _commands(compiler: str, openmp: Path, folder: Path) -> tuple[tuple[tuple[str, ...], ...], Path]:
    """What to run, and what that makes. Linked apart: `-fopenmp` would bring the compiler's own OpenMP."""
    unlinked, linked = folder / "few_rows.o", folder / "few_rows.so"
    compiling = (compiler, *_OPTIONS, "-c", str(_SOURCE), "-o", str(unlinked))
    return (compiling, (compiler, "-shared", str(unlinked), str(openmp), "-lm", "-o", str(linked))), linked


def _run(commands: tuple[tuple[str, ...], ...]) -> None:
    """Raises OSError or SubprocessError."""
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILED_WITHIN_S)  # noqa: S603 - ours
