"""What happens to every request before its route sees it: bounds on size and number, counting, the last
resort.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from molink.client.gateway.failures import Failure, busy, failure_of
from molink.client.gateway.metrics import Metrics

MAX_BODY_BYTES: Final = 2**20
BODY_TIMEOUT_S: Final = 30.0


class Intake:
    """ASGI middleware.

    Bodies are read whole, so that no route meets a client that stops in the middle. Of requests to `limited`
    paths, at most `max_requests` are under way at once, streaming included.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_requests: int, limited: Iterable[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._max_requests = max_requests
        self._limited = frozenset(limited)
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - the boundary of a request
            failure = failure_of(error)
            if not status:
                await failure.response()(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.answered(route, scope["method"], status or 499)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._limited:
            await self._serve(scope, receive, send)
            return
        if self._active >= self._max_requests:
            message = f"{self._max_requests} requests are under way, the most at once. Try again in a moment."
            await busy(message, 1.0).response()(scope, receive, send)
            return
        self._active += 1
        self._metrics.set_active(self._active)
        try:
            await self._serve(scope, receive, send)
        finally:
            self._active -= 1
            self._metrics.set_active(self._active)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _read(scope, receive)
        except TimeoutError:
            body = Failure(408, "The body took too long to come.", "invalid_request_error", "request_timeout")
        if body is None:
            return
        if isinstance(body, Failure):
            await body.response()(scope, receive, send)
            return
        read = False

        async def replay() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _read(scope: Scope, receive: Receive) -> bytes | Failure | None:
    """The whole body; a failure if it is too large, None if the client left."""
    too_large = Failure(
        413,
        f"The body is larger than {MAX_BODY_BYTES} bytes.",
        "invalid_request_error",
        "request_too_large",
        headers={"Connection": "close"},
    )
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        return too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return too_large
        if not message.get("more_body", False):
            return bytes(body)
