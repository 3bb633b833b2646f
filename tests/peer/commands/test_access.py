"""`molink-peer access`: what it takes of a gateway's answer, to whom it shows a token, and how it fails."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from molink.commands import CommandFailed
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.commands.access import KEY_FILE, GrantedAccess, checked_url, keep_swarm_key, register

OPERATOR = Identity.generate().peer_id
PEER = f"/ip4/203.0.113.7/tcp/4001/p2p/{Identity.generate().peer_id}"
ANSWER: dict[str, Any] = {"operator": OPERATOR, "initial_peers": [PEER], "swarm_key": None}


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A server that says this to whoever registers; its URL, and the tokens and descriptors that were shown."""
    shown: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            shown.append((self.headers["Authorization"], json.loads(self.rfile.read(length))))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", shown
        finally:
            server.shutdown()
            thread.join()


def test_a_machine_shows_its_token_and_what_it_is_under_one_identity(tmp_path: Path) -> None:
    with answering(201, json.dumps(ANSWER).encode()) as (url, shown):
        granted = [register(f"{url}/", "the-token", tmp_path / "identity.key") for _ in range(2)]
    assert granted == [GrantedAccess(OPERATOR, (PEER,), None)] * 2
    assert {token for token, _ in shown} == {"Bearer the-token"}
    [peer_id] = {body["peer_id"] for _, body in shown}
    assert peer_id == Identity.load_or_create(tmp_path / "identity.key").peer_id
    assert shown[0][1]["node"]["hostname"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b'{"error": {"message": "The key has expired."}}', "token (The key has expired): take the one"),
        (409, b"nonsense", "refused: it answered 409"),
        (201, b"nonsense", "did not answer as a gateway does"),
        (201, b"[]", "it is no JSON object"),
        (201, json.dumps(ANSWER | {"operator": "me"}).encode(), "did not answer as a gateway does"),
        (201, json.dumps(ANSWER | {"initial_peers": []}).encode(), "it names 0 initial peers"),
        (201, json.dumps(ANSWER | {"initial_peers": ["x"]}).encode(), "did not answer as a gateway does"),
        (201, json.dumps(ANSWER | {"initial_peers": [PEER] * 65}).encode(), "it names 65 initial peers"),
        (201, json.dumps(ANSWER | {"swarm_key": "short"}).encode(), "that is no swarm key"),
        (201, json.dumps(ANSWER | {"model": "../secrets"}).encode(), "is no hub's id"),
        (201, json.dumps(ANSWER | {"model": ["a/b"]}).encode(), "is no hub's id"),
        (201, json.dumps(ANSWER | {"swarm_key": 7}).encode(), "swarm_key are missing"),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_sentence(
    status: int, body: bytes, said: str, tmp_path: Path
) -> None:
    with answering(status, body) as (url, _), pytest.raises(CommandFailed) as failed:
        register(url, "the-token", tmp_path / "identity.key")
    assert said in str(failed.value)
    assert "the-token" not in str(failed.value)


def test_a_gateway_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="cannot be reached"):
        register("http://127.0.0.1:9", "the-token", tmp_path / "identity.key")


def test_secrets_go_to_strangers_under_tls_only() -> None:
    for url in (
        "https://swarm.example.org",
        "http://localhost:8000",
        "http://127.0.0.1",
        "http://192.168.1.5:8000",
        "http://[::1]:8000",
        "http://[fe80::1]",
    ):
        assert checked_url(f"{url}/") == url
    for url in (
        "http://swarm.example.org",
        "http://93.184.216.34",
        "http://localhost.example.org",
        "ftp://127.0.0.1",
        "swarm.example.org",
        "https://x/?a=b",
        "http://[",
        "",
    ):
        with pytest.raises(CommandFailed):
            checked_url(url)


def test_a_swarms_key_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    keys = SwarmKey.generate(), SwarmKey.generate()
    for key in keys:  # a later one takes the earlier one's place
        granted = GrantedAccess.of(ANSWER | {"swarm_key": key.line})
        assert keep_swarm_key(granted, tmp_path) == tmp_path / KEY_FILE
        assert SwarmKey.load(tmp_path / KEY_FILE) == key
    assert keep_swarm_key(GrantedAccess.of(ANSWER), tmp_path) is None
