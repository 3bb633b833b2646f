"""The gateway's application: routes of the HTTP APIs, and what is around all of them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.accounts.key_quota import RATE_LIMIT_HEADERS
from molink.client.gateway.accounts.opening import open_to_anybody
from molink.client.gateway.apis import documents
from molink.client.gateway.apis.documents import answers, messages_answers
from molink.client.gateway.apis.json_bodies import JsonRoute
from molink.client.gateway.apis.kept_responses import KeptResponses
from molink.client.gateway.apis.messages import CountRequest, MessageRequest
from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest
from molink.client.gateway.apis.responses import ResponseRequest
from molink.client.gateway.apis.tokens import DetokenizeRequest, TokenizeRequest
from molink.client.gateway.error_handlers import HANDLED, MESSAGES, on_error
from molink.client.gateway.generating import Gateway
from molink.client.gateway.middleware import RequestMiddleware
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.page.routes import add_page
from molink.client.gateway.page.swarm_feed import SwarmFeed
from molink.client.gateway.shares import plain_host
from molink.client.gateway.slots import WAITING_S, Slots
from molink.client.gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from molink.client.gateway.telemetry.request_traces import RequestTraces
from molink.client.gateway.tokenizing import Tokenizing
from molink.tracing import Traces

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
    app = FastAPI(
        title="MoLink gateway",
        version=version("molink"),
        description="Models of a swarm, in the APIs of OpenAI and Anthropic.",
        docs_url=None,
        redoc_url=None,
        responses=documents.REFUSED,
    )
    app.router.route_class = JsonRoute  # of all routes, also those that are added later
    metrics = Metrics()
    slots = Slots(max_requests, waiting_s=waiting_s, on_change=metrics.set_load, make_room=make_room)
    feed = SwarmFeed(models.first, invites)
    gateway = app.state.gateway = Gateway(models, metrics, slots, feed, gatekeeper)
    names = frozenset(map(plain_host, allowed_hosts))
    app.add_middleware(
        RequestMiddleware,
        gatekeeper=gatekeeper,
        metrics=metrics,
        allowed_hosts=names,
        paths=WITH_BODIES,
    )
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)
    _add_openai(app, gateway)
    _add_usage(app, gatekeeper)
    _add_anthropic(app, gateway)
    _add_tokens(app, Tokenizing(models, gatekeeper, metrics))
    _add_probes(app, gateway, metrics)
    add_page(app, feed)
    documents.describe_api(app)
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


def add_traces(app: FastAPI, traces: Traces | None) -> None:
    """Has what is done for generations be told to a collector, and hops be asked to tell theirs; None: neither."""
    if traces is not None:
        app.add_middleware(RequestTraces, traces=traces, paths=WITH_BODIES)


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models", **answers(documents.ModelListDocument))
    async def list_models(request: Request) -> dict[str, Any]:
        """The models that the key may ask for, with their aliases. Of several of one name all but the one that it means
        are there with their hashes in place of it."""
        return {"object": "list", "data": await gateway.models(request.state.caller)}

    @app.get("/v1/models/{model:path}", **answers(documents.ModelDocument))
    async def one_model(model: str, request: Request) -> dict[str, Any]:
        """One model, by its name, hash or alias."""
        return await gateway.describe_model(model, request.state.caller)

    @app.post(COMPLETIONS, **answers(documents.CompletionDocument, events=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Goes on from a text, or from token ids."""
        return await gateway.complete(body, request)

    @app.post(CHAT, **answers(documents.ChatDocument, events=True))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answers a chat, in the form of the model's chat template; calls functions that it is given."""
        return await gateway.chat(body, request)

    @app.post(RESPONSES, **answers(documents.ResponseDocument, events=True))
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answers in OpenAI's Responses API. Nothing is kept: send the whole conversation."""
        return await gateway.respond(body, request)


def add_kept_responses(app: FastAPI, kept: KeptResponses) -> None:
    """Has responses kept, and adds the routes to what is kept."""
    app.state.gateway.keep_responses(kept)

    @app.get(f"{RESPONSES}/{{response_id}}", **answers(documents.ResponseDocument))
    async def get_response(response_id: str, request: Request) -> dict[str, Any]:
        """A response that was kept."""
        return (await kept.get(request.state.caller, response_id)).document

    @app.delete(f"{RESPONSES}/{{response_id}}", **answers(documents.DeletedDocument))
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Keeps a response no longer."""
        await kept.drop(request.state.caller, response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}


def _add_usage(app: FastAPI, gatekeeper: Gatekeeper) -> None:
    @app.get("/v1/usage", **answers(documents.UsageDocument))
    async def own_usage(
        request: Request, days: Annotated[int, Query(ge=1, le=MOST_USAGE_DAYS)] = USAGE_DAYS
    ) -> dict[str, Any]:
        """What the key has used, by day (UTC) and model."""
        lines = await gatekeeper.usage(request.state.caller, days)
        data = [{"day": one.of.day, "model": one.of.model, **asdict(one.counts)} for one in lines]
        return {"object": "usage", "data": data}


def _add_anthropic(app: FastAPI, gateway: Gateway) -> None:
    @app.post(
        MESSAGES,
        **messages_answers(documents.MessageDocument, events=True),
    )
    async def messages(body: MessageRequest, request: Request) -> Response:
        """Answers in Anthropic's Messages API."""
        return await gateway.message(body, request)


def _add_tokens(app: FastAPI, tokenizing: Tokenizing) -> None:
    @app.post(COUNT_TOKENS, **messages_answers(documents.CountDocument))
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, Any]:
        """Counts the tokens of a message before it is asked."""
        return await tokenizing.count_tokens(body, request)

    @app.post(TOKENIZE, **answers(documents.TokensDocument))
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Makes token ids of a text or a chat, as the model would get them."""
        return await tokenizing.tokenize(body, request)

    @app.post(DETOKENIZE, **answers(documents.TextDocument))
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
        """Makes text of token ids."""
        return await tokenizing.detokenize(body, request)


def _add_probes(app: FastAPI, gateway: Gateway, metrics: Metrics) -> None:
    @app.get("/healthz", **answers(documents.StatusDocument))
    async def health() -> dict[str, str]:
        """Says that the process lives."""
        return {"status": "ok"}

    @app.get("/readyz", **answers(documents.StatusDocument))
    async def readiness() -> Response:
        """Says whether a circuit could be formed now, or which layers are missing."""
        failure = await gateway.is_ready()
        return JSONResponse({"status": "ready"}) if failure is None else failure.response()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        """Metrics for Prometheus; with keys, for one of scope `operate`."""
        return Response(metrics.exposition(), media_type=CONTENT_TYPE)
