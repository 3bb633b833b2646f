"""Who founds a swarm with a hub's model reads all of it once, and knows it as those know it who have the files."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S
from support.models.fake_hub import Answer, Asked
from support.models.hub_models import HubSide, hub_side

from molink.shards.hub.hub import HubError
from molink.shards.hub.hub_identity import identify, unread_bytes
from molink.shards.spec import Span
from molink.shards.store.blobs import InUse, hash_file

Seen = list[tuple[int, int]]


def test_a_model_that_was_read_is_the_model_of_the_files(side: HubSide) -> None:
    seen: Seen = []
    with side.store() as store:
        checkpoint = side.checkpoint(store)
        assert unread_bytes(checkpoint, store) == checkpoint.size_bytes
        manifest = identify(checkpoint, store, side.open_client, set(), lambda *it: seen.append(it))
        assert unread_bytes(checkpoint, store) == 0
        assert not list((store.folder / "blobs").iterdir())
    assert manifest == side.manifest
    assert seen[-1] == (checkpoint.size_bytes, checkpoint.size_bytes)


def test_it_is_read_once_and_file_by_file(side: HubSide) -> None:
    last = "model-00004-of-00004.safetensors"
    with side.store() as store:
        checkpoint = side.checkpoint(store)
        side.hub.fault = lambda asked, answer: replace(answer, status=500) if asked.name == last else answer
        with pytest.raises(HubError, match="500"):
            identify(checkpoint, store, side.open_client, set(), lambda *_: None)
    side.hub.fault = None
    side.hub.asked.clear()
    with side.store() as store:
        checkpoint = side.checkpoint(store)
        unread = unread_bytes(checkpoint, store)
        assert identify(checkpoint, store, side.open_client, set(), lambda *_: None) == side.manifest
        read = {asked.name for asked in side.hub.asked if asked.host == "content"}
        assert last in read
        assert unread == sum(len(side.hub.files[name]) for name in read)
        side.hub.asked.clear()
        assert identify(checkpoint, store, side.open_client, set(), lambda *_: None) == side.manifest
        assert side.hub.asked == []


def test_what_the_founder_holds_is_kept_on_the_way(side: HubSide) -> None:
    span = Span(0, 2)
    with side.store() as store:
        checkpoint = side.checkpoint(store)
        identify(checkpoint, store, side.open_client, checkpoint.names_of(span), lambda *_: None)
        side.hub.weight_ranges()
        assert side.fetch(store, span).keys() == checkpoint.names_of(span)
        assert side.hub.weight_ranges() == {}
        side.fetch(store, Span(0, 3))
        assert side.hub.weight_ranges() != {}


def test_without_room_nothing_is_kept_and_the_model_is_known_all_the_same(side: HubSide) -> None:
    with side.store(limit_bytes=1000) as store:
        checkpoint = side.checkpoint(store)
        kept = set(checkpoint.tensors)
        assert identify(checkpoint, store, side.open_client, kept, lambda *_: None) == side.manifest
        assert not list((store.folder / "blobs").iterdir())


@pytest.mark.parametrize(("times", "good"), [(1, True), (100, False)])
def test_a_file_that_is_not_what_its_hash_says_is_read_again_and_then_refused(
    side: HubSide, times: int, good: bool
) -> None:
    left = [times]

    def flip(asked: Asked, answer: Answer) -> Answer:
        if asked.stop < 100_000 or left[0] <= 0:
            return answer
        left[0] -= 1
        return replace(answer, body=answer.body[:-1] + bytes([answer.body[-1] ^ 1]))

    with side.store() as store:
        checkpoint = side.checkpoint(store)
        side.hub.fault = flip
        if good:
            assert identify(checkpoint, store, side.open_client, set(), lambda *_: None) == side.manifest
        else:
            with pytest.raises(HubError, match="damaged: what the hub sends is not what its hash says"):
                identify(checkpoint, store, side.open_client, set(), lambda *_: None)


def test_a_founder_that_is_slower_than_another_with_the_same_store_knows_the_model_too(side: HubSide) -> None:
    begun, other_done = threading.Event(), threading.Event()

    def wait(*_: int) -> None:
        begun.set()
        assert other_done.wait(DEADLINE_S)

    with side.store() as slow, side.store() as fast, ThreadPoolExecutor(1) as pool:
        checkpoint = side.checkpoint(slow)
        names = checkpoint.names_of(Span(0, 4))
        try:
            slower = pool.submit(identify, checkpoint, slow, side.open_client, names, wait)
            assert begun.wait(DEADLINE_S)
            assert (
                identify(side.checkpoint(fast), fast, side.open_client, names, lambda *_: None)
                == side.manifest
            )
        finally:
            other_done.set()
        assert slower.result(60) == side.manifest
        assert not list((slow.folder / "unfinished").iterdir())


def test_what_damaged_bytes_another_founder_gets_none_is_remembered_as_hashed(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(_: Asked, answer: Answer) -> Answer:
        middle = len(answer.body) // 2
        body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
        return replace(answer, body=body)

    with (
        hub_side(side.model_folder, side.folder) as damaging,
        side.store() as good,
        side.store() as bad,
    ):
        checkpoint, other = side.checkpoint(good), damaging.checkpoint(bad)
        damaging.hub.fault = damage
        names = checkpoint.names_of(Span(0, 4))
        adopt, one_by_one = good.adopt, threading.Lock()

        def adopt_after_the_other(arrived: dict[Path, str], in_use: InUse) -> None:
            with one_by_one:
                with pytest.raises(HubError, match="damaged"):
                    identify(other, bad, damaging.open_client, names, lambda *_: None)
                adopt(arrived, in_use)

        monkeypatch.setattr(good, "adopt", adopt_after_the_other)
        assert identify(checkpoint, good, side.open_client, names, lambda *_: None) == side.manifest
        kept = list((good.folder / "blobs").glob("*/*"))
        assert kept
        assert [path.name for path in kept] == [hash_file(path) for path in kept]


def test_what_a_killed_founder_has_left_makes_way(side: HubSide) -> None:
    with side.store() as store:
        checkpoint = side.checkpoint(store)
        left = store.unfinished(f"{checkpoint.files[0].content_id}-read-0-100-left")
        left.write_bytes(bytes(100))
        identify(checkpoint, store, side.open_client, checkpoint.names_of(Span(0, 1)), lambda *_: None)
        assert not left.exists()


def test_a_manifest_of_other_shapes_does_not_fit(side: HubSide) -> None:
    with side.store() as store:
        checkpoint = side.checkpoint(store)
    own = side.manifest
    assert checkpoint.fits(own)
    other_digest = own.head.model_copy(update={"sha256": "0" * 64})
    assert checkpoint.fits(own.model_copy(update={"head": other_digest}))
    for change in (
        {"head": own.head.model_copy(update={"matrix_rows": 1})},
        {"layers": own.layers[:-1]},
        {"configuration": {**own.configuration, "rope_theta": 1.0}},
        {"files": {**own.files, "tokenizer.json": "0" * 64}},
    ):
        assert not checkpoint.fits(own.model_copy(update=change))
