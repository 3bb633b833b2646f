"""The gateway's open connections: how many each user may hold, and which of them have had their time."""

import asyncio
import json
import logging
from enum import Enum, auto
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from molink.client.gateway.error_handlers import ApiError, busy
from molink.client.gateway.shares import FairShares, user_of
from molink.dht.refusals import RefusalLog

MOST_CONNECTIONS: Final = 1024
HEADERS_WITHIN_S: Final = 10.0
BODY_WITHIN_S: Final = 30.0
IDLE_S: Final = 10.0
"""Before the first request of a connection, and between two."""
UNREAD_S: Final = 30.0
"""A client that reads nothing of what waits for it for so long is taken for gone."""
UNREAD_YIELDS_S: Final = 10.0
"""As long while others wait for their turn."""
LOOKS_EVERY_S: Final = 1.0
_log = logging.getLogger(__name__)


class ConnectionPhase(Enum):
    """Phase of a connection: what it waits for."""

    IDLE = auto()
    HEADERS = auto()
    BODY = auto()
    ANSWER = auto()


_WITHIN_S: Final = {
    ConnectionPhase.IDLE: IDLE_S,
    ConnectionPhase.HEADERS: HEADERS_WITHIN_S,
    ConnectionPhase.BODY: BODY_WITHIN_S + LOOKS_EVERY_S,
}


class Connections:
    """Those that are open. Ends the idle, the unfinished and the unread; `look` at them now and then."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self._shares = FairShares(most)
        self._open: dict[GatewayConnection, str] = {}
        """In the order in which they came, with whose they are."""
        self._refusals = RefusalLog(_log)

    def admit(self, connection: "GatewayConnection", address: str | None) -> bool:
        """Takes in a new one, in the place of one that waits for its client if need be. False: there is no room."""
        user = user_of(address)
        if not self._shares.may_take(user):
            displaced = self._displaceable()
            # Nobody makes room for himself at the cost of those who hold less.
            if displaced is None or self._shares.held(self._open[displaced]) < self._shares.held(user):
                self._refusals.refused("connections beyond their number", user)
                return False
            self._refusals.refused("connections that waited while others came", self._open[displaced])
            self.forget_connection(displaced)
            displaced.abort()
        self._shares.take(user)
        self._open[connection] = user
        return True

    def forget_connection(self, connection: "GatewayConnection") -> None:
        """Forgets a connection that has closed."""
        user = self._open.pop(connection, None)
        if user is not None:
            self._shares.give(user)

    def look(self, now_s: float) -> None:
        """Ends those that have had their time."""
        for connection, user in tuple(self._open.items()):
            within_s = _WITHIN_S.get(connection.phase)
            if within_s is not None and now_s - connection.since_s > within_s:
                if connection.phase in (ConnectionPhase.HEADERS, ConnectionPhase.BODY):
                    self._refusals.refused("unfinished requests", user)
                connection.abort()
        self.end_unread(now_s, UNREAD_S)

    def end_unread(self, now_s: float, after_s: float) -> None:
        """Ends those whose clients have read nothing for so long although there is something to read."""
        for connection, user in tuple(self._open.items()):
            if connection.unread_s(now_s) > after_s:
                self._refusals.refused("answers that were not read", user)
                connection.abort()

    def out_of_descriptors(self) -> None:
        """Makes room where not even a new connection could be taken in: a quarter of those that wait go."""
        self._refusals.refused("connections for want of descriptors", "everybody")
        for _ in range(1 + len(self._open) // 4):
            displaced = self._displaceable()
            if displaced is None:
                return
            self.forget_connection(displaced)
            displaced.abort()

    def abort_all(self) -> None:
        for connection in tuple(self._open):
            connection.abort()

    def _displaceable(self) -> "GatewayConnection | None":
        """Of the greediest user's, the one that has waited for its client longest."""
        waiting: dict[str, GatewayConnection] = {}
        for connection, whose in self._open.items():
            if connection.phase is ConnectionPhase.ANSWER:
                continue
            longest = waiting.get(whose)
            if longest is None or connection.waits_since_s < longest.waits_since_s:
                waiting[whose] = connection
        if not waiting:
            return None
        return waiting[self._shares.greediest(waiting)]


class GatewayConnection(H11Protocol):
    """One connection as uvicorn serves it, which knows what it waits for and since when."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self.phase = ConnectionPhase.IDLE
        self.since_s = self.loop.time()
        """When that phase began."""
        self.waits_since_s = self.since_s
        """When it last began to wait for a request: that the client sends a part of one does not change it."""
        self._unread_bytes = 0
        self._unread_since_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        if not self._all.admit(self, self.client[0] if self.client else None):
            transport.write(_refusal(busy("Too many connections are open. Try again in a moment.", 1.0)))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.forget_connection(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_phase()

    def pause_writing(self) -> None:
        self._unread_since_s = self.loop.time()
        self._unread_bytes = self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = None
        super().resume_writing()

    def unread_s(self, now_s: float) -> float:
        """For how long the client has read nothing of what waits for it."""
        if self._unread_since_s is None and self.transport.is_closing():
            self._unread_since_s = now_s  # what is left goes out before the connection ends, or never does
        if self._unread_since_s is None:
            return 0.0
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes != self._unread_bytes:
            self._unread_since_s, self._unread_bytes = now_s, unread_bytes
        return now_s - self._unread_since_s

    def abort(self) -> None:
        """Ends it, whatever is under way."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        failure = ApiError(400, msg, "invalid_request_error", "invalid_http")
        self.transport.write(_refusal(failure))
        self.transport.close()

    def _note_phase(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        answers = cycle is not None and not cycle.response_complete
        their_state = self.conn.their_state
        if their_state is h11.SEND_BODY:
            phase = ConnectionPhase.BODY
        elif answers:
            phase = ConnectionPhase.ANSWER
        elif self.conn.trailing_data[0]:
            phase = ConnectionPhase.HEADERS
        else:
            phase = ConnectionPhase.IDLE
        if phase is self.phase:
            return
        if self.phase is ConnectionPhase.ANSWER:
            self.waits_since_s = self.loop.time()
        self.phase, self.since_s = phase, self.loop.time()


def _refusal(failure: ApiError) -> bytes:
    """A whole response of HTTP/1.1, for where there is no request to answer."""
    body = json.dumps(failure.body()).encode()
    reason = "Bad Request" if failure.status == 400 else "Too Many Requests"
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **failure.headers,
    }
    lines = [f"HTTP/1.1 {failure.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
