"""Graphics cards that this machine has, whatever torch makes of them: told by their drivers and by the system."""

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Maker = Literal["NVIDIA", "AMD", "Apple"]

LEAST_AMD_BYTES = 2 * 1024**3
"""With less memory of its own an AMD GPU is part of a processor, and of no use here."""
_PCI_MAKERS: dict[str, Maker] = {"0x10de": "NVIDIA"}
_AMD_PCI = "0x1002"
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True)
class Card:
    """A graphics card, as far as it can be told."""

    maker: Maker
    name: str
    capability: tuple[int, int] | None = None
    """Compute capability, of NVIDIA's."""
    driver: str | None = None
    """Version of the driver that runs, of NVIDIA's; None: none runs, or it cannot be asked."""
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""


def seen_cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """The cards of this machine. Those that share one maker's driver are told by it; else the system names them.

    `root` is where `/proc` and `/sys` are. Asks drivers and reads files: a few milliseconds.
    """
    if platform.system() == "Darwin":
        return (Card("Apple", "this Mac's GPU"),)
    nvidia = _cards_of_nvml() or _cards_of_proc(root) or _cards_of_pci(root)
    return (*nvidia, *_cards_of_amd(root))


def _cards_of_nvml() -> tuple[Card, ...]:
    """What NVIDIA's management library says, on Linux and Windows; nothing where it is not, or cannot answer."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return ()
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        newest = int(pynvml.nvmlSystemGetCudaDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Card(
                "NVIDIA",
                _text(pynvml.nvmlDeviceGetName(handle)),
                _asked(pynvml, pynvml.nvmlDeviceGetCudaComputeCapability, handle),
                driver,
                (newest // 1000, newest % 1000 // 10),
            )
            for handle in handles
        )
    except (pynvml.NVMLError, OSError):
        return ()
    finally:
        pynvml.nvmlShutdown()


def _asked(
    nvml: Any,  # noqa: ANN401 - a module
    ask: Callable[[object], tuple[int, int]],
    handle: object,
) -> tuple[int, int] | None:
    try:
        major, minor = ask(handle)
    except nvml.NVMLError:
        return None
    return major, minor


def _text(told: str | bytes) -> str:
    return told.decode(errors="replace") if isinstance(told, bytes) else told


def _cards_of_proc(root: Path) -> tuple[Card, ...]:
    """What NVIDIA's driver for Linux says of itself."""
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read(root / "proc/driver/nvidia/version"))
    found = []
    for folder in _listed(root / "proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s*(.+?)\s*$", _read(folder / "information"), re.MULTILINE)
        found.append(Card("NVIDIA", model[1] if model else "a card", None, version[1] if version else None))
    return tuple(found)


def _cards_of_pci(root: Path) -> tuple[Card, ...]:
    """Of NVIDIA's cards without a driver the system knows no more than the maker."""
    return tuple(
        Card(_PCI_MAKERS[maker], "a card")
        for folder in _listed(root / "sys/bus/pci/devices")
        if (maker := _read(folder / "vendor").strip()) in _PCI_MAKERS
        and _read(folder / "class").startswith(_DISPLAY_CLASS)
    )


def _cards_of_amd(root: Path) -> tuple[Card, ...]:
    """Those that Linux's driver has taken, which says how much memory they have of their own."""
    found = []
    for folder in _listed(root / "sys/class/drm"):
        device = folder / "device"
        if not re.fullmatch(r"card\d+", folder.name) or _read(device / "vendor").strip() != _AMD_PCI:
            continue
        size = _read(device / "mem_info_vram_total").strip()
        if size.isdecimal() and int(size) >= LEAST_AMD_BYTES:
            found.append(Card("AMD", _read(device / "product_name").strip() or "a card"))
    return tuple(found)


def hidden_cards() -> str | None:
    """The environment variable that hides all cards from this process, as it is set; None: they are not hidden."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = os.environ.get(name)
        if value is not None and value.strip() in ("", "-1", "NoDevFiles"):
            return f"{name}={value}"
    return None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
