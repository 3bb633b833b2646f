"""The gateway's application: routes of the HTTP APIs, and what is around all of them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from molink.client.errors import ModelNotFound
from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.accounts.key_quota import RATE_LIMIT_HEADERS
from molink.client.gateway.accounts.opening import open_to_anybody
from molink.client.gateway.apis.kept_responses import KeptResponses
from molink.client.gateway.apis.messages import CountRequest, MessageRequest
from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest
from molink.client.gateway.apis.responses import ResponseRequest
from molink.client.gateway.apis.tokens import DetokenizeRequest, TokenizeRequest
from molink.client.gateway.error_handlers import HANDLED, MESSAGES, on_error
from molink.client.gateway.generating import Gateway
from molink.client.gateway.metrics import CONTENT_TYPE, Metrics
from molink.client.gateway.middleware import RequestMiddleware
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.page.routes import add_page
from molink.client.gateway.page.swarm_feed import SwarmFeed
from molink.client.gateway.shares import plain_host
from molink.client.gateway.slots import WAITING_S, Slots

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
COUNT_TOKENS: Final = f"{MESSAGES}/count_tokens"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
WITH_BODIES: Final = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
MAX_REQUESTS: Final = 32
"""A peer lends one client memory for so many generations at once."""
USAGE_DAYS: Final = 30
MOST_USAGE_DAYS: Final = 366


def create_app(
    models: ServedModels,
    *,
    max_requests: int = MAX_REQUESTS,
    allowed_hosts: Collection[str] = (),
    waiting_s: float = WAITING_S,
    make_room: Callable[[], None] = lambda: None,
    invites: Sequence[str] = (),
    gatekeeper: Gatekeeper | None = None,
) -> FastAPI:
    """The application; its `state.gateway` is told when to stop.

    Args:
        models: those that may be asked for; closed by the caller, who also opens and closes the first one.
        max_requests: generations that run at once.
        allowed_hosts: names that a request's Host header may have, beside localhost and addresses.
        waiting_s: longest wait of a request for its turn.
        make_room: called now and then while one waits.
        invites: addresses of peers that the page shows to everybody who may join.
        gatekeeper: opened and closed by the caller; None: everybody is let in.
    """
    gatekeeper = gatekeeper or open_to_anybody()
    app = FastAPI(title="MoLink gateway", docs_url=None, redoc_url=None)
    metrics = Metrics()
    slots = Slots(max_requests, waiting_s=waiting_s, on_change=metrics.set_load, make_room=make_room)
    feed = SwarmFeed(models.first, invites)
    gateway = app.state.gateway = Gateway(models, metrics, slots, feed, gatekeeper)
    names = frozenset(map(plain_host, allowed_hosts))
    app.add_middleware(
        RequestMiddleware, gatekeeper=gatekeeper, metrics=metrics, allowed_hosts=names, paths=WITH_BODIES
    )
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    _add_openai(app, gateway)
    _add_usage(app, gatekeeper)
    _add_anthropic(app, gateway)
    _add_tokens(app, gateway)
    _add_probes(app, gateway, metrics)
    add_page(app, feed)
    return app


def add_origins(app: FastAPI, origins: Collection[str]) -> None:
    """Has browsers let web pages of these origins use the application (CORS); without any, none."""
    if origins:
        # Outermost: a browser asks without a key whether it may send one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("retry-after", "x-request-id", *RATE_LIMIT_HEADERS),
        )


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        return {"object": "list", "data": await gateway.models(request.state.caller)}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> dict[str, Any]:
        served = await gateway.models(request.state.caller)
        for entry in served:
            if model in (entry["id"], entry["model_hash"]):
                return entry
        raise ModelNotFound(
            model, f"this gateway serves {', '.join(entry['id'] for entry in served) or 'you none'}"
        )

    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await gateway.complete(body, request)

    @app.post(CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await gateway.chat(body, request)

    @app.post(RESPONSES)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        return await gateway.respond(body, request)


def add_kept_responses(app: FastAPI, kept: KeptResponses) -> None:
    """Has responses kept, and adds the routes to what is kept."""
    app.state.gateway.keep_responses(kept)

    @app.get(f"{RESPONSES}/{{response_id}}")
    async def get_response(response_id: str, request: Request) -> dict[str, Any]:
        return (await kept.get(request.state.caller, response_id)).document

    @app.delete(f"{RESPONSES}/{{response_id}}")
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        await kept.drop(request.state.caller, response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}


def _add_usage(app: FastAPI, gatekeeper: Gatekeeper) -> None:
    @app.get("/v1/usage")
    async def own_usage(
        request: Request, days: Annotated[int, Query(ge=1, le=MOST_USAGE_DAYS)] = USAGE_DAYS
    ) -> dict[str, Any]:
        lines = await gatekeeper.usage(request.state.caller, days)
        data = [{"day": one.of.day, "model": one.of.model, **asdict(one.counts)} for one in lines]
        return {"object": "usage", "data": data}


def _add_anthropic(app: FastAPI, gateway: Gateway) -> None:
    @app.post(MESSAGES)
    async def messages(body: MessageRequest, request: Request) -> Response:
        return await gateway.message(body, request)

    @app.post(COUNT_TOKENS)
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
        return await gateway.count_tokens(body, request.state.caller)


def _add_tokens(app: FastAPI, gateway: Gateway) -> None:
    @app.post(TOKENIZE)
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        return await gateway.tokenize(body, request.state.caller)

    @app.post(DETOKENIZE)
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        return await gateway.detokenize(body, request.state.caller)


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
