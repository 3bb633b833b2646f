"""From the name of a model to its folder: bundled, local, or from a hub."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S
from support.models.stored_models import alter_a_weight, copy_of

from molink.shards.checkpoint import catalog
from molink.shards.checkpoint.catalog import (
    BUNDLED,
    CheckpointNotFound,
    is_from_hub,
    require_identity,
    resolve,
)
from molink.shards.checkpoint.store import StoreError, describe, read_manifest
from molink.shards.text.tokenizer import Tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "README.md": b"# hello",
    "model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}',
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
    "pytorch_model.bin": b"never",
}


def test_the_bundled_model_needs_no_download_and_can_be_described() -> None:
    folder = resolve("molink/tiny-shakespeare")
    spec = describe(folder, name="molink/tiny-shakespeare")
    tokenizer = Tokenizer.from_folder(folder)

    assert list(BUNDLED) == ["molink/tiny-shakespeare", "molink/tiny-shakespeare-draft"]
    assert spec.layers == 12
    assert spec.vocabulary_size == tokenizer.vocabulary_size
    assert tokenizer.decode(tokenizer.encode("ROMEO: Speak!")) == "ROMEO: Speak!"
    stop = spec.stop_token_ids[0]
    assert not tokenizer.has_text(stop)
    assert stop in tokenizer.apply_chat_template([{"role": "user", "content": "Good morrow!"}])


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_model_is_known_by_its_contents(name: str, tmp_path: Path) -> None:
    folder = resolve(name)
    require_identity(name, folder, read_manifest(folder).content_hash, [])
    copy = copy_of(folder, tmp_path / "copy")
    alter_a_weight(copy, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(
        StoreError, match=f"{copy} differs from {name} as it was released.*Install MoLink again"
    ):
        require_identity(name, copy, read_manifest(copy).content_hash, [])


def test_under_a_name_that_is_served_only_what_is_served_is_taken(tmp_path: Path) -> None:
    served = [("llama", "a" * 64), ("llama", "b" * 64), ("other", "c" * 64)]
    for content in ("a" * 64, "b" * 64):
        require_identity("llama", tmp_path, content, served)
    require_identity("new", tmp_path, "c" * 64, served)
    with pytest.raises(
        StoreError, match=f"{tmp_path} differs from what the swarm serves as llama.*cccccccccccc, the"
    ):
        require_identity("llama", tmp_path, "c" * 64, served)


def test_the_bundled_models_files_are_no_links_however_it_was_installed() -> None:
    folder = catalog.resolve("molink/tiny-shakespeare")
    assert not [path.name for path in folder.iterdir() if path.is_symlink()]


def test_a_bundled_model_that_is_not_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "BUNDLED", {"molink/lost": "models/lost"})

    with pytest.raises(CheckpointNotFound, match="Install MoLink again"):
        resolve("molink/lost")


def test_a_local_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    assert resolve(str(tmp_path / "mine")) == resolve("mine") == resolve("./mine") == tmp_path / "mine"
    assert not is_from_hub("mine")


def test_a_directory_without_a_model_is_not_looked_up_in_the_hub(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no config\.json") as raised:
        resolve(str(tmp_path))
    assert raised.value.model == str(tmp_path)


@pytest.mark.parametrize(
    "identifier", ["", "/no/such/place", "./gone", "a/b/c", "..", "a b", "-x", "a--b", "x/../y"]
)
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused_without_network(identifier: str) -> None:
    with pytest.raises(CheckpointNotFound) as raised:
        resolve(identifier)
    assert "directory" in str(raised.value) or "config.json" in str(raised.value)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


class _Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP interface as a download uses."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/someone/some-model/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}
                for name, data in HUB_FILES.items()
            ]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/someone/some-model"):
            info = {
                "id": "someone/some-model",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in HUB_FILES],
            }
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/someone/some-model/resolve/") and name in HUB_FILES:
            data = HUB_FILES[name]
            etag = f'"{_git_hash(data)}"'
            self._send(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def _hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def _in_process(endpoint: str, home: Path, statement: str) -> subprocess.CompletedProcess[str]:
    """The hub library reads its endpoint when it is imported, so each case is a process of its own."""
    program = (
        "from pathlib import Path\n"
        "from molink.shards.checkpoint.catalog import CheckpointNotFound, resolve\n"
        "try:\n"
        f"    print(*sorted(p.name for p in {statement}.iterdir()))\n"
        "except CheckpointNotFound as error:\n"
        "    print(error)\n"
    )
    environment = dict(os.environ, HF_ENDPOINT=endpoint, HF_HOME=str(home), HF_HUB_DISABLE_TELEMETRY="1")
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        env=environment,
    )


@pytest.mark.full
def test_a_hub_model_comes_without_its_weights_and_is_found_again_without_network(tmp_path: Path) -> None:
    model = "'someone/some-model'"
    with _hub() as endpoint:
        small = _in_process(endpoint, tmp_path, f"resolve({model})").stdout.split()
        unknown = _in_process(endpoint, tmp_path, "resolve('someone/nothing')").stdout
    offline = _in_process(endpoint, tmp_path, f"resolve({model})").stdout.split()

    assert small == offline == ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert "model 'someone/nothing' was not found" in unknown
    assert "no public model of this name" in unknown


@pytest.mark.full
def test_a_hub_that_cannot_be_reached_is_one_clear_sentence(tmp_path: Path) -> None:
    with _hub() as endpoint:
        pass
    said = _in_process(endpoint, tmp_path, "resolve('someone/some-model')").stdout

    assert said.startswith("model 'someone/some-model' was not found: neither a bundled model")
    assert "could not be reached" in said
    assert said.count("\n") == 1
