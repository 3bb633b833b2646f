"""Service swarm: a model under a service's name, for as many generations at once as the service may have."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, Unpack, cast

from molink.client.api.circuits_preview import CircuitsPreview
from molink.client.api.generation import TextPiece
from molink.client.api.peer_requirements import PeerRequirements
from molink.client.api.sampling import SpeedHints
from molink.client.circuit.reserving import Report
from molink.client.errors import SwarmUnavailable
from molink.client.gateway.models.swarm_protocol import FORMATION_TIMEOUT_S, AnnouncedModel, ServingSwarm
from molink.client.text.demanded_calls import CallChoice
from molink.shards.spec import ModelSpec, SamplingParams


class HoldsCircuits(Protocol):
    """Circuits that are held, as `HeldCircuits` are."""

    changed: asyncio.Event

    @property
    def count(self) -> int: ...

    async def add(self, tokens: int, timeout_s: float, report: Report = ...) -> None: ...

    def keep_at_most(self, count: int) -> None: ...

    def describe(self) -> list[dict[str, Any]]: ...


class HoldingSwarm(ServingSwarm, Protocol):
    """Swarm that also holds circuits for generations to come."""

    @property
    def held(self) -> HoldsCircuits: ...

    async def preview(self, circuits: int, tokens: int) -> CircuitsPreview: ...


class ServiceHome(Protocol):
    """The swarm that services are deployed on."""

    async def models(self) -> Sequence[AnnouncedModel]: ...

    def beside(
        self, model: str, *, requirements: PeerRequirements = ..., partners: str | None = None
    ) -> AbstractAsyncContextManager[HoldingSwarm]: ...


class ServiceSwarm:
    """Service swarm: a `ServingSwarm` under the service's name."""

    def __init__(self, name: str, opened: HoldingSwarm, maximum: int, waits_s: float) -> None:
        self.opened = opened
        self.in_use = 0
        """Generations under way."""
        self.waiting = 0
        """Those that wait for a circuit."""
        self.changed = asyncio.Event()
        """Set when either has changed; whoever watches clears it."""
        self._model = replace(opened.model, name=name)
        self._maximum = maximum
        self._waits_s = waits_s
        self._places = asyncio.Semaphore(maximum)

    @property
    def model(self) -> ModelSpec:
        return self._model

    @property
    def is_served(self) -> bool:
        return self.opened.is_served

    async def models(self) -> Sequence[AnnouncedModel]:
        return await self.opened.models()

    def beside(self, model: str) -> AbstractAsyncContextManager[ServingSwarm]:
        return self.opened.beside(model)

    async def snapshot(self) -> dict[str, Any]:
        return await self.opened.snapshot()

    def circuits(self) -> list[dict[str, Any]]:
        return self.opened.circuits()

    def time_hops(self, *, wanted: bool) -> None:
        self.opened.time_hops(wanted=wanted)

    def stream_events(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        timeout_s: float = FORMATION_TIMEOUT_S,
        **hints: Unpack[SpeedHints],
    ) -> AsyncIterator[TextPiece]:
        return self._on_a_circuit(
            lambda: self.opened.stream_events(prompt, params=params, timeout_s=timeout_s, **hints)
        )

    def stream_chat_events(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: CallChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        timeout_s: float = FORMATION_TIMEOUT_S,
        **hints: Unpack[SpeedHints],
    ) -> AsyncIterator[TextPiece]:
        return self._on_a_circuit(
            lambda: self.opened.stream_chat_events(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                chat_template_kwargs=chat_template_kwargs,
                params=params,
                timeout_s=timeout_s,
                **hints,
            )
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await self.opened.tokenize(text)

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        return await self.opened.tokenize_chat(
            messages, tools=tools, chat_template_kwargs=chat_template_kwargs
        )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self.opened.detokenize(token_ids)

    async def _on_a_circuit(
        self, begin: Callable[[], AsyncIterator[TextPiece]]
    ) -> AsyncGenerator[TextPiece, None]:
        async with self._place(), aclosing(cast("AsyncGenerator[TextPiece, None]", begin())) as pieces:
            async for piece in pieces:
                yield piece

    @asynccontextmanager
    async def _place(self) -> AsyncGenerator[None, None]:
        self.waiting += 1
        self.changed.set()
        try:
            async with asyncio.timeout(self._waits_s):
                await self._places.acquire()
        except TimeoutError:
            raise SwarmUnavailable(
                f"all {self._maximum} circuits of the service {self._model.name} are in use", busy=True
            ) from None
        finally:
            self.waiting -= 1
        self.in_use += 1
        try:
            yield
        finally:
            self.in_use -= 1
            self._places.release()
            self.changed.set()
