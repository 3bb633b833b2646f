"""Quantized layers are read and quantized once, and are the same from the store."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import greedy, spec_for
from support.models.hub_models import HubSide
from support.models.stored_models import copy_of, write_model
from support.models.tiny_models import LAYERS
from support.pairwise import usually
from torch import nn

from molink.peer.models.model import LocalModel
from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.loading.lazy_tensors import CountedTensor
from molink.shards.matrices import packed_layers
from molink.shards.matrices.packed_layers import PackedLayers
from molink.shards.matrices.quantize import QuantizedLinear, StreamingQuantizer
from molink.shards.matrices.quantized_matrices import Nf4Matrices
from molink.shards.model.stage import Stage
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore

PROMPT = (5, 9, 200, 31, 7)
WHOLE = Span(0, LAYERS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlobStore]:
    with BlobStore(tmp_path / "store", 2**30) as opened:
        yield opened


def model_of(folder: Path, store: BlobStore, quantization: str = "nf4") -> LocalModel:
    manifest = read_manifest(folder)
    return LocalModel(folder, manifest, describe(manifest, "float32", quantization), store=store)


def tokens_of(stage: Stage) -> list[int]:
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    return greedy([(engine, WHOLE)], PROMPT, 6)


def blobs_of(store: BlobStore) -> list[Path]:
    return sorted((store.folder / "blobs").glob("*/*"))


def unfinished_of(store: BlobStore) -> list[Path]:
    return list((store.folder / "unfinished").iterdir())


@pytest.fixture
def read_layers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors of layers that were read out of a checkpoint."""
    names: list[str] = []
    read = CountedTensor.__getitem__

    def noting(self: CountedTensor, index: object) -> torch.Tensor:
        if "." in self._name and any(part.isdigit() for part in self._name.split(".")):
            names.append(self._name)
        return read(self, index)

    monkeypatch.setattr(CountedTensor, "__getitem__", noting)
    return names


@pytest.mark.parametrize(
    ("kind", "quantization"),
    usually(
        [("llama", "int8"), ("gpt2", "nf4"), ("mixtral", "nf4"), ("deepseek_v3", "int8")],
        [
            *[("llama", "nf4"), ("gpt2", "int8"), ("mixtral", "int8"), ("deepseek_v3", "nf4")],
            *[("qwen2_moe", "int8"), ("qwen2_moe", "nf4")],
        ],
    ),
)
def test_a_layer_from_the_store_is_that_which_was_quantized_bit_for_bit(
    kind: str,
    quantization: str,
    tmp_path: Path,
    store: BlobStore,
    read_layers: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(write_model(kind, tmp_path / kind), store, quantization)
    made = model.load(WHOLE, "cpu")
    assert read_layers
    assert len(blobs_of(store)) == LAYERS
    read_layers.clear()
    monkeypatch.delattr(StreamingQuantizer, "convert")  # nothing is left to quantize
    loaded = model.load(WHOLE, "cpu")
    assert read_layers == []
    assert loaded.weight_bytes == made.weight_bytes
    mine, theirs = list(made.parameters()), list(loaded.parameters())
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert tokens_of(loaded) == tokens_of(made)


def test_a_layer_that_is_packed_again_is_the_same_file(tmp_path: Path, store: BlobStore) -> None:
    packed = PackedLayers(store, model_of(write_model("llama", tmp_path / "llama"), store).spec)
    layer = nn.Sequential(*(QuantizedLinear(Nf4Matrices.of(torch.randn(64, 64)), None) for _ in range(3)))
    for _ in range(12):
        packed.keep(0, layer)
    assert len(blobs_of(store)) == 1


def test_a_move_quantizes_only_what_was_not_held_before(
    tmp_path: Path, store: BlobStore, read_layers: list[str]
) -> None:
    model = model_of(write_model("llama", tmp_path / "llama"), store)
    model.load(Span(0, 3), "cpu")
    read_layers.clear()
    model.load(Span(1, 5), "cpu")
    assert {name.split(".")[2] for name in read_layers} == {"3", "4"}


def test_another_model_quantization_or_dtype_is_not_taken_for_it(
    tmp_path: Path, store: BlobStore, read_layers: list[str]
) -> None:
    folder = write_model("llama", tmp_path / "llama")
    model_of(folder, store, "nf4").load(Span(1, 2), "cpu")
    manifest = read_manifest(folder)
    for other in (describe(manifest, "float32", "int8"), describe(manifest, "bfloat16", "nf4")):
        read_layers.clear()
        LocalModel(folder, manifest, other, store=store).load(Span(1, 2), "cpu")
        assert read_layers
    assert len(blobs_of(store)) == 3


def test_a_damaged_file_is_removed_and_made_anew(
    tmp_path: Path, store: BlobStore, read_layers: list[str]
) -> None:
    model = model_of(write_model("llama", tmp_path / "llama"), store)
    expected = tokens_of(model.load(WHOLE, "cpu"))
    before = blobs_of(store)
    damaged = before[2]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    read_layers.clear()
    assert tokens_of(model.load(WHOLE, "cpu")) == expected
    assert len({name.split(".")[2] for name in read_layers}) == 1
    assert len(blobs_of(store)) == len(before)
    assert not damaged.exists() or damaged.read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"not a safetensors file"])
def test_a_note_that_leads_to_another_file_does_no_harm(
    content: bytes, tmp_path: Path, store: BlobStore
) -> None:
    """Of the right digest, but not such a layer: only whoever may write into the store can have put it there."""
    model = model_of(write_model("llama", tmp_path / "llama"), store)
    expected = tokens_of(model.load(WHOLE, "cpu"))
    other = store.folder / "other"
    other.write_bytes(content)
    sha256 = packed_layers.hash_file(other)
    store.blob(sha256).parent.mkdir(exist_ok=True)
    other.replace(store.blob(sha256))
    (note, *_) = sorted((store.folder / "notes" / "packed").iterdir())
    note.write_text(json.dumps({"sha256": sha256, "bytes": len(content)}))
    assert tokens_of(model.load(WHOLE, "cpu")) == expected
    assert not store.blob(sha256).exists()
    assert json.loads(note.read_text())["sha256"] != sha256


def test_a_load_that_is_interrupted_leaves_nothing(
    tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(write_model("llama", tmp_path / "llama"), store)

    def interrupted(path: Path, *_: object) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packed_layers, "write_aligned", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.load(WHOLE, "cpu")
    assert unfinished_of(store) == []
    assert blobs_of(store) == []
    with PackedLayers(store, model.spec).ready(WHOLE) as held:
        assert not held


def test_what_a_killed_process_has_left_goes_and_what_a_living_one_writes_stays(
    tmp_path: Path, store: BlobStore
) -> None:
    model = model_of(write_model("llama", tmp_path / "llama"), store)
    left, other = store.unfinished("packed-left"), store.unfinished("somebody-elses")
    left.write_bytes(b"half of it")
    other.write_bytes(b"half of it")
    living = store.unfinished("packed-living")
    with BlobStore(store.folder, 2**30) as neighbour, neighbour.using() as in_use:
        neighbour.reserve({living: 10}, in_use)
        model.load(Span(1, 2), "cpu")
        assert set(unfinished_of(store)) == {other, living}
    model.load(Span(1, 2), "cpu")
    assert unfinished_of(store) == [other]


def test_packed_layers_are_counted_and_evicted_like_the_stores_other_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model("llama", tmp_path / "llama")
    limit_bytes = 2 * 2**20  # a megabyte is set aside for what a file says of its tensors
    with BlobStore(tmp_path / "store", limit_bytes) as store:
        model = model_of(folder, store)
        expected = tokens_of(model.load(WHOLE, "cpu"))
        assert 0 < sum(path.stat().st_size for path in blobs_of(store)) <= limit_bytes
        assert tokens_of(model.load(WHOLE, "cpu")) == expected
    with BlobStore(tmp_path / "small", 1000) as store:
        assert tokens_of(model_of(folder, store).load(WHOLE, "cpu")) == expected
        assert blobs_of(store) == []
        assert "not kept packed" in caplog.text


def test_of_a_hubs_layers_that_are_held_packed_nothing_is_fetched(side: HubSide, tmp_path: Path) -> None:
    with side.store() as store:
        manifest, weights = side.manifest, side.weights(store)
        spec = describe(manifest, "float32", "nf4")
        model = LocalModel(side.snapshot(), manifest, spec, weights, store=store)
        made = model.load(Span(1, 3), "cpu")
        noted = {
            note.name: json.loads(note.read_text()) for note in (store.folder / "notes/packed").iterdir()
        }
        packed = {store.blob(note["sha256"]) for note in noted.values()}
        for path in set(blobs_of(store)) - packed:
            path.unlink()
        loaded = model.load(Span(1, 3), "cpu")
        assert set(blobs_of(store)) == packed
        mine, theirs = list(made.parameters()), list(loaded.parameters())
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_a_stage_stays_as_it_is_when_its_packed_file_goes(tmp_path: Path, store: BlobStore) -> None:
    folder = copy_of(write_model("llama", tmp_path / "made"), tmp_path / "llama")
    model = model_of(folder, store)
    expected = tokens_of(model.load(WHOLE, "cpu"))
    stage = model.load(WHOLE, "cpu")
    for path in blobs_of(store):
        path.unlink()
    assert tokens_of(stage) == expected
