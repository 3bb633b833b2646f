"""What makes two models the same one, and the manifest that says so."""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.models.stored_models import (
    alter_a_weight,
    change_a_weight,
    copy_of,
    edit,
    write_llama,
    write_model,
)
from support.models.tiny_models import (
    make_tokenizer,
)

from molink.shards.checkpoint.manifest import group_digest
from molink.shards.checkpoint.store import (
    Manifest,
    StoreError,
    describe,
    layer_of,
    model_hash,
    read_manifest,
    small_files,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: `copy_of` gives one that may."""
    return write_llama(tmp_path_factory.mktemp("store") / "llama")


def test_the_same_content_at_two_paths_or_in_other_shards_is_the_same_model(
    llama: Path, tmp_path: Path
) -> None:
    twin = copy_of(llama, tmp_path / "renamed")
    edit(twin / "config.json", _name_or_path="elsewhere", transformers_version="4.0.0")
    pieces = write_model("llama", tmp_path / "pieces", max_shard_size="200KB")
    make_tokenizer().save_pretrained(pieces)

    assert len(list(pieces.glob("*.safetensors"))) > 1
    assert read_manifest(twin) == read_manifest(llama) == read_manifest(pieces)
    assert describe(twin).name == "renamed"
    assert describe(read_manifest(twin), name="me/mine").name == "me/mine"


@pytest.mark.parametrize(
    "change",
    [
        change_a_weight,
        lambda folder: edit(folder / "config.json", rms_norm_eps=1e-3),
        lambda folder: edit(folder / "generation_config.json", eos_token_id=[1, 2]),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        lambda folder: (folder / "tokenizer.json").unlink(),
    ],
    ids=["weight", "configuration", "stop tokens", "chat template", "tokenizer"],
)
def test_any_change_of_content_is_another_model(
    change: Callable[[Path], object], llama: Path, tmp_path: Path
) -> None:
    changed = copy_of(llama, tmp_path / "llama")
    change(changed)

    assert read_manifest(changed).content_hash != read_manifest(llama).content_hash


def test_only_the_group_of_a_changed_tensor_has_another_digest(llama: Path, tmp_path: Path) -> None:
    changed = copy_of(llama, tmp_path / "llama")
    change_a_weight(changed)
    before, after = read_manifest(llama), read_manifest(changed)

    assert [a == b for a, b in zip(before.layers, after.layers, strict=True)] == [True] * 3 + [False] + [
        True
    ] * 2
    assert (before.embed, before.head) == (after.embed, after.head)


def test_a_loaded_layer_can_be_checked_against_the_manifest(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    own = [
        (name, "F32", tuple(tensor.shape), hashlib.sha256(tensor.numpy().tobytes()).hexdigest())
        for name, tensor in tensors.items()
        if layer_of(name) == 2
    ]
    assert group_digest(own) == read_manifest(llama).layers[2].sha256


def test_digests_are_remembered_until_the_file_changes(llama: Path, tmp_path: Path) -> None:
    folder, cache = copy_of(llama, tmp_path / "llama"), tmp_path / "cache"
    seen: list[tuple[int, int]] = []
    first = read_manifest(folder, cache, lambda done, total: seen.append((done, total)))
    [remembered] = cache.iterdir()
    poisoned = json.loads(remembered.read_text())
    poisoned["tensors"]["model.norm.weight"] = "0" * 64
    remembered.write_text(json.dumps(poisoned))

    assert seen
    assert all(done <= total for done, total in seen)
    assert read_manifest(folder, cache).head.sha256 != first.head.sha256  # it was read from the cache
    change_a_weight(folder)
    assert read_manifest(folder, cache) == read_manifest(folder)


def test_a_file_of_the_same_size_and_time_is_read_again_when_its_bytes_were_altered(
    llama: Path, tmp_path: Path
) -> None:
    folder, cache = copy_of(llama, tmp_path / "llama"), tmp_path / "cache"
    before = read_manifest(folder, cache)
    stat = (folder / "model.safetensors").stat()
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    altered = (folder / "model.safetensors").stat()
    assert (altered.st_size, altered.st_mtime_ns, altered.st_ino) == (
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ino,
    )
    after = read_manifest(folder, cache)
    assert [a == b for a, b in zip(before.layers, after.layers, strict=True)].index(False) == 3
    assert after == read_manifest(folder)


def test_another_file_in_the_place_of_one_of_the_same_size_and_times_is_read_again(
    llama: Path, tmp_path: Path
) -> None:
    folder, cache = copy_of(llama, tmp_path / "llama"), tmp_path / "cache"
    path = folder / "model.safetensors"
    read_manifest(folder, cache)
    stat = path.stat()
    path.rename(tmp_path / "older")
    path.write_bytes((tmp_path / "older").read_bytes())
    alter_a_weight(folder, "model.norm.weight")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_ino != stat.st_ino
    assert read_manifest(folder, cache) == read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format":1,"tensors":3}', b"\xff", b"[" * 100_000])
def test_a_damaged_cache_is_ignored(content: bytes, llama: Path, tmp_path: Path) -> None:
    expected = read_manifest(llama, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(content)

    assert read_manifest(llama, tmp_path) == expected


def test_a_missing_tokenizer_is_no_error(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    for name in small_files(folder):
        if name not in ("config.json", "generation_config.json"):
            (folder / name).unlink()

    assert read_manifest(folder).files == {}


def test_small_files_are_those_that_clients_need_with_their_hashes(llama: Path) -> None:
    files = small_files(llama)

    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= files.keys()
    assert not any("safetensors" in name for name in files)
    for name, digest in files.items():
        assert digest == hashlib.sha256((llama / name).read_bytes()).hexdigest()
    assert read_manifest(llama).files == {
        n: d for n, d in files.items() if "config.json" not in n or "token" in n
    }


def test_a_manifest_survives_the_wire_and_its_hash_is_that_of_its_bytes(llama: Path) -> None:
    manifest = read_manifest(llama)
    data = manifest.to_bytes()

    assert Manifest.from_bytes(data) == manifest
    assert manifest.content_hash == hashlib.sha256(data).hexdigest()
    assert len(data) < 10_000


def _set(manifest: dict[str, Any], path: str, value: object) -> bytes:
    changed = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    place: Any = changed
    for parent in parents:
        place = place[int(parent) if isinstance(place, list) else parent]
    place[last] = value
    return json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 2),
        ("extra", 1),
        ("layers", []),
        ("configuration", []),
        ("embed.sha256", "A" * 64),
        ("embed.sha256", "a" * 63),
        ("layers.0.elements", {"F32": -1}),
        ("layers.0.elements", {"F32": 1.5}),
        ("layers.0.elements", {"F32": 2**60}),
        ("layers.0.elements", {"F33": 1}),
        ("layers.0.matrix_rows", "7"),
        ("files", {"../../evil": "a" * 64}),
        ("files", {"tokenizer.json": "short"}),
    ],
)
def test_a_strangers_manifest_with_wrong_values_is_refused(path: str, value: object, llama: Path) -> None:
    good = json.loads(read_manifest(llama).to_bytes())

    with pytest.raises(StoreError):
        Manifest.from_bytes(_set(good, path, value))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data + b" ",
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data.replace(b'"format":1', b'"format":1,"format":1'),
        lambda data: data + b"x" * 2**20,
        lambda data: b"[" * len(data) * 100,
        lambda data: data.replace(b'"format":1', b'"format":1.0'),
        lambda data: data.replace(b'"format":1', b'"format":true'),
    ],
)
def test_a_manifest_that_is_not_canonical_is_refused(spoil: Callable[[bytes], bytes], llama: Path) -> None:
    with pytest.raises(StoreError):
        Manifest.from_bytes(spoil(read_manifest(llama).to_bytes()))


def test_the_model_hash_depends_on_each_of_its_parts_and_knows_no_others() -> None:
    base = model_hash("a" * 64, "float32", "none")
    others = {
        model_hash("b" * 64, "float32", "none"),
        model_hash("a" * 64, "bfloat16", "none"),
        model_hash("a" * 64, "float32", "int8"),
    }

    assert len(others | {base}) == 4
    assert base == model_hash("a" * 64, "float32", "none")
    with pytest.raises(ValueError, match="float8"):
        model_hash("a" * 64, "float8", "none")
