"""What a model costs, read from its files without loading it, against the model loaded by transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.deadline import DEADLINE_S
from support.models.stored_models import copy_of, edit, write_llama, write_model
from support.models.tiny_models import (
    ARCHITECTURES,
    CONTEXT,
    HIDDEN_SIZE,
    LAYERS,
    VOCABULARY,
    load_reference,
)
from transformers import AutoConfig

from molink.shards.checkpoint import dimensions as dimensions_module
from molink.shards.checkpoint.dimensions import dimensions
from molink.shards.checkpoint.store import (
    Manifest,
    StoreError,
    describe,
    layer_of,
    read_manifest,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed: `copy_of` gives one that may."""
    return write_llama(tmp_path_factory.mktemp("store") / "llama")


KINDS = (
    "llama",
    "llama_tied",
    "qwen2",
    "qwen3",
    "gemma2",
    "gpt2",
    "mixtral",
    "falcon",
    "deepseek_v3",
    "opt",
    "bloom",
)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_equal_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = write_model(kind, tmp_path / kind)
    spec = describe(Manifest.from_bytes(read_manifest(folder).to_bytes()))
    model = load_reference(folder)
    layers = [0] * LAYERS
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (index := layer_of(name)) is not None:
            layers[index] += tensor.numel() * 4
    with torch.inference_mode():
        cache = model(torch.arange(3)[None], use_cache=True).past_key_values
    kv = tuple((layer.keys.numel() + layer.values.numel()) * 4 // 3 for layer in cache.layers)

    assert spec.layer_bytes == tuple(layers)
    assert spec.kv_bytes_per_token == kv
    assert (spec.layers, spec.hidden_size, spec.vocabulary_size) == (LAYERS, HIDDEN_SIZE, VOCABULARY)
    assert (spec.dtype, spec.quantization, spec.stop_token_ids) == ("float32", "none", (1,))
    assert spec.context_length == (CONTEXT if kind != "bloom" else 2048)
    table = VOCABULARY * HIDDEN_SIZE * 4
    assert spec.embed_bytes >= table
    assert spec.head_bytes > table  # tied or not, the tail holds the matrix and a norm


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma", "gemma2", "gpt2"]
)
def test_dimensions_read_directly_are_those_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, values = ARCHITECTURES[kind]
    configuration = json.loads(AutoConfig.for_model(model_type, **values).to_json_string())
    directly = dimensions(configuration)
    monkeypatch.setattr(dimensions_module, "_plain_values", lambda _: None)

    assert directly == dimensions(configuration)


def test_common_models_are_described_without_torch_and_transformers(llama: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from molink.shards.checkpoint.store import describe\n"
        "print(describe(Path(sys.argv[1])).layers, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(llama)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.split() == [str(LAYERS), "False", "False"]


@pytest.mark.parametrize(
    ("dtype", "quantization", "shrinks_to"),
    [
        ("float32", "none", 1.0),
        ("bfloat16", "none", 0.5),
        ("float16", "int8", 0.27),
        ("bfloat16", "nf4", 0.142),
    ],
)
def test_layers_shrink_with_dtype_and_quantization_but_embeddings_only_with_dtype(
    llama: Path, dtype: str, quantization: str, shrinks_to: float
) -> None:
    full = describe(llama)
    spec = describe(llama, dtype, quantization)

    assert sum(spec.layer_bytes) == pytest.approx(shrinks_to * sum(full.layer_bytes), rel=0.05)
    assert spec.embed_bytes * (2 if dtype != "float32" else 1) == full.embed_bytes
    assert spec.kv_bytes_per_token[0] * (2 if dtype != "float32" else 1) == full.kv_bytes_per_token[0]
    assert spec.content_hash == full.content_hash
    assert (spec.model_hash == full.model_hash) == (dtype == "float32")


@pytest.mark.parametrize(
    ("configuration", "stated", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "float64"}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
    ],
)
def test_dtype_auto_is_the_configurations_else_that_of_the_numbers(
    configuration: dict[str, object], stated: str, expected: str, llama: Path, tmp_path: Path
) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    edit(folder / "config.json", **configuration)

    assert describe(folder, stated).dtype == expected


def test_dtype_auto_without_configuration_is_that_of_the_stored_numbers(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    edit(folder / "config.json", dtype=None)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    assert describe(folder).dtype == "bfloat16"
    assert sum(describe(folder).layer_bytes) * 2 == sum(describe(llama).layer_bytes)


def test_stop_tokens_may_be_a_list_and_fall_back_to_the_configuration(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    edit(folder / "generation_config.json", eos_token_id=[7, 5, 7])
    assert describe(folder).stop_token_ids == (7, 5)
    (folder / "generation_config.json").unlink()
    assert describe(folder).stop_token_ids == (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 7},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_size": -1},
        {"hidden_size": 1e3},
        {"vocab_size": None},
        {"max_position_embeddings": 10**18},
        {"num_attention_heads": "many"},
        {"model_type": "no-such-architecture"},
        {"model_type": ["llama"]},
        {"model_type": "falcon", "hidden_size": [1]},
        {"eos_token_id": "all"},
    ],
    ids=str,
)
def test_absurd_configurations_are_refused(changes: dict[str, object], llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "llama")
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", **changes)

    with pytest.raises(StoreError):
        describe(folder)
