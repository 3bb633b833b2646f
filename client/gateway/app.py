"""The gateway's application: routes of the HTTP APIs, and what is around all of them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from molink.client.errors import ModelNotFound, SwarmError
from molink.client.gateway.apis.messages import CountRequest, MessageRequest
from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest
from molink.client.gateway.apis.responses import ResponseRequest
from molink.client.gateway.apis.tokens import DetokenizeRequest, TokenizeRequest
from molink.client.gateway.error_handlers import MESSAGES, on_error
from molink.client.gateway.generating import Gateway, ServingSwarm
from molink.client.gateway.metrics import CONTENT_TYPE, Metrics
from molink.client.gateway.middleware import RequestMiddleware
from molink.client.gateway.page.routes import add_page
from molink.client.gateway.page.swarm_feed import SwarmFeed
from molink.client.gateway.shares import plain_host
from molink.client.gateway.slots import WAITING_S, GatewayBusy, GatewayStopping, Slots

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
COUNT_TOKENS: Final = f"{MESSAGES}/count_tokens"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
WITH_BODIES: Final = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
MAX_REQUESTS: Final = 32
"""A peer lends one client memory for so many generations at once."""


def create_app(
    swarm: ServingSwarm,
    *,
    max_requests: int = MAX_REQUESTS,
    allowed_hosts: Collection[str] = (),
    waiting_s: float = WAITING_S,
    make_room: Callable[[], None] = lambda: None,
    invites: Sequence[str] = (),
) -> FastAPI:
    """The application; its `state.gateway` is told when to stop.

    Args:
        swarm: opened and closed by the caller.
        max_requests: generations that run at once.
        allowed_hosts: names that a request's Host header may have, beside localhost and addresses.
        waiting_s: longest wait of a request for its turn.
        make_room: called now and then while one waits.
        invites: addresses of peers that the page shows to everybody who may join.
    """
    app = FastAPI(title="MoLink gateway", docs_url=None, redoc_url=None)
    metrics = Metrics()
    slots = Slots(max_requests, waiting_s=waiting_s, on_change=metrics.set_load, make_room=make_room)
    feed = SwarmFeed(swarm, invites)
    gateway = app.state.gateway = Gateway(swarm, metrics, slots, feed)
    names = frozenset(map(plain_host, allowed_hosts))
    app.add_middleware(RequestMiddleware, metrics=metrics, allowed_hosts=names, paths=WITH_BODIES)
    for kind in (SwarmError, GatewayBusy, GatewayStopping, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, on_error)
    _add_openai(app, gateway)
    _add_anthropic(app, gateway)
    _add_tokens(app, gateway)
    _add_probes(app, gateway, metrics)
    add_page(app, feed)
    return app


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": gateway.models()}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str) -> dict[str, Any]:
        for entry in gateway.models():
            if model in (entry["id"], entry["model_hash"]):
                return entry
        raise ModelNotFound(model, f"this gateway serves {gateway.models()[0]['id']}")

    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await gateway.complete(body, request)

    @app.post(CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await gateway.chat(body, request)

    @app.post(RESPONSES)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        return await gateway.respond(body, request)


def _add_anthropic(app: FastAPI, gateway: Gateway) -> None:
    @app.post(MESSAGES)
    async def messages(body: MessageRequest, request: Request) -> Response:
        return await gateway.message(body, request)

    @app.post(COUNT_TOKENS)
    async def count_tokens(body: CountRequest) -> dict[str, Any]:
        return await gateway.count_tokens(body)


def _add_tokens(app: FastAPI, gateway: Gateway) -> None:
    @app.post(TOKENIZE)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await gateway.tokenize(body)

    @app.post(DETOKENIZE)
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return gateway.detokenize(body)


def _add_probes(app: FastAPI, gateway: Gateway, metrics: Metrics) -> None:
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
