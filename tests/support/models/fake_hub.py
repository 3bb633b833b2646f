"""A real HTTP server that speaks what the Hugging Face hub speaks to those who download, and can misbehave.

Large files are redirected to another port, as the hub redirects to its content network: other host, no token.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as the server saw it."""

    method: str
    host: str
    """`hub` or `content`."""
    path: str
    name: str
    """Of the file, empty where it is about something else."""
    start: int
    stop: int
    """The range that was asked for, [0, size) without one."""
    authorization: str | None


@dataclass(slots=True)
class Answer:
    """What the server is about to send for a file's bytes; a fault changes it."""

    status: int
    body: bytes
    headers: dict[str, str]
    breaks_off_after: int | None = None
    """The connection is cut after so many bytes of the body."""


Fault = Callable[[Asked, Answer], Answer]


@dataclass(slots=True)
class FakeHub:
    """One model at one commit. Change `fault` and `files` at will."""

    model: str
    files: dict[str, bytes]
    asked: list[Asked] = field(default_factory=list)
    fault: Fault | None = None
    """Applied to answers with bytes of safetensors files."""
    gated: bool = False
    token: str | None = None
    """Who does not show it is told that there is no such model."""
    endpoint: str = ""
    content_endpoint: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def weight_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """What was asked for of weights beyond their headers, by file, in order; the log begins anew."""
        with self.lock:
            ranges: dict[str, list[tuple[int, int]]] = {}
            for asked in self.asked:
                if asked.host == "content" and asked.method == "GET" and asked.start > 0:
                    ranges.setdefault(asked.name, []).append((asked.start, asked.stop))
            self.asked.clear()
        return {name: sorted(found) for name, found in ranges.items()}


def files_of(folder: Path) -> dict[str, bytes]:
    """What a repository made of the folder would hold."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def fake_hub(model: str, files: dict[str, bytes]) -> Iterator[FakeHub]:
    """Serves the files on two ports of this machine."""
    hub = FakeHub(model, dict(files))
    servers = [_Server(hub, host) for host in ("hub", "content")]
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,)) for server in servers]
    hub.endpoint, hub.content_endpoint = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(10)
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub: FakeHub, host: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.host = host

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is no news."""


@cache
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@cache
def _git_hash(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20

    @property
    def _hub(self) -> FakeHub:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        hub = self._hub
        path = unquote(self.path.partition("?")[0])
        name = path.rpartition("/")[2] if "/resolve/" in path or path.startswith("/content/") else ""
        size = len(hub.files.get(name, b""))
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = (int(found[1]), int(found[2]) + 1) if found else (0, size)
        asked = Asked(
            self.command, self.server.host, path, name, start, stop, self.headers.get("Authorization")
        )
        with hub.lock:
            hub.asked.append(asked)
        if self.server.host == "content":
            self._send_bytes(asked, partial=found is not None)
        elif hub.token is not None and asked.authorization != f"Bearer {hub.token}":
            self._send(Answer(401, b"{}", {"X-Error-Code": "RepoNotFound"}))
        elif path.startswith(f"/api/models/{hub.model}/tree/"):
            self._send_json([self._entry(name) for name in hub.files])
        elif path in (f"/api/models/{hub.model}", *self._revisions()):
            siblings = [self._sibling(name) for name in hub.files]
            self._send_json({"id": hub.model, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/{hub.model}/resolve/") and name in hub.files:
            self._send_file(asked)
        else:
            known = path.startswith((f"/{hub.model}/", f"/api/models/{hub.model}"))
            self._send(Answer(404, b"{}", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"}))

    def _revisions(self) -> tuple[str, ...]:
        return tuple(f"/api/models/{self._hub.model}/revision/{name}" for name in ("main", COMMIT))

    def _entry(self, name: str) -> dict[str, object]:
        data = self._hub.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}

    def _sibling(self, name: str) -> dict[str, object]:
        data = self._hub.files[name]
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_hash(data)}
        if _is_large(name):
            entry["lfs"] = {"size": len(data), "sha256": _sha256(data), "pointerSize": 130}
        return entry

    def _send_file(self, asked: Asked) -> None:
        hub = self._hub
        data = hub.files[asked.name]
        if hub.gated:
            self._send(Answer(403, b"{}", {"X-Error-Code": "GatedRepo"}))
        elif not _is_large(asked.name):
            etag = f'"{_git_hash(data)}"'
            self._send(Answer(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT}))
        else:
            sha256 = _sha256(data)
            location = f"{hub.content_endpoint}/content/{asked.name}?signature=secret"
            headers = {"Location": location, "X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{sha256}"'}
            self._send(Answer(302, b"", headers | {"X-Linked-Size": str(len(data))}))

    def _send_bytes(self, asked: Asked, *, partial: bool) -> None:
        hub = self._hub
        data = hub.files[asked.name]
        if not partial:
            answer = Answer(200, data, {})
        elif asked.start >= len(data):
            answer = Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        else:
            stop = min(asked.stop, len(data))
            content_range = f"bytes {asked.start}-{stop - 1}/{len(data)}"
            answer = Answer(206, data[asked.start : stop], {"Content-Range": content_range})
        self._send(hub.fault(asked, answer) if hub.fault is not None else answer)

    def _send_json(self, content: object) -> None:
        self._send(Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"}))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if answer.breaks_off_after is None:
            self.wfile.write(answer.body)
            return
        self.wfile.write(answer.body[: answer.breaks_off_after])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_args: object) -> None:
        """Keeps the test's output clean."""
