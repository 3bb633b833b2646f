"""Models with code of their own are served by classes of transformers, and compute what their descriptions say."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.circuit_runs import Circuit, engine_with, start_run, step_runs
from support.models.reference_models import REFERENCE_MODELS
from support.models.stored_models import edit
from support.models.tiny_models import make_tiny_model

from molink.shards.checkpoint.conversions import conversion_of
from molink.shards.checkpoint.grouping import group_names
from molink.shards.checkpoint.safetensors_header import StoreError, read_header
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TOKENS = 12
PROMPTS = [(5, 9, 2, 31, 7, 7, 50, 44, 3), (1,), (7, 3, 9, 22, 33)]
REFUSED_VARIANTS = [
    ("chatglm (2, 3)", {"multi_query_attention": False}, "multi_query_attention"),
    ("chatglm (2, 3)", {"rmsnorm": False}, "rmsnorm"),
    ("chatglm (2, 3)", {"padded_vocab_size": 65_024, "rope_ratio": 50}, "rope_ratio"),
    ("qwen (1)", {"no_bias": False}, "no_bias"),
    ("qwen (1)", {"kv_channels": 16}, "attention heads"),
    ("deepseek (1, MoE)", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek (1, MoE)", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("baichuan (7B)", {"hidden_size": "wide"}, "hidden_size"),
]


def stored(name: str, folder: Path) -> Path:
    model = REFERENCE_MODELS[name]
    return model.save(folder / "model", model.weights())


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_parts_of_a_converted_model_compute_what_its_description_says(name: str, tmp_path: Path) -> None:
    model, folder = REFERENCE_MODELS[name], stored(name, tmp_path)
    circuit: Circuit = [
        (engine_with(folder, (start, stop)), Span(start, stop)) for start, stop in ((0, 1), (1, 3), (3, 4))
    ]
    runs = [start_run(circuit, prompt, TOKENS, chunk=4) for prompt in PROMPTS]
    while any(len(run.tokens) < TOKENS for run in runs):
        step_runs(circuit, [run for run in runs if len(run.tokens) < TOKENS])
    for run in runs:
        expected = model.logits(model.weights(), [*run.prompt, *run.tokens[:-1]])[len(run.prompt) - 1 :]
        assert run.tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(
            torch.stack(run.logits), expected, rtol=0, atol=float(expected.abs().max()) * 1e-5
        )


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_a_converted_model_is_described_from_its_own_files(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    spec, model = describe(folder), REFERENCE_MODELS[name]
    stage = load_stage(folder, spec.whole, StageSettings("float32"))
    assert spec.architecture == model.config["model_type"]
    assert (spec.layers, spec.hidden_size) == (stage.facts.layers, stage.facts.hidden_size)
    assert (spec.vocabulary_size, spec.context_length) == (
        stage.facts.vocabulary_size,
        stage.facts.context_length,
    )
    assert spec.kv_bytes_per_token == tuple(
        stage.layouts[layer].bytes_per_token for layer in range(spec.layers)
    )
    gates = (spec.layers - 1) * spec.hidden_size * 4 if "deepseek" in name else 0
    assert stage.weight_bytes == spec.weight_bytes(spec.whole) + gates


def test_qwen_goes_no_further_than_its_positions_are_those_of_training(tmp_path: Path) -> None:
    assert describe(stored("qwen (1)", tmp_path)).context_length == 128


def test_the_head_of_chatglm_does_not_count_its_embeddings(tmp_path: Path) -> None:
    names = [tensor.name for tensor in read_header(stored("chatglm (2, 3)", tmp_path) / "model.safetensors")]
    assert set(group_names(names).head) == {
        "transformer.encoder.final_layernorm.weight",
        "transformer.output_layer.weight",
    }


@pytest.mark.parametrize("name", ["chatglm (2, 3)", "deepseek (1, MoE)"])
def test_what_is_converted_is_what_the_manifest_names(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    manifest = read_manifest(folder)
    assert load_stage(folder, Span(1, 3), StageSettings("float32"), manifest=manifest).span == Span(1, 3)
    model = REFERENCE_MODELS[name]
    altered = model.weights()
    changed = next(
        key for key in altered if "layers.2." in key and ("query_key_value.w" in key or "q_proj" in key)
    )
    altered[changed][0, 0] += 1
    model.save(folder, altered)
    with pytest.raises(WeightsError, match="layer 2") as caught:
        load_stage(folder, Span(1, 3), StageSettings("float32"), manifest=manifest)
    assert changed in caught.value.tensors
    assert load_stage(folder, Span(0, 2), StageSettings("float32"), manifest=manifest).span == Span(0, 2)


def test_a_tensor_that_is_missing_is_named_as_transformers_calls_it(tmp_path: Path) -> None:
    model = REFERENCE_MODELS["qwen (1)"]
    weights = model.weights()
    del weights["transformer.h.1.mlp.w2.weight"]
    folder = model.save(tmp_path, weights)
    with pytest.raises(WeightsError) as caught:
        load_stage(folder, Span(1, 2), StageSettings("float32"))
    assert caught.value.tensors == ("model.layers.1.mlp.gate_proj.weight",)


@pytest.mark.parametrize(("name", "changes", "reason"), REFUSED_VARIANTS)
def test_variants_that_compute_something_else_are_refused(
    name: str, changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = stored(name, tmp_path)
    edit(folder / "config.json", **changes)
    with pytest.raises(UnsupportedArchitecture, match=reason):
        load_stage(folder, Span(0, 1), StageSettings("float32"))
    with pytest.raises(StoreError, match=reason):
        describe(folder)


def test_models_that_transformers_knows_are_not_converted(tmp_path: Path) -> None:
    configuration = json.loads((make_tiny_model("gpt2", tmp_path) / "config.json").read_text())
    assert conversion_of(configuration) is None


VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
)


@given(name=st.sampled_from(sorted(REFERENCE_MODELS)), data=st.data())
def test_any_configuration_is_converted_or_refused(name: str, data: st.DataObject) -> None:
    config = REFERENCE_MODELS[name].config
    keys = st.sampled_from(sorted(set(config) - {"model_type"}))
    changes = data.draw(st.dictionaries(keys, VALUES, max_size=3))
    try:
        conversion = conversion_of(config | changes)
    except StoreError:
        return
    assert conversion is not None
    for tensor in REFERENCE_MODELS[name].shapes:
        assert all(
            piece.rows is None or piece.rows[0] <= piece.rows[1] for piece in conversion.pieces(tensor)
        )
