"""A swarm whose peers are known beforehand, as a client's Connection looks at it."""

import asyncio
from types import TracebackType
from typing import Self

from molink.dht.records.records import PeerView


class KnownPeers:
    """A SwarmView of peers that stay as they are."""

    def __init__(self, views: tuple[PeerView, ...]) -> None:
        self._views = views

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]:
        """All of them, or those that serve the model."""
        return tuple(view for view in self._views if model_hash in (None, view.facts.model.model_hash))

    async def refresh(self) -> None:
        """There is nothing new."""

    async def connections(self) -> int:
        """It has none that could go."""
        return 0

    async def changed(self, timeout_s: float) -> bool:
        """Nothing changes: False after `timeout_s`."""
        await asyncio.sleep(timeout_s)
        return False
