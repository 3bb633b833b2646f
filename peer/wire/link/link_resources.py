"""Resources of a process that all its links share: its uplink, memory for messages, a folder for sockets, and times.

A link takes of them what it needs, and owns none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from molink.peer.wire.transport.keepalive import BUSY_LOST_AFTER_S
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

if TYPE_CHECKING:
    from molink.peer.wire.link.link import Link

Pace = Callable[["Link"], float]
"""Asked after each packet that acknowledges nothing: for how many seconds no further one is to be read; asked again
until it says 0."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Link times: how long a link waits before it draws a conclusion, in seconds."""

    dial_s: float = 5.0
    """Whoever is dialled is given up after so long."""
    resume_s: float = 2.0
    """A link whose connection broke waits so long for the next one."""
    busy_lost_after_s: float = BUSY_LOST_AFTER_S
    """Silence of so long ends a busy link."""
    at_once_s: float = 5.0
    """Of two links that come within this time neither is older: the two ends have dialled each other."""
    spare_quiet_s: float = 60.0
    """A spare link on which nothing has travelled for so long is closed. Longer than the largest frame is on its
    way."""


LINK_TIMES = LinkTimes()


@dataclass(frozen=True, slots=True)
class LinkResources:
    """What the links of one process share."""

    uplink: SharedUplink
    memory: MessageMemory
    """For what is unfinished and unacknowledged on all of them together."""
    pace: Pace | None = None
    """Slows down what comes on links that others dialled; None: nothing does."""
    folder: Path | None = None
    """Where the sockets of ways that are not direct are made; None: in a new one for each."""
    times: LinkTimes = LINK_TIMES
