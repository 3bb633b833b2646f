"""The gateway: OpenAI's HTTP API over a swarm."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from molink.client.api.generation import Generation, TextPiece
from molink.client.errors import InvalidRequest, ModelNotFound, SwarmError, SwarmUnavailable
from molink.client.gateway.accounts.admitted import AdmittedRequest, counted, estimated_tokens
from molink.client.gateway.accounts.errors import QuotaExceeded
from molink.client.gateway.accounts.gatekeeper import Caller, Gatekeeper
from molink.client.gateway.accounts.key_quota import RATE_LIMIT_HEADERS
from molink.client.gateway.accounts.opening import open_to_anybody
from molink.client.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from molink.client.gateway.error_handlers import HANDLED, ApiError, failure_of, on_error
from molink.client.gateway.metrics import CONTENT_TYPE, Metrics
from molink.client.gateway.middleware import RequestMiddleware
from molink.client.gateway.openai import ChatRequest, CompletionRequest, SamplingRequest
from molink.client.gateway.shares import plain_host, user_of
from molink.client.gateway.slots import WAITING_S, GatewayStopping, Slots
from molink.client.gateway.streams import Choices, ClientGone, EventStream, until_gone
from molink.shards.spec import ModelSpec, SamplingParams

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FORMATION_TIMEOUT_S = 30.0
"""For so long a request waits for a circuit."""

UNSERVED_S = 3.0
"""For so long it waits where no peer is known that serves the model."""
LOOKS_EVERY_S = 0.5
MAX_REQUESTS = 32
"""A peer lends one client memory for so many generations at once."""
USAGE_DAYS = 30
MOST_USAGE_DAYS = 366
MAX_TOKEN_BYTES = 128
"""Of text that one token stands for: the longest of known vocabularies are rows of so many spaces."""

Event = dict[str, Any] | str


class ServingSwarm(Protocol):
    """Swarm that a gateway serves: `AsyncSwarm`, opened by the caller."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def is_served(self) -> bool: ...

    def stream_events(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        timeout_s: float = FORMATION_TIMEOUT_S,
    ) -> AsyncIterator[TextPiece]: ...

    def stream_chat_events(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        params: SamplingParams | None = None,
        timeout_s: float = FORMATION_TIMEOUT_S,
    ) -> AsyncIterator[TextPiece]: ...

    async def snapshot(self) -> dict[str, Any]: ...


class Gateway:
    """The routes' work, and what of it is under way."""

    def __init__(self, swarm: ServingSwarm, metrics: Metrics, slots: Slots, gatekeeper: Gatekeeper) -> None:
        self._swarm = swarm
        self._gatekeeper = gatekeeper
        self._metrics = metrics
        self._slots = slots
        self._since = int(time.time())
        self._running: set[Choices] = set()

    def stop(self) -> None:
        """Begins nothing more. What runs goes on; what waits for its turn is refused."""
        self._slots.stop()

    def end(self) -> None:
        """Ends what runs: each answer says that the gateway stops."""
        for choices in tuple(self._running):
            choices.fail(GatewayStopping())

    def models(self, caller: Caller) -> list[dict[str, Any]]:
        """The models that the caller can ask for here, in OpenAI's shape."""
        spec = self._swarm.model
        if not caller.may_use(spec):
            return []
        return [
            {
                "id": spec.name,
                "object": "model",
                "created": self._since,
                "owned_by": "swarm",
                "context_length": spec.context_length,
                "model_hash": spec.model_hash,
            }
        ]

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        self._require_model(body.model)
        for prompt in body.prompts:
            if isinstance(prompt, str):
                _require_possible(prompt, self._swarm.model, "prompt")
        jobs = [(prompt, body.params(choice)) for prompt in body.prompts for choice in range(body.choices)]
        echoes = [prompt if body.echo and isinstance(prompt, str) else "" for prompt, _ in jobs]
        answer = CompletionAnswer(self._swarm.model, body.choices, echoes)
        streams = [
            self._swarm.stream_events(prompt, params=params, timeout_s=FORMATION_TIMEOUT_S)
            for prompt, params in jobs
        ]
        admitted = await self._admit(request, body.prompts, [params for _, params in jobs])
        return await self._answer(body, request, admitted, answer, streams)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self._require_model(body.model)
        messages = [message.plain() for message in body.messages]
        text = "".join(message["content"] for message in messages)
        _require_possible(text, self._swarm.model, "messages")
        answer = ChatAnswer(self._swarm.model, body.choices, stream=bool(body.stream))
        asked = [body.params(choice) for choice in range(body.choices)]
        streams = [
            self._swarm.stream_chat_events(messages, params=params, timeout_s=FORMATION_TIMEOUT_S)
            for params in asked
        ]
        admitted = await self._admit(request, [text], asked)
        return await self._answer(body, request, admitted, answer, streams)

    async def is_ready(self) -> ApiError | None:
        """None if a circuit could be formed now, else why not."""
        try:
            snapshot = await self._swarm.snapshot()
        except SwarmError as error:
            return failure_of(error)
        if snapshot.get("ready", bool(snapshot.get("peers"))):
            return None
        reason = snapshot.get("reason") or "the peers that are known do not cover the model"
        return ApiError(503, f"No circuit could be formed now: {reason}.", "server_error", "not_ready")

    async def usage(self, caller: Caller, days: int) -> dict[str, Any]:
        """GET /v1/usage: of the caller's own key."""
        lines = await self._gatekeeper.usage(caller, days)
        data = [{"day": one.of.day, "model": one.of.model, **asdict(one.counts)} for one in lines]
        return {"object": "usage", "data": data}

    async def _admit(
        self, request: Request, prompts: Sequence[str | Sequence[int]], asked: Sequence[SamplingParams]
    ) -> AdmittedRequest:
        """Lets the request in as far as its key goes; `_answer` ends it. A prompt counts once, however many choices it
        has."""
        choices = len(asked) // len(prompts)
        estimates = [
            0 if choice else estimated_tokens(prompt) for prompt in prompts for choice in range(choices)
        ]
        caller: Caller = request.state.caller
        new_tokens = max(params.max_new_tokens for params in asked)
        try:
            admitted = await self._gatekeeper.admit(caller, self._swarm.model, estimates, new_tokens)
        except QuotaExceeded as error:
            self._metrics.refused(error.kind)
            raise
        request.state.rate_limits = admitted.headers()
        return admitted

    def _require_model(self, model: str) -> None:
        spec = self._swarm.model
        if model not in (spec.name, spec.model_hash):
            raise ModelNotFound(model, f"this gateway serves {spec.name}")

    async def _answer(
        self,
        body: SamplingRequest,
        request: Request,
        admitted: AdmittedRequest,
        answer: Answer,
        streams: list[AsyncIterator[TextPiece]],
    ) -> Response:
        caller: Caller = request.state.caller
        user = caller.user or user_of(request.client.host if request.client else None)
        async with AsyncExitStack() as stack:
            stack.callback(admitted.end)
            try:
                taken = await until_gone(request.receive, self._slots.take(user, len(streams)))
                stack.callback(self._slots.give, user, taken)
                choices = await stack.enter_async_context(Choices(counted(streams, admitted)))
                self._running.add(choices)
                stack.callback(self._running.discard, choices)
                if not body.stream:
                    generations = await until_gone(request.receive, self._collect(choices, len(streams)))
                    return JSONResponse(answer.whole(generations))
                # The first piece decides whether the answer is a stream or an error with its own status.
                first = await until_gone(request.receive, self._first(choices))
            except ClientGone:
                return Response(status_code=499)
            kept = stack.pop_all()
        events = self._events(kept, choices, first, answer, len(streams), usage=body.include_usage)
        return EventStream(events)

    async def _first(self, choices: Choices) -> tuple[int, TextPiece] | None:
        """The first piece. Where nobody serves the model, nobody waits for a circuit."""
        clock = asyncio.get_running_loop().time
        last_served_s = clock()
        while True:
            try:
                async with asyncio.timeout(LOOKS_EVERY_S) as look:
                    return await choices.next()
            except TimeoutError:
                if not look.expired():
                    raise
            if self._swarm.is_served:
                last_served_s = clock()
            elif clock() - last_served_s > UNSERVED_S:
                raise SwarmUnavailable("no peer serves the model")

    async def _collect(self, choices: Choices, count: int) -> list[Generation]:
        generations: dict[int, Generation] = {}
        item = await self._first(choices)
        while item is not None:
            self._note(generations, *item)
            item = await choices.next()
        return [generations[choice] for choice in range(count)]

    async def _events(
        self,
        kept: AsyncExitStack,
        choices: Choices,
        first: tuple[int, TextPiece] | None,
        answer: Answer,
        count: int,
        *,
        usage: bool,
    ) -> AsyncGenerator[Event, None]:
        """The chunks of a stream. A failure is its last event, and then there is no [DONE]."""
        generations: dict[int, Generation] = {}
        opened: set[int] = set()
        async with kept:
            item = first
            try:
                while item is not None:
                    choice, piece = item
                    opening = [] if choice in opened else answer.opening(choice)
                    opened.add(choice)
                    for chunk in (*opening, *answer.chunks(choice, piece)):
                        yield chunk | ({"usage": None} if usage else {})
                    self._note(generations, choice, piece)
                    item = await choices.next()
                if usage:
                    yield answer.usage_chunk([generations[choice] for choice in range(count)])
                yield "[DONE]"
            except Exception as error:  # noqa: BLE001 - the boundary of a stream: the client is told
                yield failure_of(error).body()

    def _note(self, generations: dict[int, Generation], choice: int, piece: TextPiece) -> None:
        if piece.finish_reason is None:
            return
        if piece.generation is None:
            raise RuntimeError("a generation ended without its result")
        generations[choice] = piece.generation
        self._metrics.generated(piece.generation)


def create_app(
    swarm: ServingSwarm,
    *,
    max_requests: int = MAX_REQUESTS,
    allowed_hosts: Collection[str] = (),
    waiting_s: float = WAITING_S,
    make_room: Callable[[], None] = lambda: None,
    gatekeeper: Gatekeeper | None = None,
    allowed_origins: Collection[str] = (),
) -> FastAPI:
    """The application; its `state.gateway` is told when to stop.

    Args:
        swarm: opened and closed by the caller.
        max_requests: generations that run at once.
        allowed_hosts: names that a request's Host header may have, beside localhost and addresses.
        waiting_s: longest wait of a request for its turn.
        make_room: called now and then while one waits.
        gatekeeper: opened and closed by the caller; None: everybody is let in.
        allowed_origins: of web pages that a browser lets use this gateway (CORS).
    """
    gatekeeper = gatekeeper or open_to_anybody()
    app = FastAPI(title="MoLink gateway", docs_url=None, redoc_url=None)
    metrics = Metrics()
    slots = Slots(max_requests, waiting_s=waiting_s, on_change=metrics.set_load, make_room=make_room)
    gateway = app.state.gateway = Gateway(swarm, metrics, slots, gatekeeper)
    names = frozenset(map(plain_host, allowed_hosts))
    app.add_middleware(
        RequestMiddleware,
        gatekeeper=gatekeeper,
        metrics=metrics,
        allowed_hosts=names,
        paths=(COMPLETIONS, CHAT),
    )
    if allowed_origins:
        # Outermost: a browser asks without a key whether it may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(allowed_origins),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("retry-after", *RATE_LIMIT_HEADERS),
        )
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    _add_api(app, gateway)
    _add_probes(app, gateway, swarm, metrics)
    return app


def _add_api(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": gateway.models(request.state.caller)}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> dict[str, Any]:
        served = gateway.models(request.state.caller)
        for entry in served:
            if model in (entry["id"], entry["model_hash"]):
                return entry
        raise ModelNotFound(
            model, f"this gateway serves {', '.join(entry['id'] for entry in served) or 'you none'}"
        )

    @app.get("/v1/usage")
    async def own_usage(
        request: Request, days: Annotated[int, Query(ge=1, le=MOST_USAGE_DAYS)] = USAGE_DAYS
    ) -> dict[str, Any]:
        return await gateway.usage(request.state.caller, days)

    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await gateway.complete(body, request)

    @app.post(CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await gateway.chat(body, request)


def _add_probes(app: FastAPI, gateway: Gateway, swarm: ServingSwarm, metrics: Metrics) -> None:
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readiness() -> Response:
        failure = await gateway.is_ready()
        return JSONResponse({"status": "ready"}) if failure is None else failure.response()

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)

    @app.get("/v1/swarm")
    async def swarm_state() -> dict[str, Any]:
        return await swarm.snapshot()


def _require_possible(text: str, spec: ModelSpec, parameter: str) -> None:
    """Refuses what cannot fit into the context, before the work of finding out how many tokens it has."""
    text_bytes = len(text.encode(errors="replace"))
    if text_bytes > MAX_TOKEN_BYTES * spec.context_length:
        raise InvalidRequest(
            f"a text of {text_bytes} bytes is more than {spec.name} takes with its {spec.context_length - 1} tokens "
            "at most: shorten it",
            parameter,
        )
