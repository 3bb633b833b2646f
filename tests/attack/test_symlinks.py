"""A model's folder from a stranger makes nothing of this machine's own files part of the model."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous
from support.models.tiny_models import make_tiny_model
from support.swarms.served_peer import opened, served

from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.request_limits import RequestRefused
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.checkpoint import store
from molink.shards.checkpoint.model_files import own_file
from molink.shards.checkpoint.safetensors_header import StoreError

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
LINKED = "chat_template.jinja"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "id_ed25519"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path / "model")


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "straight": lambda link, target: link.symlink_to(target),
    "relative": lambda link, target: link.symlink_to(os.path.relpath(target, link.parent)),
    "over another link": lambda link, target: (
        link.with_name("other").symlink_to(target),
        link.symlink_to("other"),
    )[1],
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", [LINKED, "config.json", "tokenizer_config.json", "generation_config.json"])
def test_a_link_out_of_the_folder_is_refused_and_says_what_to_do(
    folder: Path, secret: Path, kind: str, name: str
) -> None:
    (folder / name).unlink(missing_ok=True)
    LINKS[kind](folder / name, secret)
    with pytest.raises(
        StoreError, match=r"leads out of the model's folder.* put a copy in its place"
    ) as caught:
        store.read_manifest(folder)
    assert SECRET.decode() not in str(caught.value)


def test_a_folder_in_the_place_of_a_link_to_a_folder_is_no_way_out(folder: Path, secret: Path) -> None:
    (folder / "sub").symlink_to(secret.parent)
    with pytest.raises(StoreError, match="leads out"):
        own_file(folder, "sub/id_ed25519")
    with pytest.raises(StoreError, match="leads out"):
        own_file(folder, "../../home/id_ed25519")


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(folder: Path) -> None:
    (folder / LINKED).unlink()
    os.mkfifo(folder / LINKED)
    with pytest.raises(StoreError, match="is not a file"):
        store.read_manifest(folder)


def test_links_that_lead_in_a_circle_are_refused(folder: Path) -> None:
    (folder / LINKED).unlink()
    (folder / LINKED).symlink_to(LINKED)
    with pytest.raises(StoreError, match="cannot be read"):
        store.read_manifest(folder)


def test_a_hubs_cache_whose_links_lead_to_its_own_blobs_is_the_same_model(
    folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "models--test--llama"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert store.read_manifest(snapshot).content_hash == store.read_manifest(folder).content_hash


def test_a_file_that_is_exchanged_for_a_link_later_is_not_handed_out(folder: Path, secret: Path) -> None:
    (folder / LINKED).write_text("{{ messages }}")
    model = opened(folder)
    artifacts = ArtifactServer.of(model)
    sha256 = model.manifest.files[LINKED]
    assert artifacts.read_part(model.spec.model_hash, sha256, 0)[0] == b"{{ messages }}"
    (folder / LINKED).unlink()
    (folder / LINKED).symlink_to(secret)
    with pytest.raises(RequestRefused, match="no more"):
        artifacts.read_part(model.spec.model_hash, sha256, 0)
    (folder / LINKED).unlink()
    (folder / LINKED).write_bytes(SECRET)
    with pytest.raises(RequestRefused, match="no more"):
        artifacts.read_part(model.spec.model_hash, sha256, 0)


@asynchronous
async def test_whoever_asks_by_hash_gets_nothing_of_this_machine(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    (folder / LINKED).write_text("{{ messages }}")
    model = opened(folder)
    async with served(model) as peer:
        (folder / LINKED).unlink()
        (folder / LINKED).symlink_to(secret)
        for sha256 in (model.manifest.files[LINKED], hashlib.sha256(SECRET).hexdigest()):
            asked = pb.GetFile(model_hash=model.spec.model_hash, sha256=sha256, offset=0)
            answer, payload = await peer.link.request(pb.Request(get_file=asked), DEADLINE_S)
            assert answer.HasField("refusal")
            assert str(tmp_path) not in str(answer)
            assert not payload
