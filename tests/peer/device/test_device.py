"""A device is one that this machine has, or a sentence says which ones it has."""

import psutil
import pytest
import torch

from molink.configuration import SettingsError
from molink.peer.device import device
from molink.peer.device.device import (
    cap_gpu_memory,
    check_memory,
    choose_device,
    choose_devices,
    default_memory_bytes,
    describe_device,
    keep_gpu_memory_whole,
    processor_count,
    why_not_others,
)
from molink.peer.device.graphics_cards import Card
from molink.peer.device.torch_builds import TorchBuild


def test_the_processor_can_always_be_chosen() -> None:
    assert choose_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("there", "expected"),
    [(("cpu",), "cpu"), (("cpu", "cuda:0", "cuda:1"), "cuda:0"), (("cpu", "mps"), "mps")],
)
def test_auto_is_the_first_gpu_or_the_processor(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(device, "_available", lambda: there)
    assert choose_device("auto") == expected


def test_auto_on_this_machine_can_hold_a_tensor() -> None:
    assert torch.ones(2, device=choose_device("auto")).sum().item() == 2.0


def test_what_is_not_there_is_refused_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_available", lambda: ("cpu", "cuda:0"))
    monkeypatch.setattr(device.platform, "system", lambda: "Linux")
    assert choose_device("cuda") == "cuda:0"
    with pytest.raises(
        SettingsError,
        match=r"cuda:3 is not there: this machine has cpu and cuda:0; type --device cuda:0",
    ):
        choose_device("cuda:3")
    with pytest.raises(SettingsError, match="--device mps is not there: mps is the GPU of a Mac"):
        choose_device("mps")


def test_several_gpus_are_one_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_available", lambda: ("cpu", "cuda:0", "cuda:1", "cuda:2"))
    monkeypatch.setattr(device, "ranks_refusal", lambda _: None)
    assert choose_devices("cuda:0,2") == ("cuda:0", "cuda:2")
    assert choose_devices("cuda:1") == ("cuda:1",)
    assert choose_devices("cpu") == ("cpu",)
    with pytest.raises(SettingsError, match="cuda:7 is not there"):
        choose_devices("cuda:0,7")
    for wrong in ("cuda:0,0", "cuda:0,", "cuda:a,b", "cpu:0,1", "mps:0,1"):
        with pytest.raises(SettingsError, match="several GPUs are named once each"):
            choose_devices(wrong)
    with pytest.raises(SettingsError, match="only one device at a time"):
        choose_device("cuda:0,1")


def test_gpus_that_cannot_work_together_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_available", lambda: ("cpu", "cuda:0", "cuda:1"))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError, match="has no NCCL; start one peer for each GPU"):
        choose_devices("cuda:0,1")


def test_a_torch_without_gpu_support_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_available", lambda: ("cpu",))
    monkeypatch.setattr(device, "seen_cards", lambda: (Card("NVIDIA", "NVIDIA GeForce RTX 3060", (8, 6)),))
    monkeypatch.setattr(device, "hidden_cards", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    with pytest.raises(
        SettingsError, match=r"is a build without CUDA: install another build with `pip install"
    ):
        choose_device("cuda:0")
    said = why_not_others("auto", choose_device("auto"))
    assert said is not None
    assert said.startswith(
        "Computing on the processor: the NVIDIA GeForce RTX 3060 is not used, because torch"
    )
    assert why_not_others("cpu", "cpu") is None, "who asks for the processor is told nothing"


def test_a_card_that_torch_has_no_kernels_for_is_passed_over_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = TorchBuild(
        "2.13.0+cu130",
        "13.0",
        None,
        ("sm_75", "sm_80"),
        ((6, 1), (8, 6)),
        ("GTX 1080", "RTX 3060"),
        mps=False,
    )
    monkeypatch.setattr(device, "_torch_build", lambda: build)
    monkeypatch.setattr(device, "_available", lambda: ("cpu", "cuda:0", "cuda:1"))
    assert choose_device("auto") == "cuda:1"
    said = why_not_others("auto", "cuda:1")
    assert said is not None
    assert "Computing on cuda:1: torch 2.13.0+cu130 has no kernels for the GTX 1080" in said
    with pytest.raises(SettingsError, match=r"whl/cu126`; until then type --device cpu$"):
        choose_device("cuda:0")


def test_without_any_card_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "seen_cards", tuple)
    assert why_not_others("auto", "cpu") is None


def test_the_description_is_of_this_machine() -> None:
    described = describe_device("cpu")
    assert described.kind == "cpu"
    assert described.count == 1
    assert described.name
    assert described.name == described.name.strip()
    assert 0 < described.memory_bytes <= psutil.virtual_memory().total
    assert described.processors == processor_count() >= 1
    assert len(described.system.split()) >= 2


def test_by_default_half_of_the_available_memory_is_taken() -> None:
    half = default_memory_bytes("cpu")
    assert 0 < half < psutil.virtual_memory().total / 2 + 1


def test_more_memory_than_the_machine_has_is_refused_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = psutil.virtual_memory().total
    check_memory(("cpu",), None)
    check_memory(("cpu",), min(total, describe_device("cpu").memory_bytes))
    with pytest.raises(SettingsError, match=r"--memory 900\.0 TB is more than cpu of this machine can have"):
        check_memory(("cpu",), 900 * 1000**4)
    monkeypatch.setattr(device, "total_memory_bytes", lambda _: 10 * 1000**3)
    monkeypatch.setattr(device, "default_memory_bytes", lambda _: 9 * 1000**3)
    check_memory(("cuda:0", "cuda:1"), 20 * 1000**3)
    with pytest.raises(SettingsError, match=r"20\.0 GB: give less, or leave it out for 18\.0 GB"):
        check_memory(("cuda:0", "cuda:1"), 21 * 1000**3)


def test_a_gpus_cap_is_a_part_of_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    caps: list[tuple[object, ...]] = []
    monkeypatch.setattr(device, "total_memory_bytes", lambda _: 10 * 1000**3)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *cap: caps.append(cap))
    cap_gpu_memory("cuda:1", 4 * 1000**3)
    cap_gpu_memory("cpu", 4 * 1000**3)
    assert caps == [(0.4, "cuda:1")]


@pytest.mark.parametrize(("cap_bytes", "part"), [(6 * 1000**3, 0.5), (64 * 1000**3, 1.0), (1, 0.01)])
def test_apples_cap_is_a_part_of_what_metal_gives_and_never_none(
    cap_bytes: int, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    caps: list[float] = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 1000**3)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", caps.append)
    cap_gpu_memory("mps", cap_bytes)
    assert caps == [part]


@pytest.mark.parametrize(
    ("system", "before", "after"),
    [
        (
            "Linux",
            {},
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
        ),
        (
            "Linux",
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
        ),
        ("Windows", {}, {}),
        ("Darwin", {}, {}),
    ],
)
def test_segments_grow_where_torch_can_unless_the_owner_says_otherwise(
    system: str, before: dict[str, str], after: dict[str, str]
) -> None:
    environment = dict(before)
    keep_gpu_memory_whole(system, environment)
    assert environment == after
