"""Limits of the control groups that this process is in: containers, services and batch jobs. Linux only.

A process is in one group of the unified hierarchy (version 2) and in one of each older one (version 1); machines have
either or both. A limit holds for all groups below it, so the least one on the way from a process's group to where its
hierarchy is mounted counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Memory and processors that a process may use; None: no group limits it."""

    memory_bytes: int | None = None
    free_bytes: int | None = None
    """The least that any limit leaves. What is cached of files and not in use is free."""
    processors: float | None = None
    """May be a fraction: time of the processors per time that passes."""


def read_group_limits(root: Path = ROOT) -> GroupLimits:
    """Reads the limits of this process under a root folder that has `proc` and `sys`."""
    folders = list(_folders(root))
    memory = [limit for folder in folders if (limit := _memory_limit(folder)) is not None]
    free = [left for folder in folders if (left := _free_bytes(folder)) is not None]
    processors = [share for folder in folders if (share := _processors(folder)) is not None]
    return GroupLimits(
        min(memory, default=None), max(0, min(free)) if free else None, min(processors, default=None)
    )


def _folders(root: Path) -> Iterator[Path]:
    """Each group's folder, from the process's own up to its hierarchy's mount."""
    paths = dict(_paths(root))
    for line in _lines(root / "proc/self/mountinfo"):
        words, _, options = line.partition(" - ")
        kind, _, of_mount = options.partition(" ")
        if kind not in ("cgroup", "cgroup2"):
            continue
        mounted, mount = words.split()[3:5]
        named = set(of_mount.split()[-1].split(",")) if kind == "cgroup" else {""}
        path = next((path for name, path in paths.items() if name in named), mounted)
        top = root / mount.lstrip("/")
        inside = path.removeprefix(mounted.rstrip("/")) if path.startswith(mounted) else ""
        folder = top / inside.strip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _paths(root: Path) -> Iterator[tuple[str, str]]:
    """The path of this process's group by controller; of the unified hierarchy by an empty name."""
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        yield from ((name, path) for name in names.split(","))


def _memory_limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    return limit if limit is not None else _number(folder / "memory.limit_in_bytes")


def _free_bytes(folder: Path) -> int | None:
    limit, used = _memory_limit(folder), _number(folder / "memory.current")
    if used is None:
        used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    counted = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if " " in line)
    return limit - used + int(counted.get("total_inactive_file", counted.get("inactive_file", 0)))


def _processors(folder: Path) -> float | None:
    quota, period = (*next(_lines(folder / "cpu.max"), "").split(), "", "")[:2]
    if not quota:
        quota, period = (
            next(_lines(folder / f"cpu.cfs_{name}_us"), "").strip() for name in ("quota", "period")
        )
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _number(file: Path) -> int | None:
    """A figure; None where the file is missing or says that there is no limit."""
    text = next(_lines(file), "").strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> Iterator[str]:
    try:
        yield from file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
