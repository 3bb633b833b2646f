"""A peer and a model of a hub: by whose word it is known, and that a broken one is refused whole."""

import asyncio
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.links.data_plane import DEADLINE_S, asynchronous
from support.models.hub_models import MODEL, HubSide, hub_side
from support.models.stored_models import write_llama
from support.swarms.served_peer import opened, served
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerView
from molink.peer.compute.backend import DeviceBackend
from molink.peer.models import hub
from molink.peer.models.hub import HubAccess, open_hub_model, progress_bar
from molink.peer.models.manifests import ManifestSource
from molink.peer.models.model import LocalModel
from molink.shards.checkpoint.catalog import CheckpointNotFound
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.store import StoreError, describe, read_manifest
from molink.shards.errors import WeightsError
from molink.shards.hub.hub_weights import HubWeights
from molink.shards.spec import Span
from molink.shards.store.blob_part import BlobPart
from molink.shards.store.blobs import BlobStore

Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("hub") / "llama")


@pytest.fixture
def side(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubSide]:
    """A hub with a model, and this process made to take it for the hub."""
    with hub_side(llama, tmp_path) as made:
        made.replace_hub(monkeypatch)
        yield made


def view(content_hash: str, name: str = MODEL) -> PeerView:
    identity = Identity.generate()
    model = replace(facts_of(identity).model, name=name, content_hash=content_hash)
    return PeerView(replace(facts_of(identity), model=model), state_of(identity), 0.0, b"")


def open_with(
    side: HubSide,
    store: BlobStore,
    served: Sequence[tuple[Manifest | None, str, int]],
    told: list[str],
    *,
    layers: Span | None = None,
    memory_bytes: int = 0,
) -> tuple[Manifest, HubWeights]:
    """`served` are manifests as peers hand them out, the content hashes they announce, and how many peers do."""
    handed_out = {content_hash: manifest for manifest, content_hash, _ in served}

    async def ask(_: Sequence[PeerView], content_hash: str) -> Manifest | None:
        return handed_out[content_hash]

    views = [view(content_hash) for _, content_hash, count in served for _ in range(count)]
    views.append(view("f" * 64, name="another/model"))
    access = HubAccess(store, ask, layers, memory_bytes)
    return asyncio.run(open_hub_model(MODEL, side.snapshot(), views, access, told.append))


def hub_model(side: HubSide, store: BlobStore) -> LocalModel:
    manifest = side.manifest
    return LocalModel(
        side.snapshot(), manifest, describe(manifest, "float32", name="some-model"), side.weights(store)
    )


def read_bytes(side: HubSide) -> int:
    return sum(asked.stop - asked.start for asked in side.hub.asked if asked.host == "content")


def test_what_peers_serve_is_known_by_their_word_and_nothing_is_read(side: HubSide) -> None:
    told: list[str] = []
    with side.store() as store:
        manifest, _ = open_with(side, store, [(side.manifest, side.manifest.content_hash, 2)], told)
    assert manifest == side.manifest
    assert side.hub.weight_ranges() == {}
    assert told == []


def test_what_nobody_serves_is_read_once_which_is_said(side: HubSide) -> None:
    told: list[str] = []
    with side.store() as store:
        manifest, _ = open_with(side, store, [], told)
        assert manifest == side.manifest
        assert read_bytes(side) >= len(side.hub.files["model.safetensors"])
        side.hub.asked.clear()
        open_with(side, store, [], told)
        assert read_bytes(side) == 0
    assert f"of {MODEL} once, as nobody serves it yet: [" in told[0]
    assert "100%" in told[-1]


@pytest.mark.parametrize(
    ("layers", "memory_bytes", "kept"),
    [(None, 2**30, Span(0, 6)), (Span(2, 4), 0, Span(2, 4)), (None, 1000, None)],
    ids=["it fits into memory", "chosen layers", "too large"],
)
def test_a_founder_keeps_what_it_may_hold_itself_while_it_reads(
    side: HubSide, layers: Span | None, memory_bytes: int, kept: Span | None
) -> None:
    with side.store() as store:
        _, weights = open_with(side, store, [], [], layers=layers, memory_bytes=memory_bytes)
        blobs = {path.name for path in (store.folder / "blobs").glob("*/*")}
        names = weights.checkpoint.names_of(kept) if kept is not None else set()
        tensors = [weights.checkpoint.tensors[name].tensor for name in names]
        data = side.hub.files["model.safetensors"]
        assert blobs == {hashlib.sha256(data[one.start : one.stop]).hexdigest() for one in tensors}
        side.hub.weight_ranges()
        if kept is not None:
            side.fetch(store, kept)
            assert side.hub.weight_ranges() == {}


def test_where_no_peer_hands_out_a_manifest_the_model_is_read(side: HubSide) -> None:
    told: list[str] = []
    with side.store() as store:
        manifest, _ = open_with(side, store, [(None, "0" * 64, 3)], told)
    assert manifest == side.manifest
    assert "nobody says what it is" in told[0]


def test_a_manifest_that_is_not_the_hubs_gives_way_to_one_that_is(side: HubSide, tmp_path: Path) -> None:
    other = read_manifest(write_llama(tmp_path / "other", "llama_tied"))
    served = [(other, other.content_hash, 5), (side.manifest, side.manifest.content_hash, 1)]
    with side.store() as store:
        assert open_with(side, store, served, [])[0] == side.manifest
        with pytest.raises(StoreError, match="is not what the swarm serves under this name"):
            open_with(side, store, served[:1], [])


def test_of_contents_without_number_a_few_are_asked_for_at_once_within_one_deadline(
    side: HubSide,
) -> None:
    views = [view(f"{number:064x}") for number in range(50)]
    asked: list[str] = []

    async def never(_: Sequence[PeerView], content_hash: str) -> Manifest | None:
        asked.append(content_hash)
        await asyncio.get_running_loop().create_future()
        return None

    async def opening(store: BlobStore) -> Manifest:
        access = HubAccess(store, never, None, 0, manifest_timeout_s=0.05)
        async with asyncio.timeout(DEADLINE_S):
            return (await open_hub_model(MODEL, side.snapshot(), views, access, lambda _: None))[0]

    with side.store() as store:
        assert asyncio.run(opening(store)) == side.manifest  # nobody says what it is: it is read
    assert len(asked) == hub.ASKED_CONTENTS


def test_who_does_not_answer_for_the_likeliest_contents_does_not_keep_others_from_being_heard(
    side: HubSide,
) -> None:

    async def ask(_: Sequence[PeerView], content_hash: str) -> Manifest | None:
        if content_hash != side.manifest.content_hash:
            await asyncio.get_running_loop().create_future()
        return side.manifest

    views = [view("0" * 64), view("0" * 64), view(side.manifest.content_hash)]

    async def opening(store: BlobStore) -> Manifest:
        async with asyncio.timeout(DEADLINE_S):
            access = HubAccess(store, ask, None, 0, manifest_timeout_s=0.05)
            return (await open_hub_model(MODEL, side.snapshot(), views, access, lambda _: None))[0]

    with side.store() as store:
        assert asyncio.run(opening(store)) == side.manifest
    assert side.hub.weight_ranges() == {}


def test_a_gated_model_is_not_found_and_a_broken_hub_is_trouble(side: HubSide) -> None:
    side.hub.gated = True
    with side.store() as store, pytest.raises(CheckpointNotFound, match="accepted its terms"):
        open_with(side, store, [], [])
    side.hub.gated = False
    name = "model.safetensors"
    side.hub.files[name] = side.hub.files[name][:1000]
    with side.store(name="another") as store, pytest.raises(StoreError, match=name):
        open_with(side, store, [], [])


def test_loading_fetches_the_span_and_progress_ends_at_the_whole(side: HubSide) -> None:
    seen: list[tuple[int, int]] = []
    told: list[str] = []
    with side.store() as store:
        model = replace(hub_model(side, store), report=told.append)
        backend = DeviceBackend(model, "cpu")
        backend.load(Span(1, 3), lambda *it: seen.append(it))()
        assert backend.engine.held == (Span(1, 3),)
        backend.load(Span(3, 4), lambda *_: None)()
        assert backend.engine.held == (Span(1, 4),)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 2 * model.spec.weight_bytes(Span(1, 3))  # fetched, then loaded
    assert told[0].startswith("Fetching layers [1, 3) of some-model: [")
    assert "100%" in told[-1]


def test_what_is_fetched_ahead_is_loaded_without_the_hub(side: HubSide) -> None:
    with side.store() as store:
        backend = DeviceBackend(hub_model(side, store), "cpu")
        backend.fetch(Span(1, 3))
        side.hub.weight_ranges()
        side.hub.files.clear()
        backend.load(Span(1, 3), lambda *_: None)()
        assert side.hub.weight_ranges() == {}
        assert backend.engine.held == (Span(1, 3),)


def test_what_the_disk_has_spoiled_is_fetched_again_when_it_is_loaded(side: HubSide) -> None:
    with side.store() as store:
        model = hub_model(side, store)
        expected = model.load(Span(1, 2), "cpu").model.state_dict()
        with side.weights(store).ready(Span(1, 2), side.manifest, lambda *_: None) as parts:
            path = parts[UP].path
        path.write_bytes(bytes(path.stat().st_size))
        again = model.load(Span(1, 2), "cpu").model.state_dict()
    assert again.keys() == expected.keys()
    assert all(again[name].equal(expected[name]) for name in expected)


def test_what_the_disk_cannot_read_any_more_is_fetched_again_when_it_is_loaded(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side.store() as store:
        model = hub_model(side, store)
        with side.weights(store).ready(Span(1, 2), side.manifest, lambda *_: None) as parts:
            path = parts[UP].path
        bad_inode = path.stat().st_ino
        whole = path.with_name("whole")
        whole.hardlink_to(path)  # its inode is not used again
        opened = Path.open

        def unreadable(self: Path, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as Path.open
            if self == path and path.stat().st_ino == bad_inode:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return opened(self, *args, **options)

        monkeypatch.setattr(Path, "open", unreadable)

        def read(parts: Mapping[str, BlobPart] | None, _: Callable[[int, int], None]) -> bytes:
            assert parts is not None
            with parts[UP].path.open("rb") as file:
                return file.read()

        assert model.with_parts(Span(1, 2), lambda *_: None, read) == whole.read_bytes()
        assert path.stat().st_ino != bad_inode
        assert model.load(Span(1, 2), "cpu").span == Span(1, 2)


def without(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != UP}


def misshapen(tensors: Tensors) -> Tensors:
    return tensors | {UP: tensors[UP][:-1].contiguous()}


def not_a_number(tensors: Tensors) -> Tensors:
    tensors[UP][3, 3] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("spoil", "said"), [(without, "missing"), (misshapen, "shapes"), (not_a_number, "not a number")]
)
def test_a_broken_checkpoint_is_one_clear_error_and_nothing_is_half_loaded(
    llama: Path, tmp_path: Path, spoil: Callable[[Tensors], Tensors], said: str
) -> None:
    broken = Path(shutil.copytree(llama, tmp_path / "broken"))
    path = broken / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(spoil(tensors), path, metadata={"format": "pt"})
    with hub_side(broken, tmp_path) as side, side.store() as store:
        backend = DeviceBackend(hub_model(side, store), "cpu")
        with pytest.raises(WeightsError, match=said) as raised:
            backend.load(Span(0, 3), lambda *_: None)
        assert raised.value.tensors == (UP,)
        assert backend.engine.held == ()
        backend.load(Span(2, 6), lambda *_: None)()
        assert backend.engine.held == (Span(2, 6),)


def test_tensors_beyond_the_model_do_no_harm(llama: Path, tmp_path: Path) -> None:
    more = Path(shutil.copytree(llama, tmp_path / "more"))
    path = more / "model.safetensors"
    tensors = load_file(path) | {"model.layers.1.self_attn.extra.weight": torch.ones(7)}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with hub_side(more, tmp_path) as side, side.store() as store:
        assert hub_model(side, store).load(Span(0, 6), "cpu").span == Span(0, 6)


@asynchronous
async def test_a_serving_peer_hands_out_its_manifest_and_nobody_else_is_believed(llama: Path) -> None:
    model = opened(llama)
    async with served(model) as peer, ManifestSource(None, None) as source:
        right = PeerView(
            replace(peer.facts, model=replace(peer.facts.model, **_served(model))),
            state_of(peer.identity),
            0.0,
            b"",
        )
        assert await source.ask([right], model.spec.content_hash) == model.manifest
        liar = replace(
            right, facts=replace(right.facts, model=replace(right.facts.model, content_hash="0" * 64))
        )
        assert await source.ask([liar], "0" * 64) is None
        other = replace(
            right, facts=replace(right.facts, model=replace(right.facts.model, model_hash="0" * 64))
        )
        assert await source.ask([other, right], model.spec.content_hash) == model.manifest
        assert await source.ask([], model.spec.content_hash) is None


def _served(model: LocalModel) -> dict[str, str]:
    return {"content_hash": model.spec.content_hash, "model_hash": model.spec.model_hash}


def test_progress_is_a_line_of_text() -> None:
    assert progress_bar(0, 2**30).startswith("[....................] 0%")
    assert progress_bar(2**29, 2**30).startswith("[##########..........] 50%")
    assert progress_bar(0, 0).startswith("[####################] 100%")
