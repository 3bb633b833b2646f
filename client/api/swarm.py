"""`AsyncSwarm`: a swarm as a developer uses it from asyncio."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, Unpack

from molink.client.api.circuits_preview import CircuitsPreview, preview_circuits
from molink.client.api.event_streams import check_timeout, generation_events, texts, whole
from molink.client.api.explain import Tracer
from molink.client.api.generation import Explanation, Generation, TextPiece
from molink.client.api.held_circuits import HeldCircuits
from molink.client.api.opened_swarm import (
    Messages,
    OpenedSwarm,
    Prompt,
    SwarmOptions,
    Tools,
    open_beside,
    open_swarm,
)
from molink.client.api.orders import send_order
from molink.client.api.peer_requirements import ANY_PEER, PeerRequirements
from molink.client.api.sampling import Sampling, checked_params
from molink.client.circuit.connection import SwarmConnection
from molink.client.errors import InvalidRequest
from molink.client.models.model_choice import in_order_of_names
from molink.client.text.demanded_calls import CallChoice
from molink.client.text.text_work import ChatOptions, OpenTextWork
from molink.dht.identity.identity import Identity
from molink.dht.records.records import ServedModel
from molink.shards.spec import ModelSpec, SamplingParams

MOST_SHOWN = 8
"""Peers whose addresses are handed on to who joins."""


class AsyncSwarm:
    """A connection to a swarm, and one model in it. Open between `__aenter__` and `__aexit__`.

    Args:
        model: `molink/tiny-shakespeare`, a local folder in Hugging Face format, the name under which peers serve a
            model, or at least 8 digits of its hash. None: of the models that are served whole, that of the initial
            peers, else the one that is served in most networks.
        initial_peers: multiaddresses of living peers, one is enough, also without a list. None: MOLINK_INITIAL_PEERS,
            else the configuration file.
        dtype, quantization: only a swarm that serves the model so. None: however it is served.
        swarm_key: key file of a private swarm.
        activation_codec: `float16`, `bfloat16` or `int8` lets activations take fewer bytes on links between peers
            that take part in it; tokens may then differ. `none`: the model's own numbers, nothing is lost.
        partners: `auto` has other peers keep copies of the KV caches of a generation's hops, where some have room, so
            that it goes on at once if a hop is lost; they read what those hops read. `off`: none are kept.
        speculation: `auto` has the head of a circuit guess tokens, so that one trip round it brings several where
            guesses are right; the tokens are the same. `off`: each trip brings one.
        report: called with a line of progress while circuits form.

    Sampling arguments of the methods are the fields of `SamplingParams`; or give a whole one as `params`. Beside them
    `speculation` may be given for one generation, and `prediction`: text or token ids that are likely to come. Greedy
    decoding in float32 gives the tokens that transformers gives; in other dtypes, those of some batch composition.
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
        self._options = SwarmOptions(
            model,
            initial_peers,
            dtype,
            quantization,
            swarm_key,
            activation_codec,
            partners,
            report or _no_report,
            speculation,
        )
        self.text_work: OpenTextWork | None = None
        """Turns text into tokens; to be set before the swarm is opened. None: a thread for a model of this machine,
        and a process with limits of time and memory for one that peers handed out."""
        self.identity: Identity | None = None
        """Who this client is to peers; to be set before the swarm is opened. None: somebody new."""
        self._stack = AsyncExitStack()
        self._opened: OpenedSwarm | None = None

    async def __aenter__(self) -> Self:
        """Raises:
        InvalidRequest: an argument is none of its choices.
        SwarmUnavailable: no initial peer is configured, or none answers.
        ModelNotFound: neither the swarm nor this machine has the model.
        """
        self._opened = await open_swarm(self._options, self.text_work, self._stack, self.identity)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened = None
        await self._stack.aclose()

    @property
    def connection(self) -> SwarmConnection:
        """The connection to the swarm: its verified view, and the links to its peers."""
        return self._open().connection

    @property
    def model(self) -> ModelSpec:
        """Description of the model."""
        return self._open().spec

    @property
    def is_served(self) -> bool:
        """Whether a living peer is known that serves the model. It says nothing of whether all layers are there."""
        opened = self._open()
        return bool(opened.connection.snapshot(opened.spec.model_hash))

    @property
    def held(self) -> HeldCircuits:
        """Circuits that are held for generations to come: none, unless they are added."""
        return self._open().held

    async def preview(self, circuits: int, tokens: int) -> CircuitsPreview:
        """Returns over which peers so many circuits would go, each with room for so many tokens. Nobody is asked for
        anything, and nothing is loaded."""
        opened = self._open()
        views = opened.connection.snapshot(opened.spec.model_hash)
        return await asyncio.to_thread(
            preview_circuits, views, opened.spec, opened.requirements, circuits, tokens
        )

    def member_addresses(self) -> tuple[str, ...]:
        """Multiaddresses by which others can join: of the initial peers, then of some that are known."""
        known = (
            address for view in self.connection.snapshot()[:MOST_SHOWN] for address in view.facts.addresses
        )
        return tuple(dict.fromkeys((*self.connection.initial_peers, *known)))

    async def order(self, peer_id: str, action: str, model: str = "") -> dict[str, Any]:
        """Has a peer that takes this client's orders (`molink-peer join --operator ID`) tell its `status`, `drain`,
        `resume` after that, `leave`, or `serve` another `model`; returns what it says.

        Raises:
            InvalidRequest: there is no such order, or the peer does not take it from this client.
            SwarmUnavailable: the peer cannot be reached, or cannot do it now.
        """
        return await send_order(self.connection, peer_id, action, model)

    async def models(self) -> tuple[ServedModel, ...]:
        """The models that peers of this swarm serve now, by their names; of several of one name the one first that is
        meant by it: one that is served whole, by the initial peers, in most networks."""
        connection = self.connection
        return in_order_of_names(connection.snapshot(), connection.initial_peer_ids)

    @asynccontextmanager
    async def beside(
        self, model: str, *, requirements: PeerRequirements = ANY_PEER, partners: str | None = None
    ) -> AsyncGenerator["AsyncSwarm", None]:
        """Another model of the same swarm, over the same connection; open no longer than this one.

        Args:
            model: as for the class.
            requirements: what each peer of its circuits must meet.
            partners: as for the class; None: as this one's.

        Raises:
            ModelNotFound: neither the swarm nor this machine has it.
            SwarmUnavailable: no peer hands out its description.
        """
        async with AsyncExitStack() as stack:
            other, opened = AsyncSwarm(model), self._open()
            options = replace(
                opened.options,
                model=model,
                dtype=None,
                quantization=None,
                partners=partners or opened.options.partners,
            )
            other._opened = await open_beside(opened, options, requirements, self.text_work, stack)
            try:
                yield other
            finally:
                other._opened = None

    async def generate(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """The whole generation.

        Args:
            prompt: text, or token ids.
            timeout_s: how long a circuit may take to form. In a full swarm generations of one client begin one after
                another; it counts from when one of them last began or ended.

        Raises:
            InvalidRequest: the prompt or an argument cannot be served.
            NoCircuit, SwarmUnavailable: no circuit formed within `timeout_s`.
            PeerLost: a peer was lost in mid-generation and no other circuit formed.
        """
        return await whole(self.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling))

    async def stream(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[str, None]:
        """The text as soon as it is certain. Arguments and errors as for `generate`."""
        pieces = self.stream_events(prompt, params=params, timeout_s=timeout_s, **sampling)
        async with aclosing(texts(pieces)) as stream:
            async for text in stream:
                yield text

    async def chat(
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
        """The model's answer to a chat, in the form of its chat template; errors as for `generate`.

        Args:
            tools: functions that the model may call, as OpenAI describes them; the answer's `tool_calls` are those
                that it does.
            tool_choice: `required` has the answer be calls of them, the name of one a call of that; `auto` leaves it to
                the model. Needs peers with `molink[grammars]`.
            chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
        """
        pieces = self.stream_chat_events(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            chat_template_kwargs=chat_template_kwargs,
            params=params,
            timeout_s=timeout_s,
            **sampling,
        )
        return await whole(pieces)

    async def stream_chat(
        self,
        messages: Messages,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[str, None]:
        """As `chat`, the text as soon as it is certain."""
        pieces = self.stream_chat_events(messages, params=params, timeout_s=timeout_s, **sampling)
        async with aclosing(texts(pieces)) as stream:
            async for text in stream:
                yield text

    def stream_events(
        self,
        prompt: Prompt,
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[TextPiece, None]:
        """As `stream`, with token ids and log-probabilities; the last piece carries the whole generation."""
        opened = self._open()
        return generation_events(
            opened, lambda: opened.encode(prompt), checked_params(params, sampling), sampling, timeout_s
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
    ) -> AsyncGenerator[TextPiece, None]:
        """As `stream_events`, for a chat; arguments as for `chat`."""
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(
                "messages must be mappings such as {'role': 'user', 'content': 'Hi'}", "messages"
            )
        if not messages:
            raise InvalidRequest("a chat needs at least one message", "messages")
        opened = self._open()
        chat = ChatOptions(tools, chat_template_kwargs or {})
        return generation_events(
            opened,
            lambda: opened.encode_chat(messages, chat),
            opened.demanding_calls(checked_params(params, sampling), tool_choice, tools),
            sampling,
            timeout_s,
            opened.tool_calls(tools),
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text, as `generate` makes them. Raises `InvalidRequest` as `generate` does."""
        return await self._open().encode(text)

    async def tokenize_chat(
        self, messages: Messages, *, tools: Tools = (), chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Returns the token ids of a chat, as `chat` makes them. Raises `InvalidRequest` as `chat` does."""
        opened = self._open()
        opened.tool_calls(tools)
        return await opened.encode_chat(messages, ChatOptions(tools, chat_template_kwargs or {}))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens as they are written.

        Raises:
            InvalidRequest: an id is none of the model's.
        """
        return self._open().decode(token_ids)

    async def explain(
        self, prompt: Prompt, *, timeout_s: float = 30.0, **sampling: Unpack[Sampling]
    ) -> Explanation:
        """Generates, and says for each hop what it was predicted to take and what it took."""
        opened = self._open()
        asked: Sampling = {"max_new_tokens": 32, **sampling}
        params = checked_params(None, asked)
        check_timeout(timeout_s)
        speculation = await opened.speculation(sampling)
        session = opened.session(await opened.encode(prompt), params, speculation, trace=True)
        tracer = Tracer()
        session.watch = tracer.record_token
        generation = await whole(opened.pieces(session, params, timeout_s))
        return tracer.explain(generation, session.log, speculates=speculation.wanted)

    async def snapshot(self) -> dict[str, object]:
        """Peers, spans, links, circuits in use and whether one can be formed now; JSON-ready."""
        return await self._open().overview.describe()

    def circuits(self) -> list[dict[str, object]]:
        """The circuits of generations that run or have just ended, with their times; JSON-ready."""
        return self._open().running.describe()

    def time_hops(self, *, wanted: bool) -> None:
        """Has hops say what each step took, from the next generation on, for `circuits` to tell."""
        self._open().running.are_timed = wanted

    def _open(self) -> OpenedSwarm:
        if self._opened is None:
            raise RuntimeError(
                "the swarm is not open: use it inside `with Swarm(...)` or `async with AsyncSwarm(...)`"
            )
        return self._opened


def _no_report(_: str) -> None:
    """Nobody wants to know."""
