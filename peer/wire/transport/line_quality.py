"""Line quality: what a peer has measured of its line and its links, and when it announces that. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from math import floor, isfinite, log10

CHANGED_BY = 0.2
"""An uplink that differs by more than this part of what was announced is worth announcing anew."""
LEAST_MBPS = 0.01
"""Nothing slower is announced: it says that something else than the line was measured."""
MOST_MBPS = 1e6


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """Link quality as the link's own traffic has measured it; None: not yet."""

    peer_id: str
    bytes_per_s: float | None
    round_trip_s: float | None
    queueing_s: float
    """How long a chunk has lately waited in queues on the way."""


@dataclass(frozen=True, slots=True)
class LineQuality:
    """Line quality of this machine."""

    uplink_bytes_per_s: float | None = None
    """What all links together carry away from here; None: nothing large was sent yet."""
    links: tuple[LinkQuality, ...] = ()


MeasureLine = Callable[[], LineQuality]


def announced_mbps(announced: float | None, uplink_bytes_per_s: float | None) -> float | None:
    """The uplink to announce, in Mbps with two digits: `announced` as long as the measurement is within CHANGED_BY of
    it, and where there is none."""
    if uplink_bytes_per_s is None or not isfinite(uplink_bytes_per_s) or uplink_bytes_per_s <= 0:
        return announced
    mbps = min(max(uplink_bytes_per_s * 8 / 1e6, LEAST_MBPS), MOST_MBPS)
    if announced is not None and abs(mbps - announced) <= CHANGED_BY * announced:
        return announced
    return round(mbps, 1 - floor(log10(mbps)))
