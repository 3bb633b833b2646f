"""What the machine's owner does is read of each source as far as it can be told, and no source can stop a peer."""

import os
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.host_policy import readings as machine_readings
from molink.peer.host_policy.gpus import AmdGpu, BusiestGpu, NvidiaGpu, bus_of, gpus_of, share_of
from molink.peer.host_policy.readings import MachineReader, is_full_screen

OWN = 7


class NvmlError(Exception):
    pass


class NotFound(NvmlError):
    pass


class Nvml:
    """As much of NVML as is asked; what it raises instead of an answer is set by the test."""

    NVMLError = NvmlError
    NVMLError_NotFound = NotFound

    def __init__(self, pids: list[int], samples: list[tuple[int, int]] | Exception) -> None:
        self.pids = pids
        self.samples = samples

    def nvmlDeviceGetComputeRunningProcesses(self, _: object) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetProcessUtilization(self, _: object, since_us: int) -> list[SimpleNamespace]:  # noqa: N802
        assert since_us > 0
        if isinstance(self.samples, Exception):
            raise self.samples
        return [SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in self.samples]


def gpu(nvml: Nvml) -> NvidiaGpu:
    return NvidiaGpu(nvml, None)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 100))))
def test_the_share_of_others_is_a_share_and_leaves_this_process_out(samples: list[tuple[int, int]]) -> None:
    share = share_of(samples, {OWN})
    assert 0.0 <= share <= 1.0
    assert share == share_of([sample for sample in samples if sample[0] != OWN], {OWN})
    assert share_of([(OWN, percent) for _, percent in samples], {OWN}) == 0.0


def test_a_process_counts_with_its_largest_sample_and_several_add_up() -> None:
    assert share_of([(1, 10), (1, 30), (2, 20), (OWN, 90)], {OWN}) == pytest.approx(0.5)
    assert share_of([(1, 80), (2, 80)], {OWN}) == 1.0


def test_gpu_use_is_averaged_over_what_was_asked_lately() -> None:
    nvml = Nvml([os.getpid()], [(1, 60), (os.getpid(), 90)])
    device = gpu(nvml)
    assert device.share_of_others() == pytest.approx(0.6)
    nvml.samples = NotFound()  # nobody has used it
    assert device.share_of_others() == pytest.approx(0.3)


@pytest.mark.parametrize(
    "nvml", [Nvml([1, 2], [(1, 90)]), Nvml([os.getpid()], NvmlError()), Nvml([], [(1, 90)])]
)
def test_where_processes_cannot_be_told_apart_nothing_is_known(nvml: Nvml) -> None:
    assert gpu(nvml).share_of_others() is None


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_what_is_no_gpu_of_nvidias_has_no_nvml(device: str) -> None:
    assert NvidiaGpu.of(device) is None


def test_own_ranks_are_no_other_programs() -> None:
    ranks = (11, 12)
    nvml = Nvml([11, 12], [(11, 90), (12, 95), (3, 20)])
    shared = NvidiaGpu(nvml, None, lambda: ranks)  # type: ignore[arg-type]
    assert shared.share_of_others() == pytest.approx(0.2)
    assert gpu(nvml).share_of_others() is None, "who does not run there cannot tell who is who"


def test_of_several_gpus_the_busiest_counts() -> None:
    calm, busy, unknown = (
        SimpleNamespace(share_of_others=lambda share=share: share) for share in (0.1, 0.7, None)
    )
    assert BusiestGpu([calm, busy, unknown]).share_of_others() == 0.7
    assert BusiestGpu([unknown]).share_of_others() is None


class AmdSmi:
    """As much of AMD's library as is asked."""

    def __init__(self) -> None:
        self.used_ns: dict[int, int] = {}
        self.fails = False

    def amdsmi_get_gpu_process_list(self, _: object) -> list[dict[str, object]]:
        if self.fails:
            raise OSError
        return [{"pid": pid, "engine_usage": {"gfx": used}} for pid, used in self.used_ns.items()]


def test_of_an_amd_gpu_the_time_of_other_processes_is_counted() -> None:
    library, now_s = AmdSmi(), [100.0]
    device = AmdGpu(library, None, lambda: (OWN, 8), lambda: now_s[0])
    library.used_ns = {OWN: 10**9, 3: 5 * 10**9}
    assert device.share_of_others() is None, "nothing is known before some time has passed"
    now_s[0] += 2.0
    library.used_ns = {OWN: 3 * 10**9, 8: 2 * 10**9, 3: 6 * 10**9}
    assert device.share_of_others() == pytest.approx(0.5)
    now_s[0] += 2.0
    library.used_ns = {OWN: 4 * 10**9, 4: 10**9}
    assert device.share_of_others() == 0.0, "who came is counted from then on, who went is not counted"
    library.fails = True
    assert device.share_of_others() is None


@pytest.mark.parametrize("used", [{3: 10**9}, {OWN: 0, 3: 10**9}])
def test_where_an_amd_driver_counts_nothing_of_this_peer_nothing_is_known(used: dict[int, int]) -> None:
    library, now_s = AmdSmi(), [100.0]
    device = AmdGpu(library, None, lambda: (OWN,), lambda: now_s[0])
    for _ in range(3):
        library.used_ns = {pid: 2 * count for pid, count in used.items()}
        now_s[0] += 1.0
        assert device.share_of_others() is None


def test_a_gpu_is_found_by_its_place_on_the_bus() -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC3, pci_device_id=0)
    assert bus_of(properties) == "0000:c3:00"


def test_without_a_gpu_there_is_nobody_to_ask() -> None:
    assert gpus_of(("cpu",)) is None
    assert gpus_of(("mps",)) is None


class Xprop:
    """Answers as `xprop` does."""

    answers: ClassVar[dict[str, str | None]] = {}

    def __call__(self, *command: str) -> str | None:
        return self.answers[command[-1]]


@pytest.mark.parametrize(
    ("active", "state", "expected"),
    [
        ("window id # 0x3c00007", "_NET_WM_STATE(ATOM) = _NET_WM_STATE_FULLSCREEN", True),
        ("window id # 0x3c00007", "_NET_WM_STATE(ATOM) = _NET_WM_STATE_MAXIMIZED_VERT", False),
        ("window id # 0x3c00007", "_NET_WM_STATE:  not found.", False),
        ("window id # 0x3c00007", None, None),
        ("window id # 0x0", None, False),
        ("_NET_ACTIVE_WINDOW:  no such atom on any window.", None, None),
        (None, None, None),
    ],
)
def test_on_x11_the_window_in_front_says_whether_it_covers_the_screen(
    monkeypatch: pytest.MonkeyPatch, active: str | None, state: str | None, expected: bool | None
) -> None:
    xprop = Xprop()
    monkeypatch.setattr(machine_readings.sys, "platform", "linux")
    monkeypatch.setattr(
        xprop, "answers", {"_NET_ACTIVE_WINDOW": active, "_NET_WM_STATE": state}, raising=False
    )
    monkeypatch.setattr(machine_readings, "_property", xprop)
    monkeypatch.setattr(machine_readings.shutil, "which", lambda _: "/usr/bin/xprop")
    monkeypatch.setenv("DISPLAY", ":0")
    assert is_full_screen() is expected


def test_without_a_display_nobody_knows_what_is_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_readings.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    assert is_full_screen() is None


def test_an_xprop_that_finds_no_display_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_readings.sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", "127.0.0.1:987")
    assert is_full_screen() is None


@pytest.mark.parametrize(
    ("battery", "on_battery", "percent"),
    [
        (None, None, None),
        (SimpleNamespace(power_plugged=True, percent=80), False, 80.0),
        (SimpleNamespace(power_plugged=False, percent=15), True, 15.0),
        (SimpleNamespace(power_plugged=None, percent=15), None, 15.0),
    ],
)
def test_the_battery_is_read_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, battery: object, on_battery: bool | None, percent: float | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    seen = MachineReader(None, heeds_programs=False)()
    assert (seen.on_battery, seen.battery_percent) == (on_battery, percent)


def test_a_peer_that_need_not_know_asks_for_no_windows_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_readings, "is_full_screen", lambda: pytest.fail("it was asked"))
    nvml = Nvml([os.getpid()], RuntimeError())
    seen = MachineReader(gpu(nvml), heeds_programs=False)()
    assert (seen.full_screen, seen.gpu_share_of_others) == (None, None)
    assert 0 <= seen.minute_of_day < 24 * 60
