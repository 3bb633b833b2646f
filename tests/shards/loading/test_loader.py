"""A stage reads its own tensors and no others, and says clearly why it cannot be loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.circuit_runs import engine_with, greedy
from support.models.tiny_models import HIDDEN_SIZE, VOCABULARY, make_tiny_model

from molink.peer.compute.backend import DeviceBackend
from molink.peer.models.model import LocalModel
from molink.shards.batching.engine import Engine
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

PROMPT = (5, 9, 200, 31, 7)


@pytest.fixture
def editable(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of the llama that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


KINDS = {
    "llama": False, "llama_tied": True, "qwen3": False, "gemma2": False, "gpt2": True, "cohere": False, "opt": False,
}  # fmt: skip
"""Kinds of models; those that are quantized in every run: with tied embeddings, and transposed."""


def stored_bytes(folder: Path, *parts: str) -> int:
    tensors = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for name, tensor in tensors.items() if any(part in name for part in parts))


def test_a_stage_holds_its_layers_and_nothing_else(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    layers = [stored_bytes(folder, f"layers.{layer}.") for layer in range(6)]
    embedding, norm = stored_bytes(folder, "embed_tokens"), stored_bytes(folder, "model.norm")
    head = stored_bytes(folder, "lm_head")
    expected = {
        Span(0, 2): sum(layers[:2]) + embedding,
        Span(2, 4): sum(layers[2:4]),
        Span(4, 6): sum(layers[4:]) + norm + head,
        Span(0, 6): sum(layers) + embedding + norm + head,
    }
    for span, size in expected.items():
        assert load_stage(folder, span, StageSettings("float32")).weight_bytes == size, span
    assert load_stage(folder, Span(2, 4), StageSettings("bfloat16")).weight_bytes == expected[Span(2, 4)] // 2


def test_tied_embeddings_are_held_by_both_ends_and_once_where_they_meet(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama_tied")
    layers = [stored_bytes(folder, f"layers.{layer}.") for layer in range(6)]
    embedding, norm = stored_bytes(folder, "embed_tokens"), stored_bytes(folder, "model.norm")
    assert load_stage(folder, Span(0, 1), StageSettings("float32")).weight_bytes == layers[0] + embedding
    assert load_stage(folder, Span(1, 5), StageSettings("float32")).weight_bytes == sum(layers[1:5])
    assert (
        load_stage(folder, Span(5, 6), StageSettings("float32")).weight_bytes == layers[5] + norm + embedding
    )
    assert (
        load_stage(folder, Span(0, 6), StageSettings("float32")).weight_bytes
        == sum(layers) + norm + embedding
    )


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        pytest.param(kind, quantization, marks=() if quick or quantization == "none" else pytest.mark.full)
        for kind, quick in KINDS.items()
        for quantization in ("none", "int8", "nf4")
    ],
)
def test_what_is_announced_of_any_spans_is_what_they_hold_together(
    tiny_model: TinyModel, kind: str, quantization: str
) -> None:
    folder = tiny_model(kind)
    spec = describe(folder, "float32", quantization)
    assert (spec.shared_bytes == VOCABULARY * HIDDEN_SIZE * 4) == (kind not in ("llama", "opt"))
    for spans in (((0, 6),), ((0, 2),), ((4, 6),), ((2, 4),), ((0, 2), (4, 6)), ((5, 6), (0, 5))):
        held = tuple(Span(*span) for span in spans)
        engine = Engine(spec, "cpu")
        for span in held:
            engine.attach(load_stage(folder, span, StageSettings("float32", quantization)))
        assert engine.weight_bytes == pytest.approx(spec.held_bytes(held), rel=0.01), spans


@pytest.mark.parametrize("kind", ["llama_tied", "gemma2", "gpt2"])
def test_ends_that_were_loaded_apart_share_the_embedding_and_compute_the_same(
    tiny_model: TinyModel, kind: str
) -> None:
    folder = tiny_model(kind)
    whole = engine_with(folder, (0, 6))
    expected = greedy([(whole, Span(0, 6))], PROMPT, 8)
    apart = engine_with(folder, (4, 6), (0, 2), (2, 4))
    assert apart.weight_bytes == whole.weight_bytes
    assert greedy([(apart, Span(0, 6))], PROMPT, 8) == expected
    before = apart.weight_bytes
    apart.detach(Span(0, 2))
    assert apart.weight_bytes < before
    apart.attach(load_stage(folder, Span(0, 2), StageSettings("float32")))
    whole.detach(Span(2, 4))
    whole.attach(load_stage(folder, Span(2, 4), StageSettings("float32")))
    assert apart.weight_bytes == whole.weight_bytes == before
    assert greedy([(apart, Span(0, 3)), (whole, Span(3, 6))], PROMPT, 8) == expected


def test_a_checkpoint_without_the_other_layers_loads(editable: Path) -> None:
    whole = engine_with(editable, (0, 6))
    expected = greedy([(whole, Span(0, 6))], PROMPT, 8)
    parts = []
    for start, stop in ((0, 3), (3, 6)):
        folder = Path(shutil.copytree(editable, editable.parent / f"part-{start}"))
        kept = [f"layers.{layer}." for layer in range(start, stop)]
        kept += ["embed_tokens"] if start == 0 else ["model.norm", "lm_head"]
        rewrite(folder, lambda tensors, k=kept: {n: t for n, t in tensors.items() if any(p in n for p in k)})
        parts.append(engine_with(folder, (start, stop)))
    assert greedy([(parts[0], Span(0, 3)), (parts[1], Span(3, 6))], PROMPT, 8) == expected


def test_files_that_only_hold_other_layers_may_be_absent_or_broken(tmp_path: Path) -> None:
    folder = make_tiny_model("mixtral", tmp_path, max_shard_size="300KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    expected = greedy([(engine_with(folder, (0, 6)), Span(0, 6))], PROMPT, 8)
    needed = {file for name, file in index.items() if "layers.0." in name or "layers.1." in name}
    needed |= {file for name, file in index.items() if "embed_tokens" in name}
    rest = [load_stage(folder, Span(2, 6), StageSettings("float32"))]
    others = sorted(set(index.values()) - needed)
    assert len(others) >= 2
    (folder / others[0]).unlink()
    (folder / others[1]).write_bytes(b"not safetensors")
    engine = engine_with(folder, (0, 2))
    engine.attach(rest[0])
    assert greedy([(engine, Span(0, 6))], PROMPT, 8) == expected
    with pytest.raises(WeightsError, match=others[1]) as caught:
        load_stage(folder, Span(2, 6), StageSettings("float32"))
    assert caught.value.folder == folder
    assert caught.value.tensors


@pytest.mark.parametrize(
    ("architecture", "tensor", "span", "named"),
    [
        ("llama", "model.layers.3.mlp.up_proj.weight", Span(3, 6), "model.layers.3.mlp.up_proj.weight"),
        ("llama", "model.norm.weight", Span(3, 6), "model.norm.weight"),
        ("llama", "model.embed_tokens.weight", Span(0, 1), "model.embed_tokens.weight"),
        ("gpt_neox", "embed_out.weight", Span(5, 6), "lm_head.weight"),
        (
            "mixtral",
            "model.layers.2.block_sparse_moe.experts.1.w2.weight",
            Span(2, 3),
            "model.layers.2.mlp.experts.down_proj",
        ),
    ],
)
def test_a_missing_tensor_is_refused_and_named_as_the_model_calls_it(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, tensor: str, span: Span, named: str
) -> None:
    folder = Path(shutil.copytree(tiny_model(architecture), tmp_path / architecture))
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != tensor})
    with pytest.raises(WeightsError) as caught:
        load_stage(folder, span, StageSettings("float32"))
    assert caught.value.folder == folder
    assert caught.value.tensors == (named,)
    assert named in str(caught.value)


def test_a_stage_neither_changes_nor_crashes_when_its_file_does(editable: Path) -> None:
    engine = engine_with(editable, (0, 6))
    expected = greedy([(engine, Span(0, 6))], PROMPT, 8)
    path = editable / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert greedy([(engine, Span(0, 6))], PROMPT, 8) == expected
    path.write_bytes(b"")
    assert greedy([(engine, Span(0, 6))], PROMPT, 8) == expected


def test_tensors_of_other_shapes_are_refused_and_named(editable: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(editable, lambda tensors: tensors | {name: tensors[name][:-1].contiguous()})
    with pytest.raises(WeightsError, match="shapes") as caught:
        load_stage(editable, Span(0, 2), StageSettings("float32"))
    assert caught.value.tensors == (name,)
    assert load_stage(editable, Span(2, 6), StageSettings("float32")).span == Span(2, 6)


def test_tied_weights_that_are_missing_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("llama_tied"), tmp_path / "tied"))
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if "embed_tokens" not in n})
    with pytest.raises(WeightsError, match="embed_tokens"):
        load_stage(folder, Span(5, 6), StageSettings("float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_single_weight_that_is_not_a_number_is_refused_and_named(
    editable: Path, name: str, dtype: str
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[name][-1, -1] = torch.nan
        return tensors

    rewrite(editable, spoil)
    with pytest.raises(WeightsError, match="not a number") as caught:
        load_stage(editable, Span(0, 2), StageSettings(dtype))
    assert caught.value.tensors == (name,)
    assert load_stage(editable, Span(2, 6), StageSettings(dtype)).span == Span(2, 6)


def test_weights_that_compute_what_is_not_a_number_are_refused(editable: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(editable, lambda tensors: tensors | {name: torch.full_like(tensors[name], torch.inf)})
    with pytest.raises(WeightsError, match="not numbers"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


NOTHING_THERE = "model.layers.1.mlp.up_proj.weight"


def _without(folder: Path) -> None:
    rewrite(folder, lambda tensors: {name: it for name, it in tensors.items() if name != NOTHING_THERE})


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def _misplaced(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {NOTHING_THERE: "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _not_numbers(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {NOTHING_THERE: tensors[NOTHING_THERE] * torch.nan})


def _misshapen(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors | {NOTHING_THERE: tensors[NOTHING_THERE][1:].contiguous()})


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("damage", [_without, _misshapen, _not_numbers, _cut_short, _misplaced])
def test_of_a_damaged_folder_nothing_is_held_and_when_it_is_mended_it_loads(
    editable: Path, tiny_model: TinyModel, damage: Callable[[Path], None], quantization: str
) -> None:
    manifest = read_manifest(editable)
    backend = DeviceBackend(
        LocalModel(editable, manifest, describe(manifest, "float32", quantization)), "cpu"
    )
    damage(editable)
    with pytest.raises(WeightsError) as caught:
        backend.load(Span(0, 2), lambda *_: None)
    assert caught.value.folder == editable
    assert backend.engine.held == ()
    shutil.rmtree(editable)
    shutil.copytree(tiny_model("llama"), editable)
    backend.load(Span(0, 2), lambda *_: None)()
    assert backend.engine.held == (Span(0, 2),)


def test_tensors_beyond_the_model_do_no_harm(editable: Path) -> None:
    expected = greedy([(engine_with(editable, (0, 6)), Span(0, 6))], PROMPT, 8)
    extra = {"model.layers.1.self_attn.extra.weight": torch.full((7,), torch.nan)}
    rewrite(editable, lambda tensors: tensors | extra)
    assert greedy([(engine_with(editable, (0, 6)), Span(0, 6))], PROMPT, 8) == expected
    manifest = read_manifest(editable)
    assert load_stage(editable, Span(0, 6), StageSettings("float32"), manifest=manifest).span == Span(0, 6)


@pytest.mark.parametrize("size", [0, 7, 500, 100_000])
def test_truncated_files_are_refused(editable: Path, size: int) -> None:
    path = editable / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError, match="truncated or altered"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


def test_folders_without_weights_or_configuration_are_refused(editable: Path) -> None:
    (editable / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="no safetensors"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))
    (editable / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="config"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))
    (editable / "config.json").unlink()
    with pytest.raises(WeightsError, match="config"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_a_broken_index_is_refused(editable: Path, index: str) -> None:
    (editable / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match="index"):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"pad_token_id": 10**12},
        {"intermediate_size": -1},
        {"rope_parameters": [1]},
        {"model_type": 7},
    ],
)
def test_configurations_that_make_no_sense_are_refused(editable: Path, changes: dict[str, object]) -> None:
    reconfigure(editable, **changes)
    with pytest.raises(WeightsError):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "quip"}}, "stored quantized as 'quip'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "only 2, 4 and 8 bits"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "in version gemv"),
    ],
)
def test_kinds_of_models_that_cannot_be_served_are_refused_with_the_reason(
    editable: Path, changes: dict[str, object], reason: str
) -> None:
    reconfigure(editable, **changes)
    with pytest.raises(UnsupportedArchitecture, match=reason):
        load_stage(editable, Span(0, 2), StageSettings("float32"))


def test_code_in_the_folder_is_never_run(editable: Path) -> None:
    trace = editable / "ran"
    (editable / "modeling_evil.py").write_text(f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n")
    reconfigure(
        editable,
        model_type="evil",
        auto_map={"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"},
    )
    with pytest.raises(WeightsError):
        load_stage(editable, Span(0, 2), StageSettings("float32"))
    assert not trace.exists()


def test_spans_beyond_the_model_and_unknown_dtypes_are_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"6 layers.*\[5, 7\)"):
        load_stage(tiny_model("llama"), Span(5, 7), StageSettings("float32"))
    with pytest.raises(ValueError, match="float8"):
        load_stage(tiny_model("llama"), Span(0, 2), StageSettings("float8"))


def test_loading_is_quiet_and_leaves_nothing_behind(
    editable: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    before = sorted(editable.iterdir())
    load_stage(editable, Span(1, 3), StageSettings("bfloat16"))
    rewrite(editable, lambda tensors: {n: t for n, t in tensors.items() if "layers.1." not in n})
    with pytest.raises(WeightsError):
        load_stage(editable, Span(1, 3), StageSettings("float32"))
    assert capfd.readouterr() == ("", "")
    assert sorted(editable.iterdir()) == before
    assert not list(scratch.iterdir())


def test_progress_grows_to_the_bytes_of_the_stage(tiny_model: TinyModel) -> None:
    seen: list[tuple[int, int]] = []
    stage = load_stage(
        tiny_model("mixtral"),
        Span(4, 6),
        StageSettings("bfloat16"),
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert len(seen) > 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {stage.weight_bytes}
    assert seen[-1] == (stage.weight_bytes, stage.weight_bytes)
