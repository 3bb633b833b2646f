"""Libraries that this product needs: the releases that were tried with it, and what to say of one that is broken."""

import re
import traceback
from collections.abc import Iterator
from importlib import metadata
from types import TracebackType

from packaging.requirements import Requirement

_NAMED_OTHERWISE = {
    "google": "protobuf",
    "grpc": "grpcio",
    "pynvml": "nvidia-ml-py",
    "prompt_toolkit": "prompt-toolkit",
}
"""Distributions whose modules have other names."""


def requirement(distribution: str) -> Requirement | None:
    """Requirement that this product states of a distribution."""
    try:
        stated = map(Requirement, metadata.requires("molink") or ())
    except metadata.PackageNotFoundError:  # run from a tree that was not installed
        return None
    return next((one for one in stated if one.name == distribution and one.specifier), None)


def untried(distribution: str) -> str | None:
    """Sentence about an installed release that this product was not tried with, None if it was."""
    wanted = requirement(distribution)
    if wanted is None:
        return None
    version = metadata.version(distribution)
    if wanted.specifier.contains(version, prereleases=True):
        return None
    return f"{distribution} {version} was not tried, {wanted.specifier} was: pip install '{_plain(wanted)}'"


def broken_library(error: BaseException) -> str | None:
    """Sentence about a library that this product needs and that failed while it was imported, None for other errors."""
    importing = any(frame.name == "<module>" for frame in traceback.extract_tb(error.__traceback__))
    if not importing and not isinstance(error, ImportError):
        return None
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "molink":
        return None
    for name in _suspects(error):
        wanted = requirement(_NAMED_OTHERWISE.get(name, name))
        if wanted is not None:
            break
    else:
        return None
    why = " ".join(f"{type(error).__name__}: {error}".split())
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed: pip install '{_plain(wanted)}'"
    return (
        f"{wanted.name} {version} is installed and cannot be used ({why}): "
        f"pip install --force-reinstall '{_plain(wanted)}'"
    )


def _suspects(error: BaseException) -> Iterator[str]:
    """Top names of modules that may have failed: the one that an ImportError names, then those that were importing."""
    if isinstance(error, ImportError) and error.name:
        yield error.name.partition(".")[0]
    names: list[str] = []
    frame: TracebackType | None = error.__traceback__
    while frame is not None:
        names.append(str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.tb_next
    yield from reversed(names)


def _plain(wanted: Requirement) -> str:
    return re.sub(r"\s", "", f"{wanted.name}{wanted.specifier}")
