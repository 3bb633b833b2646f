"""Host policy, when a peer pauses for its owner: pure decisions on what is read of the machine, the time an argument.

A reason to pause has to stand for PAUSE_AFTER_S, and all of them to be gone for RESUME_AFTER_S, so that a game's
loading screen or a loose plug does not make the peer come and go. What cannot be read is no reason to pause.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

BUSY_SHARE = 0.3
"""Other programs that use so much of the GPU are in somebody's way if this peer computes too."""
CALM_SHARE = 0.1
"""They have stopped when they use no more than this."""
LEAST_BATTERY_PERCENT = 20.0
"""Below this a discharging machine's peer pauses, whatever its owner allows on battery."""
PAUSE_AFTER_S = 2.0
RESUME_AFTER_S = 30.0
MINUTES_OF_DAY = 24 * 60

_HOURS = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")

PauseWhenBusy: TypeAlias = Literal["auto", "on", "off"]
OnBattery: TypeAlias = Literal["pause", "serve"]


@dataclass(frozen=True, slots=True)
class QuietHours:
    """Part of each day, in minutes after midnight, local time: from `start` up to, not including, `stop`."""

    start: int
    stop: int
    """Before `start`: over midnight. Equal to it: all day."""

    def __post_init__(self) -> None:
        if not (0 <= self.start < MINUTES_OF_DAY and 0 <= self.stop < MINUTES_OF_DAY):
            raise ValueError(f"quiet hours are between 00:00 and 23:59, not {self.start} to {self.stop} min")

    def __contains__(self, minute: int) -> bool:
        since_start = (minute - self.start) % MINUTES_OF_DAY
        return since_start < ((self.stop - self.start) % MINUTES_OF_DAY or MINUTES_OF_DAY)

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02d}:{minute % 60:02d}" for minute in (self.start, self.stop))


def parse_quiet_hours(text: str) -> QuietHours:
    """What `22:00-07:00` means. Raises ValueError if it is not of this form."""
    found = _HOURS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a part of the day: give one such as 22:00-07:00")
    hours = [int(part) for part in found.groups()]
    if max(hours[0], hours[2]) > 23 or max(hours[1], hours[3]) > 59:
        raise ValueError(f"{text!r} is not a part of the day: hours go to 23 and minutes to 59")
    return QuietHours(hours[0] * 60 + hours[1], hours[2] * 60 + hours[3])


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The host policy: what the owner wants a peer to pause for."""

    pause_when_busy: PauseWhenBusy = "auto"
    """For full-screen and GPU-heavy programs. `auto`: if the peer computes on a GPU; on a processor it only takes what
    others leave."""
    quiet_hours: tuple[QuietHours, ...] = ()
    on_battery: OnBattery = "pause"

    def heeds_programs(self, device: str) -> bool:
        """Whether other programs make a peer on that torch device pause."""
        return self.pause_when_busy == "on" or (self.pause_when_busy == "auto" and device != "cpu")


@dataclass(frozen=True, slots=True)
class Readings:
    """The machine at one moment; None: cannot be told here."""

    minute_of_day: int
    """Local time, 0 to 1439."""
    gpu_share_of_others: float | None = None
    """0 to 1: how much of the GPU other programs used in the last seconds."""
    full_screen: bool | None = None
    """Whether the program in front covers the screen."""
    on_battery: bool | None = None
    battery_percent: float | None = None


@dataclass(frozen=True, slots=True)
class PauseState:
    """Whether the peer serves, and what it has seen on the way to the next change."""

    paused_for: str | None = None
    """Why it is paused; None: it serves."""
    since_s: float | None = None
    """Since when the readings speak for the other state; None: they do not."""


def next_pause_state(
    now: PauseState, readings: Readings, rules: HostPolicy, device: str, at_s: float
) -> PauseState:
    """What becomes of `now` with these readings, taken at `at_s` (seconds, any clock that never goes back)."""
    reason = reason_to_pause(readings, rules, device, paused=now.paused_for is not None)
    if (reason is None) == (now.paused_for is None):
        return PauseState(reason)
    since_s = at_s if now.since_s is None else now.since_s
    wait_s = PAUSE_AFTER_S if reason is not None else RESUME_AFTER_S
    return PauseState(reason) if at_s - since_s >= wait_s else PauseState(now.paused_for, since_s)


def reason_to_pause(readings: Readings, rules: HostPolicy, device: str, *, paused: bool) -> str | None:
    """The first reason that these readings hold; None if there is none. For a peer that is paused less is enough."""
    for hours in rules.quiet_hours:
        if readings.minute_of_day in hours:
            return f"quiet hours {hours}"
    if readings.on_battery and rules.on_battery == "pause":
        return "on battery"
    percent = readings.battery_percent
    if readings.on_battery and percent is not None and percent < LEAST_BATTERY_PERCENT:
        return f"the battery is below {LEAST_BATTERY_PERCENT:g} %"
    return _busy_with(readings, paused=paused) if rules.heeds_programs(device) else None


def _busy_with(readings: Readings, *, paused: bool) -> str | None:
    if readings.full_screen:
        return "a full-screen program is in front"
    share = readings.gpu_share_of_others
    if share is not None and share >= (CALM_SHARE if paused else BUSY_SHARE):
        return "other programs use the GPU"
    return None
