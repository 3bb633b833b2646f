"""Whether the installed torch can use the graphics cards of this machine, and what to install where it cannot. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from molink.peer.device.graphics_cards import Card

CUDA_13_DRIVER = 580
"""Drivers from this version on know CUDA 13."""
CUDA_12_DRIVER = 525
OLDEST_OF_CUDA_13 = (7, 5)
"""Turing: builds for CUDA 13 have no kernels for older cards (PyTorch's support matrix, RELEASE.md)."""
OLDEST_OF_CUDA_12 = (5, 0)
NEWEST_OF_CUDA_126 = (9, 0)
"""Hopper: Blackwell needs a build for CUDA 12.8 or newer."""
_INDEX = "https://download.pytorch.org/whl"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch is made for, and what it has found."""

    version: str
    cuda: str | None
    """CUDA that it was built for, such as `13.0`."""
    hip: str | None
    """ROCm that it was built for."""
    architectures: tuple[str, ...]
    """`torch.cuda.get_arch_list()`: what it has kernels for."""
    capabilities: tuple[tuple[int, int], ...]
    """Of each GPU that it has found; of AMD's, whatever torch says."""
    gpu_names: tuple[str, ...]
    mps: bool
    """Whether it can use the GPU of this Mac."""


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether one of the architectures runs on a card of NVIDIA's: machine code of the same major version and no newer
    minor one, or code for any card (`compute_`) that is no newer (CUDA C programming guide, "Binary compatibility").
    """
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if found is None:
            continue
        kind, major, minor, special = found[1], int(found[2]), int(found[3]), found[4]
        if special == "a" and (major, minor) != capability:
            continue
        if (major, minor) <= capability and (major == capability[0] or (kind == "compute" and not special)):
            return True
    return False


def unusable_gpus(build: TorchBuild) -> dict[int, str]:
    """Of the GPUs that torch has found those for which it has no kernels: by their number, a sentence with the
    remedy."""
    if build.hip is not None or build.cuda is None:
        return {}
    return {
        index: f"torch {build.version} has no kernels for the {name} (compute capability "
        f"{capability[0]}.{capability[1]}): {_remedy(Card('NVIDIA', name, capability))}"
        for index, (name, capability) in enumerate(zip(build.gpu_names, build.capabilities, strict=True))
        if not has_kernels(build.architectures, capability)
    }


def why_not_used(cards: Sequence[Card], build: TorchBuild, hidden: str | None, system: str) -> str | None:
    """Why torch finds no GPU although the machine has one, and what to do about it; None where there is none.

    `hidden` is as `hidden_cards` says, `system` as `platform.system` does.
    """
    if not cards:
        return None
    card = cards[0]
    if card.maker == "Apple":
        return None if build.mps else _why_not_apple(card.name, build)
    name = f"a card of {card.maker}'s" if card.name == "a card" else f"the {card.name}"
    if hidden is not None:
        return f"{name} is hidden by {hidden}: unset it"
    return _why_not_amd(name, build, system) if card.maker == "AMD" else _why_not_nvidia(name, card, build)


def _why_not_apple(name: str, build: TorchBuild) -> str:
    return (
        f"torch {build.version} cannot use {name}: it needs an Apple processor, macOS 14 or newer and a "
        "Python for arm64, so update macOS, or install Python from python.org and MoLink in it"
    )


def _why_not_nvidia(name: str, card: Card, build: TorchBuild) -> str:
    if build.cuda is None:
        return f"{name} is not used, because torch {build.version} is a build without CUDA: {_remedy(card)}"
    if card.driver is None:
        return (
            f"{name} is not used, because NVIDIA's driver does not run: install it (version {CUDA_13_DRIVER} or "
            "newer) and start the machine again; in a container, start it with --gpus all"
        )
    if card.driver_cuda is not None and card.driver_cuda[0] < _major(build.cuda):
        wanted = CUDA_13_DRIVER if _major(build.cuda) >= 13 else CUDA_12_DRIVER
        return (
            f"{name} is not used, because its driver {card.driver} (CUDA {card.driver_cuda[0]}.{card.driver_cuda[1]}) "
            f"is older than CUDA {build.cuda}, for which torch {build.version} was built: update the driver to "
            f"{wanted} or newer{_or_other_build(card)}"
        )
    return (
        f"{name} is not used, because torch {build.version} for CUDA {build.cuda} cannot start it with driver "
        f"{card.driver}: start the machine again, and if that does not help install the driver anew"
    )


def _why_not_amd(name: str, build: TorchBuild, system: str) -> str:
    if build.hip is None:
        if system == "Windows":
            return (
                f"{name} is not used, because torch {build.version} is a build without ROCm: install AMD's own "
                "build of torch for Windows, or use Linux"
            )
        return (
            f"{name} is not used, because torch {build.version} is a build without ROCm: "
            f"{_install('torch', 'rocm7.0')}"
        )
    return (
        f"{name} is not used, because torch {build.version} for ROCm {build.hip} cannot open it: install AMD's "
        "driver, and let your user read /dev/kfd (`sudo usermod -aG render,video $USER`, then log in again)"
    )


def _remedy(card: Card) -> str:
    """Which build of torch runs on a card of NVIDIA's, with the driver that it has."""
    capability, cuda = card.capability, card.driver_cuda
    if capability is not None and capability < OLDEST_OF_CUDA_12:
        return "no torch that MoLink runs with has any for it, so type --device cpu"
    if capability is not None and capability < OLDEST_OF_CUDA_13:
        return _install("torch<2.15", "cu126")  # the last that is built for such cards
    if cuda is not None and cuda < (13, 0):
        if cuda >= (12, 0) and (capability is None or capability <= NEWEST_OF_CUDA_126):
            return _install("torch<2.15", "cu126")
        return f"update its driver to {CUDA_13_DRIVER} or newer, and {_install('torch', 'cu130')}"
    return _install("torch", "cu130")


def _or_other_build(card: Card) -> str:
    if card.driver_cuda is None or card.driver_cuda[0] < 12:
        return ""
    if card.capability is not None and card.capability > NEWEST_OF_CUDA_126:
        return ""
    return f", or {_install('torch<2.15', 'cu126')}"


def _install(what: str, index: str) -> str:
    wanted = f'"{what}"' if "<" in what else what
    return f"install another build with `pip install --force-reinstall {wanted} --index-url {_INDEX}/{index}`"


def _major(version: str) -> int:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else 0
