"""A blob is hashed when it comes; later loads read none whole, as long as nobody writes to them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models.circuit_runs import greedy, spec_for
from support.models.hub_models import HubSide
from torch import Tensor

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint import verification
from molink.shards.errors import WeightsError
from molink.shards.loading.lazy_tensors import LoadCounter
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.spec import Span
from molink.shards.store import blob_part, blobs
from molink.shards.store.blobs import BlobStore

WHOLE = Span(0, 6)
UP = "model.layers.3.mlp.up_proj.weight"
Read = Callable[..., Tensor]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read whole, hashed or looked through."""
    done: list[str] = []
    for module, name in ((blob_part, "_read"), (blobs, "hash_file"), (verification, "_entry")):
        original = getattr(module, name)

        def noted(*arguments: object, original: Read = original, name: str = name) -> Tensor:
            done.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(LoadCounter, "inspect", lambda *_: done.append("inspect"))
    return done


def load(side: HubSide, store: BlobStore, *, exact: bool = False) -> Stage:
    weights = side.weights(store)
    with weights.ready(WHOLE, side.manifest, lambda *_: None) as parts:
        return load_stage(
            weights.checkpoint.folder,
            WHOLE,
            StageSettings("float32", exact=exact),
            manifest=side.manifest,
            parts=parts,
            cache=LoadCache(digests=side.folder / "digests"),
        )


def path_of(side: HubSide, store: BlobStore) -> Path:
    with side.weights(store).ready(WHOLE, side.manifest, lambda *_: None) as parts:
        return parts[UP].path


def tokens_of(stage: Stage) -> list[int]:
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    return greedy([(engine, WHOLE)], (5, 9, 200, 31, 7), 6)


@pytest.mark.full
def test_what_was_fetched_is_not_hashed_again_and_a_later_load_reads_no_blob_whole(
    side: HubSide, work: list[str]
) -> None:
    with side.store() as store:
        first = load(side, store)
    assert set(work) == {"inspect"}
    work.clear()
    with side.store() as store:
        later = load(side, store)
    assert work == []
    assert (
        tokens_of(later)
        == tokens_of(first)
        == tokens_of(load_stage(side.model_folder, WHOLE, StageSettings("float32")))
    )


def test_where_steps_are_exact_what_lies_elsewhere_in_its_file_is_copied_and_not_hashed(
    side: HubSide, work: list[str]
) -> None:
    with side.store() as store:
        load(side, store)
        work.clear()
        exact = load(side, store, exact=True)
    starts = {
        remote.tensor.start % blob_part.CACHE_LINE_BYTES
        for remote in side.checkpoint(side.store()).tensors.values()
    }
    assert set(work) == ({"_read"} if starts != {0} else set())
    assert tokens_of(exact) == tokens_of(
        load_stage(side.model_folder, WHOLE, StageSettings("float32", exact=True))
    )


def test_a_blob_that_was_written_to_is_hashed_again_and_refused(side: HubSide) -> None:
    with side.store() as store:
        load(side, store)
        path = path_of(side, store)
        path.write_bytes(b"\1" * path.stat().st_size)
        with pytest.raises(WeightsError, match="layer 3"):
            load(side, store)
        assert side.weights(store).drop_damaged(WHOLE, side.manifest)
        load(side, store)


def test_a_store_of_which_nothing_is_remembered_is_hashed_once(side: HubSide, work: list[str]) -> None:
    with side.store() as store:
        load(side, store)
        for note in (store.folder / "notes" / "verified").iterdir():
            note.write_bytes(b"[]")
        work.clear()
        load(side, store)
        assert {"_read", "_entry"} <= set(work)
        work.clear()
        load(side, store)
        assert work == []


def test_what_is_removed_is_forgotten(side: HubSide) -> None:
    with side.store() as store:
        load(side, store)
        path = path_of(side, store)
    with BlobStore(store.folder, limit_bytes=0) as full, full.using() as in_use:
        with pytest.raises(blobs.StoreFull):
            full.reserve({full.unfinished("more"): 1}, in_use)
        assert path.exists()
    size = sum(one.stat().st_size for one in (store.folder / "blobs").glob("*/*"))
    with BlobStore(store.folder, limit_bytes=size) as full, full.using() as in_use:
        full.reserve({full.unfinished("more"): size}, in_use)
        assert not path.exists()
    assert list((store.folder / "notes" / "verified").iterdir()) == []
