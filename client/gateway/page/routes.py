"""Routes of the page and of what it watches, and the tag by which a browser finds its own circuits among all."""

import re
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from molink.client.api.running_sessions import REQUEST_TAG
from molink.client.gateway.page.page_files import PageFile, PageFiles, read_page_files
from molink.client.gateway.page.swarm_feed import SwarmFeed
from molink.client.gateway.shares import user_of
from molink.client.gateway.streams import EventStream

TAG_HEADER: Final = b"x-molink-tag"
_TAG: Final = re.compile(rb"[0-9A-Za-z]{1,32}")
_DIRECTIVES: Final = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types dompurify",
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": "; ".join(_DIRECTIVES),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
KEPT: Final = "public, max-age=31536000, immutable"
ASKED_FOR_AGAIN: Final = "no-cache"


class RequestTags:
    """Request tags (ASGI): what a request's X-Molink-Tag says is shown beside its circuits, to whoever watches."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = dict(scope["headers"]).get(TAG_HEADER, b"") if scope["type"] == "http" else b""
        before = REQUEST_TAG.set(said.decode() if _TAG.fullmatch(said) else "")
        try:
            await self._app(scope, receive, send)
        finally:
            REQUEST_TAG.reset(before)


def add_page(app: FastAPI, feed: SwarmFeed) -> None:
    """Adds the page, its files, and the swarm's state, whole and as it changes."""
    page = read_page_files()
    app.add_middleware(RequestTags)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _served(request, page.index, ASKED_FOR_AGAIN)

    @app.get("/page/{version}/{path:path}", include_in_schema=False)
    async def page_file(version: str, path: str, request: Request) -> Response:
        return _file(request, page, version, path)

    @app.get("/v1/swarm")
    async def swarm_state() -> dict[str, Any]:
        """The swarm as this gateway sees it: peers, layers, circuits in use, models. No addresses."""
        return await feed.snapshot()

    @app.get("/v1/swarm/events", response_class=EventStream, status_code=200)
    async def swarm_events(request: Request) -> Response:
        """The same as it changes, as events, without end."""
        user = user_of(request.client.host if request.client else None)
        feed.admit(user)
        return EventStream(feed.events(user))


def _file(request: Request, page: PageFiles, version: str, path: str) -> Response:
    """A page that was loaded before the gateway was updated gets files of this version, which it must not keep."""
    found = page.by_path.get(path)
    if found is None or found is page.index:
        raise HTTPException(404)
    return _served(request, found, KEPT if version == page.version else ASKED_FOR_AGAIN)


def _served(request: Request, file: PageFile, cache_control: str) -> Response:
    headers = SECURITY_HEADERS | {
        "Cache-Control": cache_control,
        "ETag": file.etag,
        "Vary": "Accept-Encoding",
    }
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, headers=headers, media_type=file.media_type)
    return Response(
        file.compressed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type
    )
