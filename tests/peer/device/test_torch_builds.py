"""A card that the installed torch cannot use is named with the reason and the command that helps."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from molink.peer.device import graphics_cards
from molink.peer.device.graphics_cards import LEAST_AMD_BYTES, Card, hidden_cards, seen_cards
from molink.peer.device.torch_builds import TorchBuild, has_kernels, unusable_gpus, why_not_used

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


def build(
    version: str = "2.13.0+cu130",
    cuda: str | None = "13.0",
    hip: str | None = None,
    architectures: tuple[str, ...] = CU130,
    found: tuple[tuple[str, tuple[int, int]], ...] = (),
    *,
    mps: bool = False,
) -> TorchBuild:
    capabilities = tuple(capability for _, capability in found)
    return TorchBuild(version, cuda, hip, architectures, capabilities, tuple(name for name, _ in found), mps)


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (CU130, (6, 1), False),
        (CU130, (7, 0), False),
        (CU130, (7, 5), True),
        (CU130, (8, 9), True),
        (CU130, (10, 3), True),
        (CU130, (12, 1), True),
        (CU130, (13, 0), True),
        (CU126, (6, 1), True),
        (CU126, (12, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("sm_120f",), (12, 1), True),
        (("compute_70",), (9, 0), True),
        (("sm_86",), (8, 0), False),
        (("gfx1100",), (11, 0), False),
        ((), (8, 0), False),
    ],
)
def test_kernels_run_on_the_same_major_version_and_on_newer_cards_from_portable_code(
    architectures: tuple[str, ...], capability: tuple[int, int], expected: bool
) -> None:
    assert has_kernels(architectures, capability) is expected


@pytest.mark.parametrize(
    ("name", "capability", "torch", "remedy"),
    [
        ("GTX 1080", (6, 1), build(), '"torch<2.15" --index-url https://download.pytorch.org/whl/cu126'),
        ("V100", (7, 0), build(), "whl/cu126"),
        ("RTX 5090", (12, 0), build("2.7.1+cu126", "12.6", None, CU126), "torch --index-url"),
        ("GTX 680", (3, 0), build(), "type --device cpu"),
    ],
)
def test_a_card_without_kernels_is_told_the_build_that_has_them(
    name: str, capability: tuple[int, int], torch: TorchBuild, remedy: str
) -> None:
    found = build(
        torch.version, torch.cuda, None, torch.architectures, (("RTX 4090", (8, 9)), (name, capability))
    )
    said = unusable_gpus(found)
    assert set(said) == {1}
    assert said[1].startswith(f"torch {torch.version} has no kernels for the {name} (compute capability ")
    assert remedy in said[1]


def test_of_amds_cards_torch_alone_knows_what_it_has_kernels_for() -> None:
    assert unusable_gpus(build("2.13+rocm7.0", None, "7.0", ("gfx1100",), (("RX 7900", (11, 0)),))) == {}


RTX_3060 = Card("NVIDIA", "NVIDIA GeForce RTX 3060", (8, 6), "535.183.01", (12, 2))
RTX_5090 = Card("NVIDIA", "NVIDIA GeForce RTX 5090", (12, 0), "590.44.01", (13, 1))
WITHOUT = build("2.13.0+cpu", None, None, ())


@pytest.mark.parametrize(
    ("card", "torch", "hidden", "system", "expected"),
    [
        (RTX_3060, WITHOUT, None, "Windows", ("build without CUDA", '"torch<2.15"', "whl/cu126")),
        (RTX_5090, WITHOUT, None, "Linux", ("build without CUDA", "whl/cu130")),
        (
            RTX_3060,
            build(),
            None,
            "Linux",
            ("its driver 535.183.01 (CUDA 12.2) is older", "580", "whl/cu126"),
        ),
        (
            Card("NVIDIA", "NVIDIA GeForce GTX 960", (5, 2), "470.1", (11, 4)),
            build("2.9+cu126", "12.6", None, CU126),
            None,
            "Linux",
            ("update the driver to 525 or newer",),
        ),
        (
            RTX_5090,
            build(),
            "CUDA_VISIBLE_DEVICES=-1",
            "Linux",
            ("hidden by CUDA_VISIBLE_DEVICES=-1: unset",),
        ),
        (
            RTX_5090,
            build(),
            None,
            "Linux",
            ("cannot start it with driver 590.44.01", "start the machine again"),
        ),
        (Card("NVIDIA", "a card"), build(), None, "Linux", ("driver does not run", "--gpus all")),
        (Card("AMD", "Radeon RX 7900 XTX"), build(), None, "Linux", ("build without ROCm", "whl/rocm7.0")),
        (Card("AMD", "Radeon RX 7900 XTX"), build(), None, "Windows", ("AMD's own build",)),
        (Card("AMD", "a card"), build("2.13+rocm", None, "7.0"), None, "Linux", ("/dev/kfd",)),
        (Card("Apple", "this Mac's GPU"), build("2.13", None), None, "Darwin", ("macOS 14",)),
    ],
)
def test_each_reason_has_its_remedy(
    card: Card, torch: TorchBuild, hidden: str | None, system: str, expected: tuple[str, ...]
) -> None:
    said = why_not_used((card,), torch, hidden, system)
    assert said is not None
    assert card.name in said or card.maker in said
    for words in expected:
        assert words in said
    assert "\n" not in said


def test_a_card_that_is_used_or_not_there_is_no_news() -> None:
    assert why_not_used((), WITHOUT, None, "Linux") is None
    assert (
        why_not_used((Card("Apple", "this Mac's GPU"),), build("2.13", None, mps=True), None, "Darwin")
        is None
    )


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphics_cards, "_cards_of_nvml", tuple)
    monkeypatch.setattr(graphics_cards.platform, "system", lambda: "Linux")


def test_nvidias_driver_names_its_cards_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_nvml(monkeypatch)
    write(
        tmp_path / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.64.03  Release Build\n",
    )
    write(tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H100\nIRQ: 1\n")
    assert seen_cards(tmp_path) == (Card("NVIDIA", "NVIDIA H100", None, "575.64.03"),)


def test_a_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvml(monkeypatch)
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030000"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]
    ):
        write(tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", f"{vendor}\n")
        write(tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0/class", f"{kind}\n")
    assert seen_cards(tmp_path) == (Card("NVIDIA", "a card"),)


def test_amds_cards_have_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvml(monkeypatch)
    for number, size in enumerate((24 * 1024**3, LEAST_AMD_BYTES - 1)):
        folder = tmp_path / f"sys/class/drm/card{number}/device"
        write(folder / "vendor", "0x1002\n")
        write(folder / "mem_info_vram_total", f"{size}\n")
        write(tmp_path / f"sys/class/drm/card{number}-DP-1/device/vendor", "0x1002\n")
    assert seen_cards(tmp_path) == (Card("AMD", "a card"),)


def test_nothing_is_seen_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvml(monkeypatch)
    assert seen_cards(tmp_path) == ()


def test_nvml_tells_name_capability_and_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refused(Exception):
        pass

    def capability(handle: int) -> tuple[int, int]:
        if handle:
            raise Refused
        return 8, 6

    nvml = SimpleNamespace(
        NVMLError=Refused,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.95.05",
        nvmlSystemGetCudaDriverVersion=lambda: 13010,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"NVIDIA card {handle}",
        nvmlDeviceGetCudaComputeCapability=capability,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    monkeypatch.setattr(graphics_cards.platform, "system", lambda: "Linux")
    assert seen_cards(tmp_path) == (
        Card("NVIDIA", "NVIDIA card 0", (8, 6), "580.95.05", (13, 1)),
        Card("NVIDIA", "NVIDIA card 1", None, "580.95.05", (13, 1)),
    )


@pytest.mark.parametrize(
    ("value", "expected"), [("", "CUDA_VISIBLE_DEVICES="), ("-1", "CUDA_VISIBLE_DEVICES=-1"), ("0,1", None)]
)
def test_a_variable_that_hides_all_cards_is_named(
    value: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert hidden_cards() == expected
