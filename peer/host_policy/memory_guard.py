"""The memory cap, held against what the process really takes."""

import asyncio
import logging
from collections.abc import Callable

import psutil

from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.memory.memory import format_bytes, is_over_cap

LOOK_EVERY_S = 2.0
RETRY_AFTER_S = 10.0
GIVE_BACK_EVERY = 5
"""While too much is taken, memory that nobody uses goes back to the system at the first look, then at one in so many:
allocators keep what an attack made them take."""
_log = logging.getLogger(__name__)


class MemoryGuard:
    """Refuses leases while the process takes more than its owner allows, as arithmetic alone cannot know.

    For peers on a processor; of a GPU, torch refuses to take more.
    """

    def __init__(
        self,
        cap_bytes: int,
        leases: LeaseBook,
        on_change: Callable[[], None],
        read: Callable[[], int],
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """What `read` returns now is what the program takes without weights and KV caches. `give_back` has allocators
        return what nobody uses."""
        self._cap_bytes = cap_bytes
        self._leases = leases
        self._on_change = on_change
        self._read = read
        self._give_back = give_back
        self._looks_over = 0
        self._least_bytes = read()
        self.over = False

    async def keep_within(self) -> None:
        """Looks from time to time, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def _taken_bytes(self) -> int:
        taken_bytes = max(0, self._read() - self._least_bytes)
        if not is_over_cap(taken_bytes, self._cap_bytes, was_over=self.over):
            self._looks_over = 0
            return taken_bytes
        if self._looks_over % GIVE_BACK_EVERY == 0:
            self._give_back()
            taken_bytes = max(0, self._read() - self._least_bytes)
        self._looks_over += 1
        return taken_bytes

    def look(self) -> None:
        """Closes the lease book, or opens it again, as the memory taken at this moment says."""
        try:
            taken_bytes = self._taken_bytes()
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
            self._leases.gate.close(Refused("memory", detail, RETRY_AFTER_S))
        else:
            self._leases.gate.reopen("memory")
        self._on_change()


def own_memory_bytes() -> int:
    """Resident memory of this process, without files that are only mapped where the system tells."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))
