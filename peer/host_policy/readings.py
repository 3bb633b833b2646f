"""What the volunteer's machine is doing: one small reader for each source. What cannot be told here is None."""

import asyncio
import ctypes
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

from molink.peer.host_policy.gpus import GpuUse, OwnProcesses, gpus_of, this_process
from molink.peer.host_policy.rules import HostPolicy, Readings

LOOK_EVERY_S = 1.0
PROPERTY_TIMEOUT_S = 1.0
FULL_SCREEN_STATES = frozenset({2, 3, 4})
"""Of SHQueryUserNotificationState: QUNS_BUSY (a full-screen program), QUNS_RUNNING_D3D_FULL_SCREEN and
QUNS_PRESENTATION_MODE."""

_log = logging.getLogger(__name__)
_WINDOW = re.compile(r"0x[0-9a-f]+")

ReadMachine = Callable[[], Readings]


class MachineReader:
    """Reads everything that the host policy looks at. Blocks for some milliseconds: call it on a thread."""

    def __init__(self, gpu: GpuUse | None, *, heeds_programs: bool) -> None:
        """Unless it heeds programs, nobody asks for windows and GPUs."""
        self._gpu = gpu
        self._heeds_programs = heeds_programs

    def __call__(self) -> Readings:
        now = time.localtime()
        battery = _battery()
        return Readings(
            minute_of_day=now.tm_hour * 60 + now.tm_min,
            gpu_share_of_others=self._gpu.share_of_others() if self._gpu and self._heeds_programs else None,
            full_screen=is_full_screen() if self._heeds_programs else None,
            on_battery=None if battery is None or battery[0] is None else not battery[0],
            battery_percent=None if battery is None else battery[1],
        )


def machine_reader(
    rules: HostPolicy, devices: Sequence[str], own: OwnProcesses = this_process
) -> MachineReader:
    """One that reads what the rules ask of a peer on these torch devices, whose processes are its `own`."""
    heeds_programs = rules.heeds_programs(devices[0])
    return MachineReader(gpus_of(devices, own) if heeds_programs else None, heeds_programs=heeds_programs)


async def look(read: ReadMachine) -> Readings | None:
    """What `read` tells, on a thread; None: nothing can be told now, because descriptors, threads or memory have run
    out."""
    try:
        return await asyncio.to_thread(read)
    except (OSError, RuntimeError, MemoryError, psutil.Error) as error:
        _log.debug("the machine cannot be read: %s", error)
        return None


def is_full_screen() -> bool | None:
    """Whether the program in front covers the screen: told on Windows, and on X11 where `xprop` is installed."""
    if sys.platform == "win32":
        state = ctypes.c_int()
        failed = ctypes.windll.shell32.SHQueryUserNotificationState(ctypes.byref(state))
        return None if failed else state.value in FULL_SCREEN_STATES
    xprop = shutil.which("xprop") if os.environ.get("DISPLAY") else None
    if xprop is None:
        return None
    active = _property(xprop, "-root", "_NET_ACTIVE_WINDOW")
    window = None if active is None else _WINDOW.search(active)
    if window is None:
        return None
    if int(window[0], 16) == 0:
        return False
    state = _property(xprop, "-id", window[0], "_NET_WM_STATE")
    return None if state is None else "_NET_WM_STATE_FULLSCREEN" in state


def _property(*command: str) -> str | None:
    """What `xprop` says; None if it fails."""
    try:
        told = subprocess.run(  # noqa: S603 - fixed, but for a window's number
            command, capture_output=True, text=True, timeout=PROPERTY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return told.stdout


def _battery() -> tuple[bool | None, float] | None:
    """Whether the plug is in, and how full the battery is in percent; None: there is none, or nobody can tell."""
    read = getattr(psutil, "sensors_battery", None)
    try:
        battery = None if read is None else read()
    except (OSError, RuntimeError):
        return None
    return None if battery is None else (battery.power_plugged, float(battery.percent))
