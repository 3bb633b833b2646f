"""Error handlers: every failure in the shape that OpenAI's clients understand, {"error": {...}}."""

import logging
import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fastapi import HTTPException as RouteException
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from molink.client.errors import (
    InvalidRequest,
    ModelNotFound,
    NoCircuit,
    PeerLost,
    SwarmError,
    SwarmUnavailable,
)
from molink.client.gateway.accounts.errors import (
    AccountsUnavailable,
    DemandTooLarge,
    KeyFault,
    KeyRefused,
    NotPermitted,
    QuotaExceeded,
    TokenUsed,
    UnknownResponse,
)
from molink.client.gateway.services.service import (
    OperatorKeyMissing,
    ServiceExists,
    ServiceNotPossible,
    ServiceNotReady,
    UnknownService,
)
from molink.client.gateway.slots import GatewayBusy, GatewayStopping
from molink.commands import plain
from molink.routing import NoCircuit as NoCircuitFound

logger = logging.getLogger(__name__)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
MESSAGES: Final = "/v1/messages"
"""Where Anthropic's API is spoken."""
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CLOSES: Final = {"Connection": "close"}
"""A header of responses after which the connection is of no use."""
_MOST_CHARACTERS: Final = 400
"""Of a sentence that may quote what a peer said."""
_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "dict"})
_KEY_FAULTS: Final = {
    KeyFault.MISSING: "This gateway asks for a key. Send it as Authorization: Bearer KEY.",
    KeyFault.AMBIGUOUS: "The request has more than one key. Send one.",
    KeyFault.WRONG: "The key is not one of this gateway's.",
    KeyFault.EXPIRED: "The key has expired. Its operator can make another one.",
    KeyFault.REVOKED: "The key was revoked. Its operator can make another one.",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


HANDLED: Final[tuple[type[Exception], ...]] = (
    *(SwarmError, GatewayBusy, GatewayStopping, HTTPException, RequestValidationError),
    *(KeyRefused, NotPermitted, DemandTooLarge, QuotaExceeded, AccountsUnavailable),
    *(OperatorKeyMissing, ServiceExists, ServiceNotPossible, ServiceNotReady, UnknownService),
    *(TokenUsed, UnknownResponse),
)
"""Errors that `on_error` answers; all others are unforeseen."""


class BodyRefused(RouteException):
    """The body of a request holds what no route takes. Of a parser's errors FastAPI lets this kind alone through."""

    def __init__(self, detail: str, parameter: str | None = None) -> None:
        super().__init__(400, detail)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class ApiError:
    """API error: an HTTP status and what the error object says."""

    status: int
    message: str
    type: str
    code: str | None = None
    parameter: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON document."""
        shape = {"message": self.message, "type": self.type, "param": self.parameter, "code": self.code}
        return {"error": shape}

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON document in the shape of Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "api_error"
        )
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str = "") -> JSONResponse:
        """The response, in the shape of the API that is spoken on that path."""
        body = self.anthropic_body() if path.startswith(MESSAGES) else self.body()
        return JSONResponse(body, self.status, headers=self.headers)


def failure_of(error: BaseException) -> ApiError:
    """The failure that a client sees; of an unforeseen error it learns nothing but that it happened."""
    if isinstance(error, SwarmError):
        return _swarm_failure(error)
    refusal = _refusal(error)
    if refusal is not None:
        return refusal
    if isinstance(error, HTTPException):
        return _http_failure(error)
    if isinstance(error, RequestValidationError):
        return _validation_failure(error)
    report(error)
    return ApiError(
        500, "The gateway failed to answer. Its log says where; please report it.", _SERVER, "internal_error"
    )


def busy(message: str, retry_after_s: float) -> ApiError:
    """Too much at once: come back later."""
    return ApiError(
        429, message, "rate_limit_error", "rate_limit_exceeded", headers=_retry_after(retry_after_s)
    )


def report(error: BaseException) -> None:
    """Log where an unforeseen error came from. Its message stays out of the log: it may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-6:]))
    logger.error("unforeseen %s at %s", type(error).__name__, places)


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """The exception handler of the application."""
    return failure_of(error).response(request.url.path)


def _swarm_failure(error: SwarmError) -> ApiError:
    """What an API's user can understand and change. Whose machines failed, where they are and in what words of which
    library is for the operator's log."""
    match error:
        case InvalidRequest():
            message = plain(str(error))[:_MOST_CHARACTERS]
            return ApiError(400, message, _INVALID, error.code, error.parameter)
        case ModelNotFound():
            return ApiError(404, plain(str(error))[:_MOST_CHARACTERS], _INVALID, "model_not_found", "model")
        case SwarmUnavailable(busy=True):
            message = "The swarm has no room for this generation now. Try again in a moment."
            failure = busy(message, error.retry_after_s)
        case SwarmUnavailable():
            message = "No peer of the swarm could be reached in time. Try again in a moment."
            headers = _retry_after(error.retry_after_s)
            failure = ApiError(503, message, _SERVER, "swarm_unavailable", headers=headers)
        case PeerLost():
            message = "A peer was lost in mid-generation, and no other could take over in time. Try again."
            failure = ApiError(502, message, _SERVER, "peer_lost")
        case NoCircuit():
            missing = NoCircuitFound.__str__(error)
            who = "The only peer alive does" if error.peers == 1 else f"The {error.peers} peers alive do"
            message = f"{who} not cover {error.model}: {plain(missing)}."
            failure = ApiError(503, message[:_MOST_CHARACTERS], _SERVER, "no_circuit")
        case _:
            failure = ApiError(503, "The swarm could not serve this request.", _SERVER, "swarm_error")
    logger.info("%s: %s", type(error).__name__, plain(str(error)))
    return failure


def _refusal(error: BaseException) -> ApiError | None:
    """Why the gateway itself does not take a request: too much at once, or its key, or that key's quota."""
    match error:
        case GatewayBusy():
            failure = busy(str(error), 1.0)
        case GatewayStopping():
            headers = _retry_after(1.0) | CLOSES
            failure = ApiError(503, "The gateway is stopping.", _SERVER, "stopping", headers=headers)
        case KeyRefused():  # who holds a key learns what is wrong with it, others only that something is
            headers = {"WWW-Authenticate": "Bearer"} | CLOSES
            failure = ApiError(401, _KEY_FAULTS[error.fault], _INVALID, "invalid_api_key", headers=headers)
        case NotPermitted():
            failure = ApiError(403, str(error)[:_MOST_CHARACTERS], _INVALID, error.code, error.parameter)
        case DemandTooLarge():
            failure = ApiError(400, str(error), _INVALID, "request_exceeds_limit", error.parameter)
        case QuotaExceeded():
            failure = busy(str(error), error.retry_after_s)
            failure.headers.update(error.headers)
        case AccountsUnavailable():
            logger.warning("keys and quotas cannot be looked up: %s", error)
            message = "The gateway cannot look up keys and quotas now. Try again in a moment."
            failure = ApiError(503, message, _SERVER, "accounts_unavailable", headers=_retry_after(1.0))
        case _:
            return _service_refusal(error)
    return failure


def _service_refusal(error: BaseException) -> ApiError | None:
    """Why something cannot be done with a service, a node, or what is kept."""
    message = plain(str(error))[:_MOST_CHARACTERS]
    match error:
        case UnknownService() | UnknownResponse():
            failure = ApiError(404, message, _INVALID, "not_found")
        case ServiceExists():
            failure = ApiError(409, message, _INVALID, "already_exists", "name")
        case TokenUsed():
            failure = ApiError(409, message, _INVALID, "token_used")
        case OperatorKeyMissing():
            failure = ApiError(409, message, _INVALID, "operator_key_missing")
        case ServiceNotPossible():
            failure = ApiError(503, message, _SERVER, "no_capacity", "resources")
        case ServiceNotReady():
            failure = ApiError(503, message, _SERVER, "service_not_ready", headers=_retry_after(1.0))
        case _:
            return None
    return failure


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _http_failure(error: HTTPException) -> ApiError:
    type_ = _INVALID if error.status_code < 500 else _SERVER
    detail = f"{error.detail}."
    if error.status_code == 404:
        detail = "There is no such path here. The API is under /v1, for example /v1/chat/completions."
    code, headers = _CODES.get(error.status_code), dict(error.headers or {})
    parameter = error.parameter if isinstance(error, BodyRefused) else None
    return ApiError(error.status_code, detail, type_, code, parameter, headers)


def _validation_failure(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with the request, without quoting it."""
    first = error.errors()[0]
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", _INVALID)
    names: list[str] = []
    for part in first["loc"][1:]:
        if isinstance(part, str) and ("[" in part or part in _TYPE_NAMES):
            break  # from here on, the name of one of several types that were tried
        names.append(str(part))
    if kind == "value_error":  # from a check of our own, which begins with the parameter's name
        names.append(message.split()[0])
        return ApiError(400, f"{message}.", _INVALID, None, ".".join(names))
    if not names:
        message = "The body must be a JSON object, sent with Content-Type: application/json."
        return ApiError(400, message, _INVALID)
    parameter = ".".join(names)
    return ApiError(400, f"{parameter}: {message}.", _INVALID, None, parameter)
