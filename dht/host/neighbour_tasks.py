"""Neighbour tasks: each runs at the risk of one neighbour, and whatever goes wrong in it is that neighbour's fault.

The control plane is one nursery: an exception that left a task would end it all. So nothing is started in it for a
neighbour but through `NeighbourTasks`, and what is done for one neighbour inside a longer task is done `at_the_risk_of`
it.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVarTuple

import trio

from molink.dht.refusals import RefusalLog

logger = logging.getLogger(__name__)

_Arguments = TypeVarTuple("_Arguments")


class NeighbourTasks:
    """Starts tasks in a nursery that no neighbour can end. To be used in the network's thread."""

    def __init__(self, nursery: trio.Nursery, refusals: RefusalLog) -> None:
        self._nursery = nursery
        self._refusals = refusals

    def start_soon(
        self,
        neighbour: str,
        function: Callable[[*_Arguments], Awaitable[object]],
        *arguments: *_Arguments,
    ) -> None:
        """Runs `function(*arguments)` beside everything else, at the risk of `neighbour`: a peer id or address."""
        self._nursery.start_soon(self._run, neighbour, lambda: function(*arguments))

    @contextmanager
    def at_the_risk_of(self, neighbour: str) -> Iterator[None]:
        """The boundary: what the block raises is counted against the neighbour and goes no further."""
        try:
            yield
        except* Exception as failures:  # whatever a neighbour says or does must not end the control plane
            self._refusals.refused("neighbours that could not be dealt with", neighbour)
            logger.debug("dealing with %s failed: %r", neighbour, failures.exceptions, exc_info=failures)

    async def _run(self, neighbour: str, function: Callable[[], Awaitable[object]]) -> None:
        with self.at_the_risk_of(neighbour):
            await function()
