"""Of a hub's model exactly the tensors of one's own layers are fetched, each once, and are what the swarm serves."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.models.circuit_runs import greedy
from support.models.hub_models import HubSide, hub_side
from support.models.stored_models import write_llama

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.safetensors_header import read_header
from molink.shards.checkpoint.store import describe
from molink.shards.errors import WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore


def ranges_of(folder: Path, *parts: str) -> dict[str, list[tuple[int, int]]]:
    """Where the tensors lie whose names hold one of `parts`, neighbours joined."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in read_header(path):
            if any(part in tensor.name for part in parts):
                own = ranges.setdefault(path.name, [])
                if own and own[-1][1] == tensor.start:
                    own[-1] = (own[-1][0], tensor.stop)
                else:
                    own.append((tensor.start, tensor.stop))
    return ranges


def covered(ranges: dict[str, list[tuple[int, int]]]) -> set[tuple[str, int]]:
    return {(name, at) for name, own in ranges.items() for start, stop in own for at in range(start, stop)}


def stored(folder: Path) -> dict[str, bytes]:
    return {
        tensor.name: path.read_bytes()[tensor.start : tensor.stop]
        for path in folder.glob("*.safetensors")
        for tensor in read_header(path)
    }


def test_only_the_ranges_of_the_span_are_fetched_and_a_longer_span_adds_the_difference(side: HubSide) -> None:
    everything = stored(side.model_folder)
    with side.store() as store:
        side.checkpoint(store)
        side.hub.weight_ranges()
        first = side.fetch(store, Span(1, 3))
        assert covered(side.hub.weight_ranges()) == covered(
            ranges_of(side.model_folder, "layers.1.", "layers.2.")
        )
        longer = side.fetch(store, Span(1, 4))
        assert covered(side.hub.weight_ranges()) == covered(ranges_of(side.model_folder, "layers.3."))
        again = side.fetch(store, Span(2, 4))
        assert side.hub.weight_ranges() == {}
    assert first == {
        name: it for name, it in everything.items() if "layers.1." in name or "layers.2." in name
    }
    assert longer.keys() - first.keys() == {name for name in everything if "layers.3." in name}
    assert again.items() <= longer.items()


def test_the_ends_come_with_embedding_and_head(side: HubSide) -> None:
    with side.store() as store:
        front, back = side.fetch(store, Span(0, 1)), side.fetch(store, Span(5, 6))
    assert "model.embed_tokens.weight" in front
    assert {"model.norm.weight", "lm_head.weight"} <= back.keys()
    assert not front.keys() & back.keys()


def test_tied_embeddings_are_fetched_once_for_both_ends(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "tied", "llama_tied")
    with hub_side(folder, tmp_path) as side, side.store() as store:
        side.fetch(store, Span(0, 1))
        before = covered(side.hub.weight_ranges())
        tail = side.fetch(store, Span(5, 6))
        after = covered(side.hub.weight_ranges())
    assert "model.embed_tokens.weight" in tail
    assert not after & covered(ranges_of(folder, "embed_tokens"))
    assert before >= covered(ranges_of(folder, "embed_tokens", "layers.0."))


def test_a_stage_out_of_the_store_holds_the_same_numbers_as_one_out_of_the_folder(side: HubSide) -> None:
    span = Span(4, 6)
    with side.store() as store:
        weights = side.weights(store)
        with weights.ready(span, side.manifest, lambda *_: None) as parts:
            stage = load_stage(
                weights.checkpoint.folder, span, StageSettings("float32"), manifest=side.manifest, parts=parts
            )
    local = load_stage(side.model_folder, span, StageSettings("float32"))
    assert stage.weight_bytes == local.weight_bytes
    expected = {
        name: it for path in side.model_folder.glob("*.safetensors") for name, it in load_file(path).items()
    }
    ours, theirs = stage.model.state_dict(), local.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert all(ours[name].equal(expected[name]) for name in ours if name in expected)
    engine = Engine(describe(side.manifest, "float32"), "cpu")
    engine.attach(stage)
    assert engine.held == (span,)


def test_everything_of_one_load_is_asked_at_one_commit_and_the_token_stays_with_the_hub(
    side: HubSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_for_the_hub_alone")
    side.hub.token = os.environ["HF_TOKEN"]
    caplog.set_level("DEBUG")
    with side.store() as store:
        side.fetch(store, Span(0, 2))
    at_hub = [asked for asked in side.hub.asked if asked.host == "hub"]
    elsewhere = [asked for asked in side.hub.asked if asked.host == "content"]
    assert at_hub
    assert elsewhere
    assert all(f"/{side.checkpoint_commit}/" in f"{asked.path}/" for asked in at_hub)
    assert {asked.authorization for asked in at_hub} == {"Bearer hf_for_the_hub_alone"}
    assert {asked.authorization for asked in elsewhere} == {None}
    assert "hf_for_the_hub_alone" not in caplog.text


def test_what_is_held_is_found_again_without_the_hub(side: HubSide) -> None:
    with side.store() as store:
        first = side.fetch(store, Span(2, 4))
    side.hub.asked.clear()
    with side.store() as store:
        assert side.fetch(store, Span(2, 4)) == first
    assert side.hub.asked == []


def test_offline_what_is_held_serves_and_what_is_not_is_one_clear_error(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    with side.store() as store:
        first = side.fetch(store, Span(2, 4))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert side.fetch(store, Span(2, 4)) == first
        with pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):
            side.fetch(store, Span(2, 5))


def test_a_span_that_does_not_fit_into_the_store_is_refused_before_it_is_fetched(side: HubSide) -> None:
    with side.store(limit_bytes=100_000) as store:
        side.checkpoint(store)
        side.hub.weight_ranges()
        with pytest.raises(WeightsError, match=r"do not fit into .*--store-size"):
            side.fetch(store, Span(1, 2))
        assert side.hub.weight_ranges() == {}


def test_peers_of_one_user_that_want_the_same_layers_at_once_fetch_them_once(side: HubSide) -> None:
    def one(_: int) -> dict[str, bytes]:
        with side.store() as store:
            return side.fetch(store, Span(1, 4))

    with side.store() as store:
        side.checkpoint(store)
    side.hub.weight_ranges()
    with ThreadPoolExecutor(3) as pool:
        first, *others = pool.map(one, range(3))
    ranges = [(name, *own) for name, all_ in side.hub.weight_ranges().items() for own in all_]
    assert others == [first, first]
    assert len(ranges) == len(set(ranges))
    assert sum(stop - start for _, start, stop in ranges) == sum(map(len, first.values()))


def test_progress_counts_the_bytes_that_are_fetched(side: HubSide) -> None:
    seen: list[tuple[int, int]] = []
    with side.store() as store:
        weights = side.weights(store)
        with weights.ready(Span(1, 2), side.manifest, lambda *it: seen.append(it)) as parts:
            size = sum(part.path.stat().st_size for part in parts.values())
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {size}
    assert seen[-1] == (size, size)


@pytest.mark.full
def test_loaded_layers_need_their_blobs_no_more_and_fetch_them_again_if_they_are_loaded_again(
    side: HubSide,
) -> None:
    def load(engine: Engine, store: BlobStore, span: Span) -> None:
        with side.weights(store).ready(span, side.manifest, lambda *_: None) as parts:
            stage = load_stage(
                side.snapshot(), span, StageSettings("float32"), manifest=side.manifest, parts=parts
            )
        engine.attach(stage)

    spec = describe(side.manifest, "float32")
    room_bytes = 2 * max(spec.layer_bytes) + spec.embed_bytes
    whole = Engine(spec, "cpu")
    whole.attach(load_stage(side.model_folder, spec.whole, StageSettings("float32")))
    expected = greedy([(whole, spec.whole)], (5, 9, 200), 6)
    engine = Engine(spec, "cpu")
    with side.store(limit_bytes=room_bytes) as store:
        for layer in range(spec.layers):  # each layer puts out those before it
            load(engine, store, Span(layer, layer + 1))
        side.hub.weight_ranges()
        assert greedy([(engine, spec.whole)], (5, 9, 200), 6) == expected
        engine.detach(Span(1, 2))
        load(engine, store, Span(1, 2))
        assert side.hub.weight_ranges()
        assert greedy([(engine, spec.whole)], (5, 9, 200), 6) == expected


@pytest.mark.parametrize("damage", [b"", b"\0" * 64], ids=["cut short", "altered"])
def test_a_blob_that_the_disk_has_spoiled_is_fetched_again(side: HubSide, damage: bytes) -> None:
    with side.store() as store:
        weights = side.weights(store)
        with weights.ready(Span(3, 4), side.manifest, lambda *_: None) as parts:
            expected = {name: part.path.read_bytes() for name, part in parts.items()}
            path = parts["model.layers.3.mlp.up_proj.weight"].path
        path.write_bytes(damage + expected["model.layers.3.mlp.up_proj.weight"][64:] if damage else b"")
        assert weights.drop_damaged(Span(3, 4), side.manifest)
        assert side.fetch(store, Span(3, 4)) == expected
        assert not weights.drop_damaged(Span(3, 4), side.manifest)


def test_weights_of_another_model_under_the_same_name_are_refused_layer_by_layer(
    side: HubSide, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(side.model_folder, tmp_path / "changed"))
    name, (start, _) = next(
        (name, own[0]) for name, own in ranges_of(changed, "layers.4.mlp.up_proj").items()
    )
    data = bytearray((changed / name).read_bytes())
    data[start] ^= 1
    side.hub.files[name] = bytes(data)
    with side.store() as store:
        assert side.fetch(store, Span(0, 4))
        with pytest.raises(
            WeightsError, match="layer 4 at the hub are not those of the model that is served"
        ):
            side.fetch(store, Span(3, 6))


def test_the_rate_of_the_hub_is_that_of_the_last_group_that_came_from_it(
    side: HubSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.shards.hub.hub_weights.RATE_BYTES", 10**9)
    with side.store() as store:
        weights = side.weights(store)

        def fetch(span: Span) -> float | None:
            with weights.ready(span, side.manifest, lambda *_: None):
                return weights.bytes_per_s

        assert fetch(Span(1, 2)) is None  # too little to tell
        monkeypatch.setattr("molink.shards.hub.hub_weights.RATE_BYTES", 1)
        assert fetch(Span(1, 2)) is None  # all of it was there
        rate = fetch(Span(2, 3))
        assert rate is not None
        assert rate > 0
