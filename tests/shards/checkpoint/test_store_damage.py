"""Files that are missing, damaged or made up are refused in one sentence."""

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models.stored_models import copy_of, edit, write_llama, write_model
from support.properties import examples

from molink.shards.checkpoint.dimensions import dimensions
from molink.shards.checkpoint.store import (
    StoreError,
    read_manifest,
)
from molink.shards.checkpoint.stored_quantization import UnsupportedStorage, stored_quantization


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: `copy_of` gives one that may."""
    return write_llama(tmp_path_factory.mktemp("store") / "llama")


def _header(entries: dict[str, object], data: bytes = b"") -> bytes:
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


DAMAGED = {
    "empty": b"",
    "a few bytes": b"\1\2\3",
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a header of 2**63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{x",
    "a list": struct.pack("<Q", 2) + b"[]",
    "nested without end": struct.pack("<Q", 10**5) + b"[" * 10**5,
    "not UTF-8": struct.pack("<Q", 2) + b"\xff\xff",
    "a truncated tensor": _header({"a": GOOD}, b"1234567"),
    "bytes that nobody claims": _header({"a": GOOD}, b"123456789"),
    "a gap": _header({"a": GOOD | {"data_offsets": [4, 12]}}, b"123456789012"),
    "an overlap": _header({"a": GOOD, "b": GOOD}, b"12345678"),
    "an unknown dtype": _header({"a": GOOD | {"dtype": "F31"}}, b"12345678"),
    "a dtype that is a list": _header({"a": GOOD | {"dtype": ["F32"]}}, b"12345678"),
    "a negative size": _header({"a": GOOD | {"shape": [-2]}}, b"12345678"),
    "a fractional size": _header({"a": GOOD | {"shape": [2.0]}}, b"12345678"),
    "an absurd size": _header({"a": GOOD | {"shape": [2**62, 2**62]}}, b"12345678"),
    "nine dimensions": _header({"a": GOOD | {"shape": [1] * 8 + [2]}}, b"12345678"),
    "a wrong length": _header({"a": GOOD | {"shape": [3]}}, b"12345678"),
    "no offsets": _header({"a": {"dtype": "F32", "shape": [2]}}, b"12345678"),
    "a tensor that is a number": _header({"a": 1}),
    "a name twice": struct.pack("<Q", 15) + b'{"a":{},"a":{}}',
    "not a number": struct.pack("<Q", 9) + b'{"a":NaN}',
    "no layers": _header({"lm_head.weight": GOOD}, b"12345678"),
    "a layer without those before it": _header({"model.layers.2.a": GOOD}, b"12345678"),
    "99999 layers": _header({"model.layers.99998.a": GOOD}, b"12345678"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_weights_are_refused_in_one_sentence(what: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(DAMAGED[what])

    with pytest.raises(StoreError) as raised:
        read_manifest(tmp_path)
    assert str(tmp_path) in str(raised.value)


@settings(
    deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.one_of(
        st.binary(max_size=80), st.binary(max_size=60).map(lambda b: struct.pack("<Q", len(b)) + b)
    )
)
def test_arbitrary_bytes_are_never_taken_for_weights(data: bytes, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(data)

    with pytest.raises(StoreError):
        read_manifest(tmp_path)


def test_missing_files_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no config\.json"):
        read_manifest(tmp_path)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(StoreError, match="no weights"):
        read_manifest(tmp_path)


def test_a_missing_shard_and_an_index_that_points_outside_are_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "pieces", max_shard_size="200KB")
    index = folder / "model.safetensors.index.json"
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(StoreError, match=f"lacks 1 of .*{lost.name}"):
        read_manifest(folder)
    for name in ("../other.safetensors", "/etc/passwd", "C:\\x.safetensors", "", "model.bin"):
        edit(index, weight_map={"a": name})
        with pytest.raises(StoreError, match="no file beside it"):
            read_manifest(folder)
    for content in ("{}", "[]", "{", '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(StoreError):
            read_manifest(folder)


def test_a_shard_that_lost_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "pieces", max_shard_size="200KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / index["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard, metadata={"format": "pt"})

    with pytest.raises(StoreError, match=r"model\.norm\.weight"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 1}', '{"a": "' + "x" * 2**20 + '"}']
)
def test_damaged_configurations_are_refused(content: str, llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    (folder / "config.json").write_text(content)

    with pytest.raises(StoreError, match=r"config\.json"):
        read_manifest(folder)


SETTINGS = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
@pytest.mark.parametrize("kinds", [5, [[1]], [3], {"full_attention": 1}, "f"], ids=repr)
def test_kinds_of_layers_that_are_no_names_are_refused(architecture: str, kinds: object) -> None:
    with pytest.raises(StoreError, match=r"config\.json"):
        dimensions({**SETTINGS, "model_type": architecture, "layer_types": kinds})


@pytest.mark.parametrize("width", ["x", [64], -1, 1.5], ids=repr)
def test_a_width_of_embeddings_that_is_no_size_is_refused(width: object) -> None:
    settings = {**SETTINGS, "model_type": "opt", "tie_word_embeddings": True}
    assert dimensions({**settings, "word_embed_proj_dim": 32}).shared_elements == 32 * 100
    with pytest.raises(StoreError, match="word_embed_proj_dim"):
        dimensions({**settings, "word_embed_proj_dim": width})


@pytest.mark.parametrize("architecture", ["opt", "gemma3_text"])
def test_layers_beyond_number_are_refused_before_anything_is_made_for_each(architecture: str) -> None:
    with pytest.raises(StoreError, match="from 1 to 1024"):
        dimensions({**SETTINGS, "model_type": architecture, "num_hidden_layers": 10**30})


@pytest.mark.parametrize("block", [5, "ab", {"a": 1, "b": 2}, [128], ["x", 128]], ids=repr)
def test_blocks_that_are_no_two_sizes_are_refused(block: object) -> None:
    with pytest.raises(UnsupportedStorage, match="blocks"):
        stored_quantization({"quantization_config": {"quant_method": "fp8", "weight_block_size": block}})
