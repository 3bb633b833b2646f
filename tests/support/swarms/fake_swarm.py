"""A swarm that says what a test tells it to, and the gateway over it on a real socket."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from molink.client.api.generation import (
    CircuitReport,
    FinishReason,
    Generation,
    Hop,
    Recovery,
    TextPiece,
    TokenLogprob,
)
from molink.client.api.running_sessions import REQUEST_TAG
from molink.client.circuit.session_request import GUESS_SCOPE
from molink.client.gateway.accounts.opening import opened_accounts
from molink.client.gateway.app import add_origins, create_app
from molink.client.gateway.connections import Connections
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.server import Server, server_config
from molink.client.text.tool_calls import FORMS, ToolCall, ToolCallStream, types_of
from molink.shards.spec import ModelSpec, SamplingParams

DEADLINE_S = 60.0
PRIVATE_WORD = "xyzzy"
"""A word of prompts that nobody may quote."""
MODEL = "molink/tiny-shakespeare"
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
    opened: list[str] = field(default_factory=list)
    """Those of them that were asked for, each time that one was opened."""
    finish_reason: FinishReason = "stop"
    stop_string: str | None = None
    cached_tokens: int = 0
    tools: list[tuple[Mapping[str, Any], ...]] = field(default_factory=list)
    """Of each chat."""
    template_variables: list[dict[str, Any]] = field(default_factory=list)
    running: list[dict[str, Any]] = field(default_factory=list)
    """What it says of the circuits in use."""
    tags: list[str] = field(default_factory=list)
    """Of the requests that generations were begun for."""
    times_hops: bool = False
    predictions: list[str | None] = field(default_factory=list)
    """Of each generation: what is likely to come."""
    scopes: list[bytes] = field(default_factory=list)
    """Of each generation: the scope in which it is guessed."""
    guessed_tokens: int = 0
    accepted_tokens: int = 0

    async def models(self) -> tuple[ModelSpec, ...]:
        return (self.model, *(one.model for one in self.others))

    @asynccontextmanager
    async def beside(self, model: str) -> AsyncGenerator["FakeSwarm", None]:
        self.opened.append(model)
        if self.error is not None:
            raise self.error
        yield next(one for one in self.others if model in (one.model.name, one.model.model_hash))

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
        prediction: str | None = None,
    ) -> AsyncIterator[TextPiece]:
        self.predictions.append(prediction)
        return self._pieces(prompt, params or SamplingParams(), timeout_s)

    def stream_chat_events(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        params: SamplingParams | None = None,
        timeout_s: float = 30.0,
        prediction: str | None = None,
    ) -> AsyncIterator[TextPiece]:
        self.predictions.append(prediction)
        self.tools.append(tuple(tools))
        self.template_variables.append(dict(chat_template_kwargs or {}))
        calls = ToolCallStream(FORMS[0], types_of(tools)) if tools else None
        return self._pieces(list(messages), params or SamplingParams(), timeout_s, calls)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(range(len(text.split())))

    async def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        del chat_template_kwargs
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
        self.scopes.append(GUESS_SCOPE.get())
        scored = []
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
                generation=self._generation("".join(contents), scored, called) if last else None,
                tool_calls=made,
            )

    def _generation(
        self, text: str, scored: Sequence[TokenLogprob], called: Sequence[ToolCall]
    ) -> Generation:
        return Generation(
            text=text,
            token_ids=tuple(range(len(self.words))),
            prompt_tokens=5,
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
            opened = None if accounts is None else await stack.enter_async_context(opened_accounts(*accounts))
            served = ServedModels(swarm, others=bool(swarm.others), aliases=swarm.aliases)
            models = await stack.enter_async_context(served)
            app = create_app(
                models,
                max_requests=max_requests,
                waiting_s=waiting_s,
                gatekeeper=opened,
                invites=invites,
            )
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
