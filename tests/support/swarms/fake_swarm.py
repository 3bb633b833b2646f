"""A swarm that says what a test tells it to, and the gateway over it on a real socket."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import httpx
import uvicorn
from fastapi import FastAPI

from molink.client.api.circuits_preview import CircuitsPreview
from molink.client.api.event_streams import PROMPT_COUNTED
from molink.client.api.generation import (
    CircuitReport,
    FinishReason,
    Generation,
    Hop,
    PromptToken,
    Recovery,
    TextPiece,
    TokenLogprob,
)
from molink.client.api.peer_requirements import ANY_PEER, PeerRequirements
from molink.client.api.running_sessions import REQUEST_TAG
from molink.client.api.sampling import SpeedHints
from molink.client.circuit.reserving import Report
from molink.client.circuit.session_request import GUESS_SCOPE
from molink.client.errors import ModelNotFound, SwarmError, SwarmUnavailable
from molink.client.gateway.accounts.opening import opened_accounts
from molink.client.gateway.apis.kept_responses import KeptResponses
from molink.client.gateway.app import add_kept_responses, add_origins, add_traces, create_app
from molink.client.gateway.connections import Connections
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.nodes.node_admin import AccessTerms, NodeAdmin
from molink.client.gateway.nodes.node_routes import add_nodes
from molink.client.gateway.nodes.node_store import NodeStore
from molink.client.gateway.server import Server, server_config
from molink.client.gateway.services.operation_store import OperationStore
from molink.client.gateway.services.service_admin import opened_services
from molink.client.gateway.services.service_keeper import ServiceKeeper
from molink.client.gateway.services.service_routes import add_services
from molink.client.text.demanded_calls import CallChoice, DemandedCalls
from molink.client.text.text_work import TEXT_ASKER
from molink.client.text.tool_calls import FORMS, ToolCall, ToolCallStream, types_of
from molink.routing import Route
from molink.routing.routes.route import RouteHop
from molink.shards.spec import ModelSpec, SamplingParams, Span
from molink.tracing import CURRENT_SPAN, Traces

DEADLINE_S = 120.0
PRIVATE_WORD = "xyzzy"
"""A word of prompts that nobody may quote."""
MODEL = "molink/tiny-shakespeare"
PROMPT_TOKENS = 5
"""Of any prompt, as a fake swarm has it."""
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": f"the secret word is {PRIVATE_WORD}"}],
}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": f"the secret word is {PRIVATE_WORD}"}
SPEC = ModelSpec(
    model_hash="ab" * 32,
    content_hash="cd" * 32,
    name=MODEL,
    architecture="llama",
    layers=2,
    hidden_size=8,
    vocabulary_size=16,
    context_length=1024,
    dtype="float32",
    quantization="none",
    layer_bytes=(64, 64),
    embed_bytes=512,
    head_bytes=512,
    kv_bytes_per_token=(32, 32),
    stop_token_ids=(1,),
)


class FakeHeldCircuits:
    """Circuits that are held for a fake swarm: each is there at once, unless they may not stand."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.count = 0
        self.most = 0
        """That were held at a time."""
        self.may_stand = threading.Event()
        self.may_stand.set()
        """Cleared by a test: circuits are formed, and none of them stands."""
        self.error: SwarmError | None = None

    async def add(self, tokens: int, timeout_s: float, report: Report = lambda _: None) -> None:
        assert tokens > 1
        assert timeout_s > 0
        report("peer 12D3 loads its layers: 1 of 2 MB")
        while not await asyncio.to_thread(self.may_stand.wait, 0.05):
            pass  # in short waits: a loop that ends waits for its threads
        if self.error is not None:
            raise self.error
        self.count += 1
        self.most = max(self.most, self.count)

    def keep_at_most(self, count: int) -> None:
        self.count = min(self.count, count)

    def describe(self) -> list[dict[str, Any]]:
        return [{"predicted_tpot_ms": 1.0, "hops": []}] * self.count


@dataclass(slots=True)
class FakeSwarm:
    """Every generation yields `words`, one token each, and then stops, or raises `error` before the word
    `fails_at`.

    `hangs_at` is the word before which a generation waits until it is cancelled.
    """

    words: Sequence[str] = ("But", " soft", "!")
    error: Exception | None = None
    fails_at: int = 0
    hangs_at: int | None = None
    state: dict[str, Any] = field(default_factory=lambda: {"ready": True, "peers": [{"peer_id": "12D3"}]})
    calls: list[tuple[object, SamplingParams]] = field(default_factory=list)
    hanging: threading.Event = field(default_factory=threading.Event)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each generation that was given up before its end."""
    model: ModelSpec = SPEC
    is_served: bool = True
    recoveries: tuple[Recovery, ...] = ()
    """Of each generation."""
    others: "list[FakeSwarm]" = field(default_factory=list)
    """Other models of it."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of models at the gateway."""
    keep_hours: float | None = None
    """For so long the gateway keeps responses, where it has a database."""
    opened: list[str] = field(default_factory=list)
    """Those of them that were asked for, each time that one was opened."""
    closed: list[str] = field(default_factory=list)
    """Those that were closed again."""
    finish_reason: FinishReason = "stop"
    stop_string: str | None = None
    cached_tokens: int = 0
    tools: list[tuple[Mapping[str, Any], ...]] = field(default_factory=list)
    """Of each chat."""
    demanded: list[DemandedCalls | None] = field(default_factory=list)
    """Of each chat, what its answer has to call."""
    template_variables: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    """What it says of the circuits in use."""
    tags: list[str] = field(default_factory=list)
    """Of the requests that generations were begun for."""
    times_hops: bool = False
    gateway_id: str = "this gateway"
    held: "FakeHeldCircuits" = field(default_factory=FakeHeldCircuits)
    joins_after: int = 0
    """Orders before commanded peers are known."""
    commanded: dict[str, int] = field(default_factory=dict)
    """Sessions of the peers that take this client's orders."""
    ordered_models: dict[str, str] = field(default_factory=dict)
    """What they are to serve next."""
    not_served: str | None = None
    """Why none of them can serve that."""
    orders: list[tuple[str, str]] = field(default_factory=list)
    """To which peer, and what."""
    order_error: SwarmError | None = None
    room: int = 32
    """Circuits for which its peers have memory."""
    traces: Traces | None = None
    """Of the gateway."""
    trace_ids: list[bytes] = field(default_factory=list)
    """Of the traces that generations were parts of."""
    hints: list[SpeedHints] = field(default_factory=list)
    """Of each generation: what may make it faster."""
    scopes: list[bytes] = field(default_factory=list)
    """Of each generation: the scope in which it is guessed."""
    text_askers: list[str] = field(default_factory=list)
    """Of each text and chat that was turned into tokens alone, and of each generation: whose it is."""
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    async def models(self) -> tuple[ModelSpec, ...]:
        return (self.model, *(one.model for one in self.others))

    @asynccontextmanager
    async def beside(
        self, model: str, *, requirements: PeerRequirements = ANY_PEER, partners: str | None = None
    ) -> AsyncGenerator["FakeSwarm", None]:
        del requirements, partners
        self.opened.append(model)
        if self.error is not None:
            raise self.error
        known = {name: one for one in (self, *self.others) for name in (one.model.name, one.model.model_hash)}
        if model not in known:
            raise ModelNotFound(model, "the swarm does not serve it")
        try:
            yield known[model]
        finally:
            self.closed.append(model)

    async def preview(self, circuits: int, tokens: int) -> CircuitsPreview:
        route = Route((RouteHop("12D3", Span(0, 2), (), 1.0, 0.0),), 1.0, 0.0)
        lacks = circuits > self.room
        return CircuitsPreview(
            self.model, circuits, tokens, (route,) * min(circuits, self.room),
            missing_bytes=4096 if lacks else 0, reason="memory is short" if lacks else "",
        )  # fmt: skip

    async def order(self, peer_id: str, action: str, model: str = "") -> dict[str, Any]:
        """Each time that a commanded peer says how it is, one of its sessions has ended; then it serves what it was
        ordered."""
        self.orders.append((peer_id, action))
        if self.order_error is not None:
            raise self.order_error
        self.joins_after -= 1
        if peer_id not in self.commanded or self.joins_after >= 0:
            raise SwarmUnavailable(f"no peer {peer_id} is known in this swarm")
        sessions = self.commanded[peer_id]
        if action == "leave":
            del self.commanded[peer_id]
        elif "drain" in {order for of, order in self.orders if of == peer_id}:
            self.commanded[peer_id] = max(0, sessions - 1)
        if action == "serve":
            self.ordered_models[peer_id] = model
        elif (wanted := self.ordered_models.get(peer_id)) is not None:
            self.commanded[peer_id] = max(0, sessions - 1)
            served = {"model": wanted, "serves_next": wanted if sessions else None}
            return {"sessions": sessions, "not_served": None if sessions else self.not_served, **served}
        return {"sessions": sessions}

    def member_addresses(self) -> tuple[str, ...]:
        return ("/known", "/invited")

    async def snapshot(self) -> dict[str, Any]:
        return self.state

    def circuits(self) -> list[dict[str, Any]]:
        return self.running

    def time_hops(self, *, wanted: bool) -> None:
        self.times_hops = wanted

    def stream_events(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **hints: Unpack[SpeedHints],
    ) -> AsyncIterator[TextPiece]:
        self.hints.append(hints)
        return self._pieces(prompt, params or SamplingParams(), timeout_s)

    def stream_chat_events(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: CallChoice = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        **hints: Unpack[SpeedHints],
    ) -> AsyncIterator[TextPiece]:
        self.hints.append(hints)
        self.tools.append(tuple(tools))
        self.demanded.append(DemandedCalls.of(tool_choice))
        self.template_variables.append(dict(chat_template_kwargs or {}))
        calls = ToolCallStream(FORMS[0], types_of(tools)) if tools else None
        return self._pieces(list(messages), params or SamplingParams(), timeout_s, calls)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        self.text_askers.append(TEXT_ASKER.get())
        return tuple(range(len(text.split())))

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        del chat_template_kwargs
        self.text_askers.append(TEXT_ASKER.get())
        words = " ".join(str(message["content"]) for message in messages)
        return tuple(range(len(words.split()) + 10 * len(tools)))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids)

    async def _pieces(
        self,
        asked: object,
        params: SamplingParams,
        timeout_s: float,
        calls: ToolCallStream | None = None,
    ) -> AsyncIterator[TextPiece]:
        assert timeout_s > 0
        self.calls.append((asked, params))
        self.tags.append(REQUEST_TAG.get())
        if (span := CURRENT_SPAN.get()) is not None:
            self.trace_ids.append(span.context.trace_id)
        self.scopes.append(GUESS_SCOPE.get())
        self.text_askers.append(TEXT_ASKER.get())
        PROMPT_COUNTED.get()(PROMPT_TOKENS)
        scored = []
        before = () if params.prompt_logprobs is None else _scored_prompt(params.prompt_logprobs)
        contents: list[str] = []
        called: list[ToolCall] = []
        for at, word in enumerate(self.words):
            if at == self.hangs_at:
                try:
                    self.hanging.set()
                    await asyncio.sleep(DEADLINE_S * 10)
                finally:
                    self.ended.release()
            if self.error is not None and at == self.fails_at:
                raise self.error
            top = tuple((f"{word}{rank}", -1.0 - rank) for rank in range(params.logprobs or 0))
            if params.logprobs is not None:
                scored.append(TokenLogprob(word, at, -0.5, top))
            last = at == len(self.words) - 1
            text, made = (word, ()) if calls is None else calls.push(word)
            if last and calls is not None:
                rest, more = calls.finish()
                text, made = text + rest, made + more
            contents.append(text)
            called += made
            yield TextPiece(
                text=text,
                token_ids=(at,),
                logprobs=tuple(scored[-1:]),
                finish_reason=self.finish_reason if last else None,
                generation=replace(
                    self._generation("".join(contents), scored, called), prompt_logprobs=before
                )
                if last
                else None,
                tool_calls=made,
                prompt_logprobs=before if at == 0 else (),
            )

    def _generation(
        self, text: str, scored: Sequence[TokenLogprob], called: Sequence[ToolCall]
    ) -> Generation:
        return Generation(
            text=text,
            token_ids=tuple(range(len(self.words))),
            prompt_tokens=PROMPT_TOKENS,
            finish_reason=self.finish_reason,
            ttft_s=0.1,
            tpot_s=0.02,
            circuit=CircuitReport((Hop("12D3", 0, 2),), 20.0),
            logprobs=tuple(scored),
            recoveries=self.recoveries,
            cached_tokens=self.cached_tokens,
            trips=1,
            guessed_tokens=self.guessed_tokens,
            accepted_tokens=self.accepted_tokens,
            stop_string=self.stop_string,
            tool_calls=tuple(called),
        )


def _scored_prompt(likeliest: int) -> tuple[PromptToken, ...]:
    """A prompt of two tokens."""
    top = tuple((f"likely{rank}", -0.25 - rank) for rank in range(likeliest))
    return PromptToken("the", 7, None), PromptToken(" secret", 8, -1.5, top)


class _Announcing(Server):
    """Says when it listens, and stops at once."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, connections: Connections) -> None:
        super().__init__(config, app.state.gateway, connections)
        self.listening = threading.Event()
        self._stop = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the main thread, which this is not

    async def main_loop(self) -> None:
        counter = 0
        while not self._stop.is_set():
            await self.on_tick(counter)
            counter += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._stop.wait()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._loop.call_soon_threadsafe(self._at_once.set)


@contextmanager
def gateway(
    swarm: FakeSwarm,
    *,
    max_requests: int = 64,
    waiting_s: float = 0.1,
    connections: Connections | None = None,
    accounts: tuple[str | None, Path] | None = None,
    allowed_origins: Sequence[str] = (),
    invites: Sequence[str] = (),
) -> Iterator[str]:
    """The URL of a gateway that serves `swarm`. `accounts`: its database and state directory, as `opened_accounts` has
    them."""
    known = connections or Connections()
    made: Future[_Announcing] = Future()

    async def serve(listener: socket.socket) -> None:
        async with AsyncExitStack() as stack:
            gatekeeper, services = None, None
            keeper: ServiceKeeper | None = None
            nodes: NodeAdmin | None = None
            kept: KeptResponses | None = None
            if accounts is not None:
                opened = await stack.enter_async_context(opened_accounts(*accounts))
                gatekeeper = opened.gatekeeper
                services = await stack.enter_async_context(
                    opened_services(swarm, opened.database, swarm.gateway_id, waiting_s)
                )
                keeper = services.keeper
                terms = AccessTerms(swarm.gateway_id, ("/invited",), "the line of a key", 0.2)
                stores = NodeStore(opened.database), OperationStore(opened.database)
                nodes = await stack.enter_async_context(NodeAdmin(swarm, *stores, terms, keeper.needed_model))
                if swarm.keep_hours is not None:
                    kept = KeptResponses(opened.database, swarm.keep_hours)
            served = ServedModels(swarm, others=bool(swarm.others), aliases=swarm.aliases, services=keeper)
            models = await stack.enter_async_context(served)
            app = create_app(
                models,
                max_requests=max_requests,
                waiting_s=waiting_s,
                gatekeeper=gatekeeper,
                invites=invites,
            )
            add_traces(app, swarm.traces)
            if services is not None and gatekeeper is not None:
                add_services(app, services.admin, models, gatekeeper)
            if nodes is not None:
                add_nodes(app, nodes)
            if kept is not None:
                add_kept_responses(app, kept)
            add_origins(app, allowed_origins)
            server = _Announcing(server_config(app, known), app, known)
            made.set_result(server)
            await server.serve(sockets=[listener])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)))
        thread.start()
        server = made.result(DEADLINE_S)
        try:
            assert server.listening.wait(DEADLINE_S)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join(DEADLINE_S)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of a response in OpenAI's shape, which never quotes the request."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert PRIVATE_WORD not in body["error"]["message"]
    return dict(body["error"])
