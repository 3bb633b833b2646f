"""Protocols of the swarm that a gateway serves: `AsyncSwarm` has it all, and so has a scripted one."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, Unpack

from molink.client.api.generation import TextPiece
from molink.client.api.sampling import SpeedHints
from molink.client.text.demanded_calls import CallChoice
from molink.shards.spec import ModelSpec, SamplingParams

FORMATION_TIMEOUT_S: Final = 30.0
"""For so long a request waits for a circuit."""


class AnnouncedModel(Protocol):
    """A model that peers announce."""

    @property
    def name(self) -> str: ...

    @property
    def model_hash(self) -> str: ...


class WatchedSwarm(Protocol):
    """Swarm that can be watched."""

    async def snapshot(self) -> dict[str, Any]: ...

    def circuits(self) -> list[dict[str, Any]]: ...

    def time_hops(self, *, wanted: bool) -> None: ...


class ServingSwarm(WatchedSwarm, Protocol):
    """Swarm that a gateway serves, opened on one model by the caller."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def is_served(self) -> bool: ...

    async def models(self) -> Sequence[AnnouncedModel]:
        """The models that peers announce; of several of one name the one first that is meant by it."""
        ...

    def beside(self, model: str) -> "AbstractAsyncContextManager[ServingSwarm]": ...

    def stream_events(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        timeout_s: float = FORMATION_TIMEOUT_S,
        **hints: Unpack[SpeedHints],
    ) -> AsyncIterator[TextPiece]: ...

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
    ) -> AsyncIterator[TextPiece]: ...

    async def tokenize(self, text: str) -> tuple[int, ...]: ...

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]: ...

    def detokenize(self, token_ids: Sequence[int]) -> str: ...
