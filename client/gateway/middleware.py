"""Request middleware (ASGI): checks host and key, bounds bodies, counts requests, and answers unforeseen errors."""

import asyncio
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from molink.client.gateway.accounts.api_keys import KeyScope
from molink.client.gateway.accounts.errors import AccountsUnavailable, KeyRefused, NotPermitted
from molink.client.gateway.accounts.gatekeeper import ANYBODY, Caller, Gatekeeper
from molink.client.gateway.connections import BODY_WITHIN_S
from molink.client.gateway.error_handlers import CLOSES, ApiError, busy, failure_of
from molink.client.gateway.shares import LOCAL, FairShares, host_is_allowed, host_of, user_of
from molink.client.gateway.telemetry.metrics import Metrics
from molink.client.gateway.telemetry.request_traces import log_request
from molink.client.text.text_work import TEXT_ASKER

MAX_BODY_BYTES: Final = 2**20
DRAINED_BYTES: Final = 2**16
"""Of a refused request's body, which are read and not kept: of a stranger's."""
DRAINED_LARGE_BYTES: Final = 4 * MAX_BODY_BYTES
"""Of one whose key is known: most bodies that are too large are so by little."""
DRAINS_WITHIN_S: Final = 0.5
UNFINISHED_BYTES: Final = 2**26
"""Of all bodies together that have not come to their end."""
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_INVALID: Final = "invalid_request_error"
_NO_KEY_NEEDED: Final = frozenset({"/", "/healthz", "/readyz"})
"""For what watches the process, and for browsers: neither has a key. The page holds nothing but itself."""
_PAGE_FILES: Final = "/page/"
_ADMIN: Final = "/admin"
_ACCESS: Final = "/admin/v1/nodes/access"
"""Where a machine registers with its token."""
_OPERATORS: Final = ("/metrics", _ADMIN)
_FORWARDED: Final = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
"""Headers of a proxy: whoever it speaks for may be anywhere."""


class RequestMiddleware:
    """Request middleware (ASGI) around all routes.

    Bodies are read whole, so that no route meets a client that stops in the middle, and none takes a place that a whole
    request could have.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gatekeeper: Gatekeeper,
        metrics: Metrics,
        allowed_hosts: Collection[str],
        paths: Collection[str],
    ) -> None:
        """`allowed_hosts` are names, beside localhost and addresses; `paths` are those that have bodies."""
        self._app = app
        self._gatekeeper = gatekeeper
        self._metrics = metrics
        self._allowed_hosts = frozenset(allowed_hosts)
        self._paths = frozenset(paths)
        self._unfinished = FairShares(UNFINISHED_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, request_id = 0, _request_id(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        began_s = time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                limits: dict[str, str] = state.get("rate_limits", {})
                more = [(name.encode(), value.encode()) for name, value in limits.items()]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id), *more]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._serve(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - the boundary of a request
            failure = failure_of(error)
            if not status:
                await failure.response(scope["path"])(scope, receive, watched)
        finally:
            known = scope["path"] if scope["path"] in self._paths else "unmatched"
            route = getattr(scope.get("route"), "path", known)
            status, took_s = status or 499, time.monotonic() - began_s
            self._metrics.answered(str(route), scope["method"], status, took_s)
            log_request(request_id.decode(), scope["method"], str(route), status, took_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: bytes | ApiError | None = _fault_of(scope, self._allowed_hosts)
        if body is not None:
            await _drain(receive)
        else:
            try:
                scope["state"]["caller"] = await self._caller(scope)
            except (KeyRefused, NotPermitted, AccountsUnavailable):
                await _drain(receive)
                raise
            try:
                async with asyncio.timeout(BODY_WITHIN_S):
                    body = await self._read(scope, receive)
            except TimeoutError:
                body = ApiError(
                    408, "The body took too long to come.", _INVALID, "request_timeout", headers=CLOSES
                )
        if body is None:
            return
        if isinstance(body, ApiError):
            await body.response(scope["path"])(scope, receive, send)
            return
        read = False

        async def replay() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        user = _user_of(scope)
        TEXT_ASKER.set("" if user == LOCAL else user)
        await self._app(scope, replay, send)

    async def _caller(self, scope: Scope) -> Caller:
        """Who asks, before anything of the body is kept."""
        if scope["path"] in _NO_KEY_NEEDED or scope["path"].startswith(_PAGE_FILES):
            return ANYBODY
        try:
            caller = await self._gatekeeper.caller_of(scope["headers"])
        except KeyRefused as error:
            self._metrics.refused(f"key_{error.fault}")
            raise
        caller.require_scope(_scope_of(scope["path"]))
        if caller.key is None and scope["path"].startswith(_ADMIN) and not _is_own_machine(scope):
            raise NotPermitted(
                "Without keys, only this machine's own user may operate this gateway. Make a key with "
                "`molink-gateway keys create NAME --scope operate`.",
                "insufficient_scope",
            )
        return caller

    async def _read(self, scope: Scope, receive: Receive) -> bytes | ApiError | None:
        """The whole body; a failure if it or all of them together are too large, None if the client left."""
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            await _drain(receive, DRAINED_LARGE_BYTES)
            return _too_large()
        user = _user_of(scope)
        body = bytearray()
        held = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    if message.get("more_body", False):
                        await _drain(receive, DRAINED_LARGE_BYTES)
                    return _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
                more = len(body) - held
                if not self._unfinished.may_take(user, more):
                    failure = busy("Too many requests are unfinished. Try again in a moment.", 1.0)
                    failure.headers.update(CLOSES)
                    return failure
                self._unfinished.take(user, more)
                held += more
        finally:
            if held:
                self._unfinished.give(user, held)


def _user_of(scope: Scope) -> str:
    """Whose share of the gateway a request takes, once it is known who asks."""
    caller: Caller = scope["state"]["caller"]
    return caller.user or user_of(scope["client"][0] if scope.get("client") else None)


async def _drain(receive: Receive, most_bytes: int = DRAINED_BYTES) -> None:
    """Reads what has come of a refused request's body, as far as that is little and soon there: on a connection that is
    closed with something unread in it, the answer may be lost."""
    left = most_bytes
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAINS_WITHIN_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _request_id(scope: Scope) -> bytes:
    """The id by which a request is told from others: its client's, where that is one, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return bytes(value)
    return f"req_{secrets.token_hex(12)}".encode()


def _fault_of(scope: Scope, allowed_hosts: Collection[str]) -> ApiError | None:
    """Returns what is wrong with the head of a request that is well-formed, if anything."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and b"content-length" in names:
        # What stands before this gateway may go by the other of the two, and so see other requests than are seen here.
        message = "A request has Content-Length or Transfer-Encoding, not both."
        return ApiError(400, message, _INVALID, "invalid_http", headers=CLOSES)
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if not all(host_is_allowed(host, allowed_hosts) for host in hosts):
        message = (
            "This gateway does not answer to the host name that was asked for. "
            "Use its address, or have its operator allow the name with --allow-host NAME."
        )
        return ApiError(421, message, _INVALID, "host_not_allowed", headers=CLOSES)
    return None


def _scope_of(path: str) -> KeyScope:
    """What a key must open to be used there."""
    if path == _ACCESS:
        return KeyScope.ACCESS
    return KeyScope.OPERATE if path.startswith(_OPERATORS) else KeyScope.USE


def _is_own_machine(scope: Scope) -> bool:
    """Whether a request came from this machine and asks for it as such, through nobody else: nor for a web page of
    another's, which a browser of this machine shows."""
    client = scope.get("client")
    if client is None or user_of(client[0]) != LOCAL:
        return False
    names = {name for name, _ in scope["headers"]}
    hosts = [host_of(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host"]
    is_local = all(host == "localhost" or user_of(host) == LOCAL for host in hosts)
    return is_local and not names & _FORWARDED and _is_same_origin(scope)


def _is_same_origin(scope: Scope) -> bool:
    """Whether the web page that a request is of, if it is one's, came from where the request goes."""
    said = {name: value.strip().lower() for name, value in scope["headers"]}
    host = said.get(b"host", b"")
    return said.get(b"origin") in (None, b"http://" + host, b"https://" + host)


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {MAX_BODY_BYTES} bytes.",
        _INVALID,
        "request_too_large",
        headers=CLOSES,
    )
