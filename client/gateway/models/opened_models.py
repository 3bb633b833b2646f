"""Opened models: those that a gateway has open beside its first one. So many at once; who is not used makes way."""

import asyncio
import functools
import logging
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from molink.client.gateway.models.swarm_protocol import ServingSwarm
from molink.client.gateway.slots import GatewayBusy

MOST_OPEN: Final = 16
"""Models beside the first that are open at once: each may have two processes that make tokens of text."""
CLOSES_WITHIN_S: Final = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _OpenedModel:
    """A model that is open or being opened, and what is to be closed with it."""

    opening: "asyncio.Task[ServingSwarm]"
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    users: int = 0
    """Tasks that have asked for it and still run."""
    used_s: float = 0.0
    """When one of them came or ended last; monotonic."""


class OpenedModels:
    """Models that are open beside the first one; `end` closes them."""

    def __init__(self, first: ServingSwarm) -> None:
        self._first = first
        self._by_hash: dict[str, _OpenedModel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def find(self, model_hash: str) -> ServingSwarm | None:
        """The model of that hash if it is open."""
        one = self._by_hash.get(model_hash)
        if one is None or not one.opening.done() or one.opening.cancelled() or one.opening.exception():
            return None
        return one.opening.result()

    async def open(self, model_hash: str, announced: Collection[str]) -> ServingSwarm:
        """The model of that hash, opened if it is not yet. It stays open for as long as the task runs that asks, which
        is a request's: its generations are then over. `announced` are the hashes of those that peers serve now.

        Raises:
            GatewayBusy: so many others are open, and all of them are used.
            SwarmError: as `AsyncSwarm.beside`.
        """
        one = self._by_hash.get(model_hash)
        if one is None:
            if len(self._by_hash) >= MOST_OPEN:
                self._make_room(announced)
            one = self._begin(model_hash)
        self._use(one)
        return await asyncio.shield(one.opening)  # who asked first may leave before the next

    async def end(self) -> None:
        """Closes all of them."""
        for model_hash in tuple(self._by_hash):
            self._close(model_hash)
        await self._closed()

    def _make_room(self, announced: Collection[str]) -> None:
        unused = {model_hash: one.used_s for model_hash, one in self._by_hash.items() if not one.users}
        leaves = least_needed(unused, announced)
        if leaves is None:
            raise GatewayBusy(
                f"{MOST_OPEN} models beside {self._first.model.name} are used here, which is the most. Ask for one of "
                "them, or try again in a moment."
            )
        self._close(leaves)

    def _begin(self, model_hash: str) -> _OpenedModel:
        stack = AsyncExitStack()
        opening = asyncio.create_task(self._entered(model_hash, stack), name="open a model")
        one = self._by_hash[model_hash] = _OpenedModel(opening, stack)
        opening.add_done_callback(functools.partial(self._forget_failed, model_hash))
        return one

    async def _entered(self, model_hash: str, stack: AsyncExitStack) -> ServingSwarm:
        await self._closed()  # or there would be more than may be, for a while
        return await stack.enter_async_context(self._first.beside(model_hash))

    async def _closed(self) -> None:
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSES_WITHIN_S)

    def _forget_failed(self, model_hash: str, opening: "asyncio.Task[ServingSwarm]") -> None:
        one = self._by_hash.get(model_hash)
        failed = opening.cancelled() or opening.exception() is not None
        if failed and one is not None and one.opening is opening:
            del self._by_hash[model_hash]

    def _use(self, one: _OpenedModel) -> None:
        def ended(_: object) -> None:
            one.users -= 1
            one.used_s = loop.time()

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        one.users += 1
        one.used_s = loop.time()
        if task is not None:
            task.add_done_callback(ended)

    def _close(self, model_hash: str) -> None:
        async def close() -> None:
            one.opening.cancel()
            await asyncio.gather(one.opening, return_exceptions=True)
            await one.stack.aclose()

        one = self._by_hash.pop(model_hash)
        closing = asyncio.create_task(close(), name="close a model")
        self._closing.add(closing)
        closing.add_done_callback(self._note_closed)

    def _note_closed(self, closing: "asyncio.Task[None]") -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            _log.warning("a model could not be closed: %s", error)


def least_needed(unused: Mapping[str, float], announced: Collection[str]) -> str | None:
    """Which of the models that nobody uses makes way, by their hashes and when they were used last: one that no peer
    serves any more, else the one that was unused longest. None: there is none."""
    return min(unused, key=lambda one: (one in announced, unused[one]), default=None)
