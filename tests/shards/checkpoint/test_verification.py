"""What is loaded is what the manifest names, or nothing is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import engine_with, greedy, spec_for
from support.models.stored_models import alter_a_weight, copy_of, edit
from support.models.tiny_models import ARCHITECTURES, LAYERS
from support.pairwise import usually

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.digests import tensor_digests
from molink.shards.checkpoint.store import read_manifest
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
WHOLE = Span(0, LAYERS)
QUICK = ("llama_tied", "gpt2", "mixtral")
GROUPS = {
    "model.embed_tokens.weight": ("the embeddings", Span(0, 3), Span(3, LAYERS)),
    "model.layers.3.mlp.up_proj.weight": ("layer 3", Span(3, LAYERS), Span(0, 3)),
    "lm_head.weight": ("the head", Span(3, LAYERS), Span(0, 3)),
}


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in ARCHITECTURES]
)
def test_every_kind_of_model_is_recognised_by_its_manifest(kind: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(kind)
    manifest = read_manifest(folder)
    for span in (WHOLE, Span(0, 3), Span(2, 4), Span(3, LAYERS)):
        for dtype in ("float32", "bfloat16"):
            try:
                plain = load_stage(folder, span, StageSettings(dtype))
            except UnsupportedArchitecture:
                continue  # as the loader's own tests say
            verified = load_stage(folder, span, StageSettings(dtype), manifest=manifest)
            weights, expected = (dict(stage.model.named_parameters()) for stage in (verified, plain))
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_verified_stage_gives_the_same_tokens(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    expected = greedy([(engine_with(folder, (0, LAYERS)), WHOLE)], (5, 9, 200, 31, 7), 8)
    stage = load_stage(folder, WHOLE, StageSettings("float32"), manifest=read_manifest(folder))
    engine = Engine(spec_for(stage, "float32"), "cpu")
    engine.attach(stage)
    assert greedy([(engine, WHOLE)], (5, 9, 200, 31, 7), 8) == expected


@pytest.mark.parametrize("tensor", GROUPS)
@pytest.mark.parametrize("dtype", usually(["bfloat16"], ["float32"]))
def test_altered_bytes_are_refused_where_they_are_loaded_and_only_there(
    tensor: str, dtype: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The file keeps its size and its time of modification."""
    folder = copy_of(tiny_model("llama"), tmp_path / "llama")
    manifest = read_manifest(folder)
    alter_a_weight(folder, tensor)
    group, holds, lacks = GROUPS[tensor]
    with pytest.raises(WeightsError, match=f"the weights of {group} are not those of the model") as caught:
        load_stage(folder, holds, StageSettings(dtype), manifest=manifest)
    assert tensor in caught.value.tensors
    assert load_stage(folder, lacks, StageSettings(dtype), manifest=manifest).span == lacks


def test_a_digest_that_was_remembered_wrongly_does_not_let_altered_weights_in(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """As where a file system keeps no time of change, or somebody has written into the cache."""
    folder, cache = copy_of(tiny_model("llama"), tmp_path / "llama"), tmp_path / "cache"
    expected = read_manifest(folder, cache)
    (remembered,) = cache.iterdir()
    content = json.loads(remembered.read_text())
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    stat = (folder / "model.safetensors").stat()
    content["state"] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    remembered.write_text(json.dumps(content))
    assert tensor_digests(folder / "model.safetensors", cache, lambda _: None)
    manifest = read_manifest(folder, cache)
    assert manifest == expected
    with pytest.raises(WeightsError, match="layer 3"):
        load_stage(folder, WHOLE, StageSettings("float32"), manifest=manifest)


def test_an_altered_configuration_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "llama")
    manifest = read_manifest(folder)
    edit(folder / "config.json", rms_norm_eps=1e-2)
    with pytest.raises(WeightsError, match=r"config\.json is not that of the model"):
        load_stage(folder, WHOLE, StageSettings("float32"), manifest=manifest)
