"""The local control endpoint: how `molink-peer leave` and `status` talk to the peer of this machine.

A TCP listener on loopback, on Windows as elsewhere. Port and a random token are in a file that only this user
can read; who shows the token may ask. One JSON line each way: {"token", "command"} -> {"ok": true, ...} or
{"ok": false, "error"}.
"""

import asyncio
import hmac
import json
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from molink.peer.daemon.local_listener import HOST, LocalListener
from molink.peer.deaths import unread_death
from molink.peer.state_dir import CONTROL_FILE, read_json, write_json

REQUEST_BYTES = 4096
ANSWER_BYTES = 64 * 1024 * 1024
"""A peer of a large swarm is described in 1 to 2 KB."""
_log = logging.getLogger(__name__)


class ControlError(Exception):
    """The peer did not do what it was asked; the message is a sentence for people."""


class NoPeerRunning(ControlError):
    """There is no peer to ask in this state directory."""


class ControlEndpoint:
    """Answers `status`, `leave` and `leave-now` on loopback while the context is open."""

    def __init__(
        self, state_dir: Path, on_leave: Callable[[bool], None], status: Callable[[], Mapping[str, object]]
    ) -> None:
        """`on_leave` is told whether the peer is to leave at once."""
        self._file = state_dir / CONTROL_FILE
        self._on_leave = on_leave
        self._status = status
        self._token = secrets.token_hex(32)
        self._listener = LocalListener(asyncio.StreamReader.readline, self.answer, REQUEST_BYTES)

    async def __aenter__(self) -> Self:
        await self._listener.__aenter__()
        write_json(self._file, {"port": self._listener.port, "token": self._token, "pid": os.getpid()})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.unlink(missing_ok=True)
        await self._listener.__aexit__(kind, error, trace)

    def answer(self, line: bytes) -> bytes:
        """The answer to a request, which is done before; to whatever is none, a refusal."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return _refusal("a request is one line of JSON with token and command")
        token = str(request.get("token", "")).encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(token, self._token.encode()):
            return _refusal("wrong token")
        command = request.get("command")
        if command == "status":
            return self._report()
        if command in ("leave", "leave-now"):
            self._on_leave(command == "leave-now")
            return _line({"ok": True})
        return _refusal(f"unknown command {command!r}; known are status, leave and leave-now")

    def _report(self) -> bytes:
        try:
            return _line({**self._status(), "ok": True})
        except Exception as error:  # noqa: BLE001 - request boundary: a failing report must not end the endpoint
            _log.exception("the status could not be told")
            return _refusal(f"the peer could not tell its status: {error!r}")


async def call_peer(state_dir: Path, command: str, timeout_s: float) -> dict[str, object]:
    """What the peer that runs with this state directory answers to `status`, `leave` or `leave-now`.

    Raises:
        NoPeerRunning: none runs there.
        ControlError: it refused, or did not answer in time.
    """
    known = read_json(state_dir / CONTROL_FILE)
    port, token = known.get("port"), known.get("token")
    death = unread_death(state_dir)
    ended = "" if death is None else f" (the last one was ended by {death})"
    if not isinstance(port, int) or not isinstance(token, str):
        raise NoPeerRunning(
            f"no peer is running with the state directory {state_dir}{ended}: start one with `molink-peer join`, "
            "or name the right folder with --state-dir"
        )
    try:
        async with asyncio.timeout(timeout_s):
            line = await _exchange(port, {"token": token, "command": command})
            answer = json.loads(line)
    except TimeoutError:
        raise ControlError(
            f"the peer (process {known.get('pid')}) did not answer within {timeout_s:g} s: "
            "it may be very busy; try again"
        ) from None
    except (OSError, ValueError):
        answer = None
    if not isinstance(answer, dict) or "ok" not in answer:
        raise NoPeerRunning(
            f"no peer answers for the state directory {state_dir}: the last one (process {known.get('pid')}) "
            f"{'seems to have been killed' if death is None else f'was ended by {death}'}; "
            "start one with `molink-peer join`"
        )
    if answer.pop("ok") is not True:
        raise ControlError(f"the peer refused {command}: {answer.get('error', 'no reason given')}")
    return answer


async def _exchange(port: int, request: dict[str, object]) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port, limit=ANSWER_BYTES)
    try:
        writer.write(_line(request))
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _line(answer: dict[str, object]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _refusal(reason: str) -> bytes:
    return _line({"ok": False, "error": reason})
