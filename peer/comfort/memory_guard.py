"""The memory cap, held against what the process really takes."""

import asyncio
import logging
from collections.abc import Callable

import psutil

from molink.peer.leases import LeaseBook, Refused
from molink.peer.memory import format_bytes, is_over_cap

LOOK_EVERY_S = 2.0
RETRY_AFTER_S = 10.0
_log = logging.getLogger(__name__)


class MemoryGuard:
    """Refuses leases while the process takes more than its owner allows, as arithmetic alone cannot know.

    For peers on a processor; of a GPU, torch refuses to take more.
    """

    def __init__(
        self, cap_bytes: int, leases: LeaseBook, on_change: Callable[[], None], read: Callable[[], int]
    ) -> None:
        """What `read` returns now is what the program takes without weights and KV caches."""
        self._cap_bytes = cap_bytes
        self._leases = leases
        self._on_change = on_change
        self._read = read
        self._least_bytes = read()
        self.over = False

    async def keep_within(self) -> None:
        """Looks from time to time, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        """Closes the lease book, or opens it again, as the memory taken at this moment says."""
        try:
            taken_bytes = max(0, self._read() - self._least_bytes)
        except (OSError, psutil.Error) as error:  # no descriptor is free, say: the next look may succeed
            _log.debug("the memory of this process cannot be told: %s", error)
            return
        over = is_over_cap(taken_bytes, self._cap_bytes, was_over=self.over)
        if over == self.over:
            return
        self.over = over
        if over:
            detail = (
                f"{format_bytes(taken_bytes)} are taken and --memory allows {format_bytes(self._cap_bytes)}: "
                "this peer takes no more sessions until some end"
            )
            _log.warning("%s", detail)
            self._leases.close(Refused("memory", detail, RETRY_AFTER_S))
        else:
            self._leases.reopen("memory")
        self._on_change()


def own_memory_bytes() -> int:
    """Resident memory of this process, without files that are only mapped where the system tells."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
