"""Sequence numbers of a peer's announcements: each higher than all before, over restarts and wrong clocks too.

Others take only what is newer than what they know of a peer. So numbers are set aside in the state directory before
they are used, a few minutes' worth at a time, and a peer that starts again begins beyond them, whatever its clock says
by then and whatever liars made it say before.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from molink.dht.membership.swarm_clock import SET_ASIDE_S

logger = logging.getLogger(__name__)

SET_ASIDE = int(SET_ASIDE_S * 1000)
"""Numbers at a time, which are milliseconds while they follow the clock."""
SET_ASIDE_AHEAD = 5_000
"""While they are ahead of the clock each announcement takes one. So a peer that starts again and again gets ahead by
seconds only."""
_MARGIN = 1_000


class DurableState(Protocol):
    """Durable state: what outlives a peer's process."""

    def set_aside(self) -> int:
        """Up to where sequence numbers may have been used; -1: none."""
        ...

    def remember_set_aside(self, sequence: int) -> None:
        """Raises OSError if that cannot be written."""
        ...

    def remember_swarm(self, entrances: tuple[str, ...], addresses: tuple[str, ...]) -> None:
        """Multiaddresses of peers to begin from if none of the `entrances`, which the user named, answers.

        Raises OSError if that cannot be written.
        """
        ...


def next_sequence(last: int, others_know: int, clock_ms: int) -> int:
    """The number of the next announcement. `last`: of this peer's own, the highest that was used or set aside;
    `others_know`: that others hold of this peer, or pretend to."""
    return max(max(last, others_know) + 1, clock_ms)


def set_aside_up_to(sequence: int, clock_ms: int) -> int:
    """Up to where numbers are set aside when `sequence` is the next one."""
    return sequence + (SET_ASIDE if sequence <= clock_ms else SET_ASIDE_AHEAD)


class Sequences:
    """Sequence numbers of one peer."""

    def __init__(
        self, durable: DurableState | None, clock_ms: Callable[[], int], others_know: Callable[[], int]
    ) -> None:
        """`durable` None: nothing outlives this process."""
        self._durable = durable
        self._clock_ms = clock_ms
        self._others_know = others_know
        self._set_aside = -1 if durable is None else durable.set_aside()
        self._writable = True
        self.last = self._set_aside
        """The highest that was used, or set aside before this start."""
        self.first: int | None = None
        """The first one used since the start."""

    async def prepare(self) -> None:
        """Sets numbers aside for the next announcement, if there are few left. Writes a file, in a thread."""
        upcoming = self._upcoming()
        if upcoming + _MARGIN > self._set_aside:
            await trio.to_thread.run_sync(self._write, set_aside_up_to(upcoming, self._clock_ms()))

    def take(self) -> int:
        """The next number, which is used now."""
        self.last = self._upcoming()
        if self.last > self._set_aside:
            self._write(set_aside_up_to(self.last, self._clock_ms()))
        self.first = self.last if self.first is None else self.first
        return self.last

    def give_back(self) -> None:
        """No more numbers are needed: the next start need not begin beyond those that were set aside only."""
        if self.first is not None:
            self._write(self.last)

    def _upcoming(self) -> int:
        return next_sequence(self.last, self._others_know(), self._clock_ms())

    def _write(self, up_to: int) -> None:
        self._set_aside = up_to
        if self._durable is None or not self._writable:
            return
        try:
            self._durable.remember_set_aside(up_to)
        except OSError as error:
            self._writable = False
            logger.warning(
                "the peer's sequence numbers cannot be kept (%s): after a restart with another clock it may stay "
                "unheard for some minutes. Make room in the state directory",
                error.strerror or error,
            )
