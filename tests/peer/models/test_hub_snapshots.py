"""A model that the hub library's own cache has whole is served from there, and nothing of it is fetched."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from support.models.hub_models import MODEL, HubSide, hub_side
from support.models.stored_models import write_llama
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerView
from molink.peer.models.hub import HubAccess
from molink.peer.models.model import LocalModel, ModelRequest, open_model
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore

WHOLE = Span(0, 6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("hub") / "llama")


@pytest.fixture
def side(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubSide]:
    """A hub with a model, and this process made to take it for the hub, with a cache of its own."""
    with hub_side(llama, tmp_path) as made:
        made.replace_hub(monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


def opened(side: HubSide, store: BlobStore, *served: PeerView) -> LocalModel:
    async def ask(*_: object) -> None:
        """No peer hands out a manifest."""

    access = HubAccess(store, ask, WHOLE, 0)
    return asyncio.run(
        open_model(ModelRequest(MODEL), served, side.folder / "digests", lambda _: None, access)
    )


def serving(content_hash: str) -> PeerView:
    facts = facts_of(identity := Identity.generate())
    model = replace(facts.model, name=MODEL, content_hash=content_hash)
    return PeerView(replace(facts, model=model), state_of(identity), 0.0, b"")


def test_what_the_cache_has_whole_is_served_from_there_and_stored_nowhere_else(side: HubSide) -> None:
    snapshot = Path(snapshot_download(MODEL))
    side.hub.asked.clear()
    with side.store() as store:
        model = opened(side, store, serving(side.manifest.content_hash))
        assert (model.hub, model.folder) == (None, snapshot)
        assert model.manifest == side.manifest
        assert model.load(WHOLE, "cpu").span == WHOLE
        assert list((store.folder / "blobs").iterdir()) == []
    assert side.hub.weight_ranges() == {}


@pytest.mark.parametrize("damage", ["lacks", "altered", "cut short"])
def test_what_it_has_in_part_damaged_or_otherwise_than_the_swarm_is_fetched(
    side: HubSide, damage: str
) -> None:
    snapshot = Path(snapshot_download(MODEL))
    weights = (snapshot / "model.safetensors").resolve()
    if damage == "altered":
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (snapshot / "model.safetensors").unlink()
    with side.store() as store:
        model = opened(side, store, serving(side.manifest.content_hash))
        assert model.hub is not None
        assert model.manifest == side.manifest
        assert model.load(Span(1, 2), "cpu").span == Span(1, 2)
