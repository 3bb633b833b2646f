"""Blocking client: `Swarm`, for code without asyncio. The asynchronous one runs on a loop in a thread of its own."""

import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from molink.client.api.generation import Explanation, Generation, TextPiece
from molink.client.api.opened_swarm import Messages, Prompt, Tools
from molink.client.api.sampling import Sampling
from molink.client.api.swarm import AsyncSwarm
from molink.client.text.demanded_calls import CallChoice
from molink.dht.records.records import ServedModel
from molink.shards.spec import ModelSpec, SamplingParams

T = TypeVar("T")
INTERRUPT_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 0.25
"""A wait without end may never hear of a Ctrl-C: it ends so often and begins again."""


class Swarm:
    """A connection to a swarm, and one model in it; arguments and errors are those of `AsyncSwarm`.

    Use it in a `with` block. Several threads may use one Swarm at once.
    """

    def __init__(  # noqa: PLR0913 - what a user may say of a swarm, by name
        self,
        model: str | None = None,
        *,
        initial_peers: Sequence[str] | None = None,
        dtype: str | None = None,
        quantization: str | None = None,
        swarm_key: str | os.PathLike[str] | None = None,
        activation_codec: str = "none",
        partners: str = "auto",
        speculation: str = "auto",
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._swarm = AsyncSwarm(
            model,
            initial_peers=initial_peers,
            dtype=dtype,
            quantization=quantization,
            swarm_key=swarm_key,
            activation_codec=activation_codec,
            partners=partners,
            speculation=speculation,
            report=report,
        )
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            stack.enter_context(portal.wrap_async_context_manager(self._swarm))
            self._stack = stack.pop_all()
        self._portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal = None
        self._stack.__exit__(kind, error, trace)

    @property
    def model(self) -> ModelSpec:
        """Description of the model."""
        return self._swarm.model

    def models(self) -> tuple[ServedModel, ...]:
        """The models that peers of this swarm serve now."""
        return _await(self._open().start_task_soon(self._swarm.models))

    def generate(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """The whole generation; see `AsyncSwarm.generate`."""
        return _await(
            self._open().start_task_soon(
                lambda: self._swarm.generate(prompt, params=params, timeout_s=timeout_s, **sampling)
            )
        )

    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        tool_choice: CallChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """The model's answer to a chat; see `AsyncSwarm.chat`."""
        return _await(
            self._open().start_task_soon(
                lambda: self._swarm.chat(
                    messages,
                    tools=tools,
                    tool_choice=tool_choice,
                    chat_template_kwargs=chat_template_kwargs,
                    params=params,
                    timeout_s=timeout_s,
                    **sampling,
                )
            )
        )

    def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """The text as soon as it is certain; see `AsyncSwarm.stream`."""
        return _texts(self.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling))

    def stream_chat(
        self,
        messages: Messages,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """As `chat`, the text as soon as it is certain."""
        return _texts(self.stream_chat_events(messages, params=params, timeout_s=timeout_s, **sampling))

    def stream_events(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Iterator[TextPiece]:
        """As `stream`, with token ids; the last piece carries the whole generation."""
        return self._iterate(
            lambda: self._swarm.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling)
        )

    def stream_chat_events(
        self,
        messages: Messages,
        *,
        tools: Tools = (),
        tool_choice: CallChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Iterator[TextPiece]:
        """As `stream_events`, for a chat; see `AsyncSwarm.chat`."""
        return self._iterate(
            lambda: self._swarm.stream_chat_events(
                messages,
                tools=tools,
                tool_choice=tool_choice,
                chat_template_kwargs=chat_template_kwargs,
                params=params,
                timeout_s=timeout_s,
                **sampling,
            )
        )

    def explain(
        self, prompt: Prompt, *, timeout_s: float = 30.0, **sampling: Unpack[Sampling]
    ) -> Explanation:
        """Generates, and says for each hop what it was predicted to take and what it took."""
        return _await(
            self._open().start_task_soon(lambda: self._swarm.explain(prompt, timeout_s=timeout_s, **sampling))
        )

    def snapshot(self) -> dict[str, object]:
        """Peers, spans, links and whether a circuit can be formed now; JSON-ready."""
        return _await(self._open().start_task_soon(self._swarm.snapshot))

    def _iterate(self, begin: Callable[[], AsyncGenerator[TextPiece, None]]) -> Iterator[TextPiece]:
        """Steps an asynchronous generator from this thread; leaving the loop early ends the generation."""
        portal = self._open()
        pieces = portal.call(begin)
        try:
            while (piece := _await(portal.start_task_soon(_next, pieces))) is not None:
                yield piece
        finally:
            portal.call(pieces.aclose)

    def _open(self) -> BlockingPortal:
        if self._portal is None:
            raise RuntimeError("the swarm is not open: use it inside `with Swarm(...)`")
        return self._portal


def _await(coming: "Future[T]") -> T:
    """Its result. Ctrl-C while waiting ends the wait on the loop's side too, or a generator could not close."""
    try:
        while not coming.done():
            wait((coming,), LONGEST_WAIT_S)
        return coming.result()
    except BaseException:
        coming.cancel()
        wait((coming,), INTERRUPT_TIMEOUT_S)
        raise


async def _next(pieces: AsyncGenerator[TextPiece, None]) -> TextPiece | None:
    return await anext(pieces, None)


def _texts(pieces: Iterator[TextPiece]) -> Iterator[str]:
    for piece in pieces:
        if piece.text:
            yield piece.text
