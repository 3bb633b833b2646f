"""Resources of a process that all its links share: its uplink, memory for messages, and a folder for sockets.

A link takes of them what it needs, and owns none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

if TYPE_CHECKING:
    from molink.peer.wire.link.link import Link

Pace = Callable[["Link"], float]
"""Asked after each packet that acknowledges nothing: for how many seconds no further one is to be read; asked again
until it says 0."""


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
