"""`molink-peer doctor --report`: what runs here, for whoever mends it. Names no user, host, address, folder or key."""

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from molink.commands import plain
from molink.peer.deaths import past_deaths, software_here, ways_to_leave_out
from molink.processor import processor_flags

PACKAGES: Final = ("molink", "torch", "transformers", "numpy", "grpcio", "libp2p", "bitsandbytes", "protobuf")
_SETTINGS: Final = (
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OMP_",
    "CUDA_VISIBLE_",
    "LD_PRELOAD",
    "PYTHONMALLOC",
)
"""Beginnings of the environment's names that decide what native code does."""
_ADDRESS: Final = re.compile(
    r"/(?:ip[46]|dns[46]?)/\S+|\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d+)?|\b12D3Koo\w+|(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}",
    re.IGNORECASE,
)
_PATH: Final = re.compile(r"(?:[A-Za-z]:\\|~[\\/]|(?<![\w/.])/)[^\s,;:'\"()]+")
_SECRET: Final = re.compile(r"\b[A-Za-z0-9+/_-]{40,}={0,2}")


def report_of(state_dir: Path) -> dict[str, Any]:
    """The report, JSON-ready. Asks nothing of the network, and of a peer that runs nothing but its files."""
    import psutil

    from molink.peer.device.device import (
        default_memory_bytes,
        free_memory_bytes,
        processor_count,
        processor_name,
        total_memory_bytes,
    )
    from molink.peer.device.graphics_cards import seen_cards

    deaths = past_deaths(state_dir)
    report = {
        "versions": {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": " ".join(platform.libc_ver()).strip() or None,
            **{package: _version(package) for package in PACKAGES},
        },
        "processor": {
            "name": processor_name(),
            "flags": sorted(processor_flags() or ()),
            "processors": os.cpu_count(),
            "usable_processors": processor_count(),
        },
        "memory": {
            "total_bytes": psutil.virtual_memory().total,
            "usable_bytes": total_memory_bytes("cpu"),
            "free_bytes": free_memory_bytes("cpu"),
            "offered_bytes": default_memory_bytes("cpu"),
        },
        "graphics_cards": [asdict(card) for card in seen_cards()],
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)
        },
        "ways": _ways(ways_to_leave_out(deaths, software_here())),
        "deaths": [
            {
                "death": str(death),
                "ways": list(death.ways),
                "same_software": death.software == software_here(),
            }
            for death in deaths
        ],
    }
    cleaned: dict[str, Any] = _cleaned(report, _names(state_dir))
    return cleaned


def _ways(left_out: Iterable[str]) -> dict[str, Any]:
    """Native ways that are used, with the bytes of weights that each reads a second, and those that are not, with the
    reason."""
    from molink.peer.compute.native_ways import WaysRecord
    from molink.shards.native.compiling import user_folder

    record = WaysRecord.read(user_folder())
    speeds = record.speeds()
    return {
        "chosen": {
            name: f"{speeds[name] / 1e9:.1f} GB/s" if speeds.get(name) else "not measured"
            for name in record.chosen
        },
        "tried": sorted({tried.job.way for tried in record.tried}),
        "dropped": {dropped.name: dropped.reason for dropped in record.dropped},
        "left_out_after_deaths": sorted(left_out),
    }


def print_report(report: Mapping[str, Any]) -> None:
    """Prints it for people: a heading for each part, a line for each value."""
    for part, content in report.items():
        print(f"{part.replace('_', ' ')}:")
        rows = content.items() if isinstance(content, dict) else ((None, one) for one in content)
        lines = [_line(name, value) for name, value in rows]
        print("\n".join(lines or ["  none"]))


def _line(name: str | None, value: Any) -> str:  # noqa: ANN401 - a JSON value
    if isinstance(value, dict):
        shown = ", ".join(f"{key.replace('_', ' ')} {_text(one)}" for key, one in value.items()) or "none"
    else:
        shown = _text(value)
    return f"  {shown}" if name is None else f"  {name.replace('_', ' ')}: {plain(shown)}"


def _text(value: Any) -> str:  # noqa: ANN401 - a JSON value
    if value is None:
        return "unknown"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _names(state_dir: Path) -> tuple[str, ...]:
    """Words that would say whose machine this is: the user's and the host's names, and folders."""
    names = {str(Path.home()), str(state_dir), str(Path.cwd()), socket.gethostname(), platform.node()}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    names.update(
        os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "COMPUTERNAME", "HOSTNAME")
    )
    names.update({name.partition(".")[0] for name in names if name.count(".") and "/" not in name})
    return tuple(sorted((name for name in names if len(name) > 1), key=len, reverse=True))


def _cleaned(value: Any, names: tuple[str, ...]) -> Any:  # noqa: ANN401 - a JSON value
    """The same without names, addresses, paths and what may be a key; but for versions, which are numbers with dots."""
    if isinstance(value, dict):
        return {
            key: one if key in ("versions", "flags") else _cleaned(one, names) for key, one in value.items()
        }
    if isinstance(value, list):
        return [_cleaned(one, names) for one in value]
    return cleaned(value, names) if isinstance(value, str) else value


def cleaned(text: str, names: Iterable[str]) -> str:
    """The text with `…` where a name, an address, a path or what may be a key stood."""
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
    for pattern in (_ADDRESS, _PATH, _SECRET):
        text = pattern.sub("…", text)
    return text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
