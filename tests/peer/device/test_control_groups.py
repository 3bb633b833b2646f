"""Limits of memory and processors are found in both versions of control groups, wherever a process is in them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from molink.peer.device.control_groups import GroupLimits, read_group_limits
from molink.peer.device.device import free_memory_bytes, machine_memory_bytes, processor_count

MIB = 1 << 20
UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:10 - cgroup cgroup rw,cpu,cpuacct\n"
    "33 30 0:29 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n"
)
IN_DOCKER = (
    "900 899 0:28 /docker/abc /sys/fs/cgroup/cpu ro master:10 - cgroup cgroup rw,cpu\n"
    "901 899 0:29 /docker/abc /sys/fs/cgroup/memory ro master:11 - cgroup cgroup rw,memory\n"
)
OF_DOCKER = "3:memory:/docker/abc\n2:cpu:/docker/abc\n1:name=systemd:/docker/abc\n"


def machine(folder: Path, mounts: str, groups: str, files: Mapping[str, str]) -> Path:
    said = {
        "proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts}",
        "proc/self/cgroup": groups,
    }
    for name, text in {**said, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "limits"),
    [
        pytest.param(
            UNIFIED,
            "0::/\n",
            {"memory.max": "1500\n", "memory.current": "400\n", "cpu.max": "50000 100000\n"},
            GroupLimits(1500, 1100, 0.5),
            id="version 2, in a container",
        ),
        pytest.param(
            UNIFIED,
            "0::/user.slice/peer.service\n",
            {
                "user.slice/peer.service/memory.max": "max\n",
                "user.slice/peer.service/memory.current": "10\n",
                "user.slice/peer.service/cpu.max": "max 100000\n",
                "user.slice/memory.max": "2000\n",
                "user.slice/memory.current": "1900\n",
                "user.slice/memory.stat": "anon 900\ninactive_file 600\n",
                "user.slice/cpu.max": "250000 100000\n",
            },
            GroupLimits(2000, 700, 2.5),
            id="version 2, limited by a group above",
        ),
        pytest.param(
            HYBRID,
            "4:memory:/jobs/7\n2:cpu,cpuacct:/jobs/7\n0::/\n",
            {
                "memory/jobs/7/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/jobs/7/memory.usage_in_bytes": "5\n",
                "memory/jobs/memory.limit_in_bytes": "1000\n",
                "memory/jobs/memory.usage_in_bytes": "1200\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cpu,cpuacct/jobs/7/cpu.cfs_quota_us": "150000\n",
                "cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/jobs/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
            },
            GroupLimits(1000, 0, 1.5),
            id="version 1, beside an empty version 2",
        ),
        pytest.param(
            IN_DOCKER,
            OF_DOCKER,
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "700\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\n",
                "cpu/cpu.cfs_quota_us": "-1\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            GroupLimits(1000, 500, None),
            id="version 1, in a container",
        ),
        pytest.param(UNIFIED, "0::/\n", {}, GroupLimits(), id="the root of all groups"),
        pytest.param("", "", {}, GroupLimits(), id="no control groups"),
        pytest.param(
            UNIFIED,
            "0::/\n",
            {"memory.max": "", "cpu.max": "50000 0\n", "memory.current": "?\n"},
            GroupLimits(),
            id="nonsense",
        ),
    ],
)
def test_the_least_limit_on_the_way_to_the_mount_counts(
    tmp_path: Path, mounts: str, groups: str, files: Mapping[str, str], limits: GroupLimits
) -> None:
    assert read_group_limits(machine(tmp_path, mounts, groups, files)) == limits


def test_a_machine_without_these_files_limits_nothing(tmp_path: Path) -> None:
    assert read_group_limits(tmp_path) == GroupLimits()


@pytest.mark.parametrize(("quota", "processors"), [("max", 6), ("250000", 2), ("50000", 1), ("900000", 6)])
def test_processors_are_no_more_than_the_quota_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, processors: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    root = machine(tmp_path, UNIFIED, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert processor_count(root) == processors


def test_memory_is_no_more_than_a_container_has(tmp_path: Path) -> None:
    files = {"memory.max": f"{6 * MIB}\n", "memory.current": f"{2 * MIB}\n"}
    root = machine(tmp_path, UNIFIED, "0::/\n", files)
    assert (machine_memory_bytes(root), free_memory_bytes("cpu", root)) == (6 * MIB, 4 * MIB)
