"""Service swarm: a model under a service's name, for as many generations at once as the service may have."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from typing import Any, Protocol, Unpack, cast

from molink.client.api.circuits_preview import CircuitsPreview
from molink.client.api.generation import TextPiece
from molink.client.api.peer_requirements import PeerRequirements
from molink.client.api.sampling import SpeedHints
from molink.client.errors import InvalidRequest
from molink.client.gateway.models.swarm_protocol import FORMATION_TIMEOUT_S, AnnouncedModel, ServingSwarm
from molink.client.gateway.services.circuit_places import CircuitPlaces, HoldsCircuits, RequestPlaces
from molink.client.text.demanded_calls import CallChoice
from molink.shards.spec import ModelSpec, SamplingParams


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
    """Service swarm: a `ServingSwarm` under the service's name. Generations that are begun with it are one request's:
    others have their own `for_request`."""

    def __init__(self, name: str, opened: HoldingSwarm, places: CircuitPlaces) -> None:
        self.opened = opened
        self.places = places
        self._name = name
        self._model = replace(opened.model, name=name)
        self._request = RequestPlaces()

    def for_request(self) -> "ServiceSwarm":
        """Returns the service as one request has it."""
        return ServiceSwarm(self._name, self.opened, self.places)

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
        """As `AsyncSwarm.stream_events`.

        Raises:
            InvalidRequest: the request asks for more generations than the service can have at once.
        """
        self._count_generation()
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
        """As `AsyncSwarm.stream_chat_events`; raises as `stream_events`."""
        self._count_generation()
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

    def _count_generation(self) -> None:
        most = self.places.maximum
        if self._request.generations >= most:
            raise InvalidRequest(
                f"the service {self._name} has {most} circuits at most, and each choice of each prompt takes one: ask "
                "for fewer at once",
                "n",
            )
        self._request.generations += 1

    async def _on_a_circuit(
        self, begin: Callable[[], AsyncIterator[TextPiece]]
    ) -> AsyncGenerator[TextPiece, None]:
        async with (
            self.places.place(self._request) as has_begun,
            aclosing(cast("AsyncGenerator[TextPiece, None]", begin())) as pieces,
        ):
            async for piece in pieces:
                has_begun()
                yield piece
