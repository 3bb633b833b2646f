"""Shared prompt: several generations go on from one prompt. The first computes it; the others begin behind it, on the
same circuit and at the same time, so that their hops compute their first tokens in one step."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

from molink.client.epochs.kept_leases import PlannedRoute

MOST_WAIT_S: Final = 0.1
"""What one whose circuit stands waits for the others', which were asked for at the same time."""


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """Shared prompt: how far the generations of one prompt are. Their `PromptTurn`s change it."""

    first: "PromptTurn | None" = None
    """Who computes it."""
    planned: PlannedRoute | None = None
    """The circuit that it is computed on; None: none stands yet."""
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first has a token, or has ended."""
    forming: set["PromptTurn"] = field(default_factory=set)
    """The others whose circuits do not stand yet."""
    all_stand: asyncio.Event = field(default_factory=asyncio.Event)


class PromptTurn:
    """Turn of one generation at a shared prompt: a context that lasts as long as it runs. Who enters first computes the
    prompt."""

    def __init__(self, shared: SharedPrompt) -> None:
        self._shared = shared

    def __enter__(self) -> Self:
        if self._shared.first is None:
            self._shared.first = self
        else:
            self._shared.forming.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.note_token()
        self._count_out()

    @property
    def computed_on(self) -> PlannedRoute | None:
        """The circuit whose hops have computed the prompt; None: there is none, and the generation does it itself."""
        return None if self is self._shared.first else self._shared.planned

    async def wait(self) -> None:
        """Waits until the prompt is computed, or whoever does that has ended: that generation's deadlines hold."""
        if self is not self._shared.first:
            await self._shared.computed.wait()

    async def stand(self, planned: PlannedRoute) -> None:
        """The generation's circuit stands. Returns when it is to begin: with the others."""
        if self is self._shared.first:
            self._shared.planned = planned
        if self not in self._shared.forming:
            return
        self._count_out()
        try:
            async with asyncio.timeout(MOST_WAIT_S):
                await self._shared.all_stand.wait()
        except TimeoutError:
            return

    def note_token(self) -> None:
        """The generation has a token: all hops of its circuit have computed the prompt."""
        if self is self._shared.first:
            self._shared.computed.set()

    def _count_out(self) -> None:
        self._shared.forming.discard(self)
        if not self._shared.forming:
            self._shared.all_stand.set()
