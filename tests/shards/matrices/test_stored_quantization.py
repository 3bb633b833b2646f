"""Checkpoints that arrive quantized hold, once loaded, what their numbers say; packed here number by number."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.stored_models import alter_a_weight, copy_of, edit
from support.models.tiny_models import LAYERS
from support.pairwise import usually
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from molink.shards.checkpoint.store import StoreError, describe, read_manifest
from molink.shards.checkpoint.stored_quantization import UnsupportedStorage, stored_quantization
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
Stored = Callable[[str, str], tuple[Path, Path]]
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of a word belong to, from the lowest."""

Packed = tuple[dict[str, Tensor], Tensor]
"""The tensors of one matrix by their suffix, and the matrix that they stand for."""


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def packed_words(numbers: list[int], bits: int) -> Iterator[int]:
    """Words of 32 bits, the first number in the lowest bits."""
    each = 32 // bits
    for start in range(0, len(numbers), each):
        yield signed(sum(number << (bits * at) for at, number in enumerate(numbers[start : start + each])))


def random_parts(shape: torch.Size, bits: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [inputs, outputs], zero points [groups, outputs] from 1 on, scales [groups, outputs] in float16."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    groups = inputs // GROUP
    numbers = torch.randint(1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (groups, outputs), generator=generator)
    return numbers, zeros, (torch.rand(groups, outputs, generator=generator) * 0.05).half()


def dense(numbers: Tensor, zeros: Tensor, scales: Tensor, groups: list[int]) -> Tensor:
    rows = [(numbers[row] - zeros[group]) * scales[group].float() for row, group in enumerate(groups)]
    return torch.stack(rows).T.contiguous()


def as_awq(shape: torch.Size, seed: int) -> Packed:
    numbers, zeros, scales = random_parts(shape, 4, seed)

    def pack(rows: Tensor) -> Tensor:
        ordered = [
            [row[start + at] for start in range(0, len(row), 8) for at in AWQ_ORDER] for row in rows.tolist()
        ]
        return torch.tensor([list(packed_words(row, 4)) for row in ordered], dtype=torch.int32)

    parts = {"qweight": pack(numbers), "qzeros": pack(zeros), "scales": scales}
    return parts, dense(numbers, zeros, scales, [row // GROUP for row in range(len(numbers))])


def as_gptq(bits: int, *, ordered: bool, offset: int) -> Callable[[torch.Size, int], Packed]:
    """`ordered`: inputs belong to groups in an order of their own. `offset`: what stored zero points lack."""

    def pack(shape: torch.Size, seed: int) -> Packed:
        numbers, zeros, scales = random_parts(shape, bits, seed)
        groups = [row // GROUP for row in range(len(numbers))]
        if ordered:
            groups = groups[::-1]
        columns = [list(packed_words(column, bits)) for column in numbers.T.tolist()]
        zero_words = [list(packed_words(row, bits)) for row in (zeros - offset).tolist()]
        parts = {
            "qweight": torch.tensor(columns, dtype=torch.int32).T.contiguous(),
            "qzeros": torch.tensor(zero_words, dtype=torch.int32),
            "scales": scales,
        }
        if ordered:
            parts["g_idx"] = torch.tensor(groups, dtype=torch.int32)
        return parts, dense(numbers, zeros, scales, groups)

    return pack


def as_fp8(shape: torch.Size, seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0] // GROUP, shape[1] // GROUP, generator=generator) * 0.1
    whole = Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    return {"weight": weight, "weight_scale_inv": scales}, whole


FORMATS: dict[str, tuple[Callable[[torch.Size, int], Packed], dict[str, object]]] = {
    "awq": (as_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq 4 bits": (
        as_gptq(4, ordered=False, offset=1),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    ),
    "gptq 8 bits, ordered": (
        as_gptq(8, ordered=True, offset=1),
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
    ),
    "gptq 2 bits, second format": (
        as_gptq(2, ordered=False, offset=0),
        {"quant_method": "gptq", "bits": 2, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "fp8": (as_fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
}


def packed_and_plain(plain: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Copies of a model, with the matrices of its layers drawn anew: packed, and the plain numbers that these mean."""
    pack, settings = FORMATS[form]
    copies = copy_of(plain, folder / "packed"), copy_of(plain, folder / "plain")
    stored = load_file(plain / "model.safetensors")
    dense_tensors, packed_tensors = dict(stored), dict(stored)
    for seed, (name, tensor) in enumerate(stored.items()):
        if ".layers." in name and tensor.ndim == 2 and ".gate.weight" not in name:
            parts, dense_tensors[name] = pack(tensor.shape, seed)
            del packed_tensors[name]
            base = name.removesuffix("weight")
            packed_tensors |= {f"{base}{suffix}": part for suffix, part in parts.items()}
    for copy, tensors in zip(copies, (packed_tensors, dense_tensors), strict=True):
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    edit(copies[0] / "config.json", quantization_config=settings)
    return copies


@pytest.fixture(scope="module")
def stored(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """As `packed_and_plain` of a kind of model in some form, for tests that change nothing of it."""

    @cache
    def get(kind: str, form: str) -> tuple[Path, Path]:
        return packed_and_plain(tiny_model(kind), tmp_path_factory.mktemp("stored"), form)

    return get


USUAL = (
    ("awq", "llama", "none"),
    ("awq", "mixtral", "nf4"),
    ("gptq 4 bits", "llama", "int8"),
    ("gptq 4 bits", "mixtral", "none"),
    ("gptq 8 bits, ordered", "mixtral", "int8"),
    ("gptq 2 bits, second format", "llama", "nf4"),
    ("fp8", "llama", "none"),
    ("fp8", "mixtral", "int8"),
)
"""Each form, and each pair of a kind and what it is quantized to."""


@pytest.mark.parametrize(
    ("form", "kind", "quantization"),
    usually(USUAL, product(FORMATS, ("llama", "mixtral"), ("none", "int8", "nf4"))),
)
def test_a_packed_checkpoint_loads_as_the_plain_one_that_it_means(
    form: str, kind: str, quantization: str, stored: Stored
) -> None:
    packed, plain = stored(kind, form)
    manifest = read_manifest(packed)
    spec = describe(manifest, "float32", quantization)
    for span in (Span(0, 2), Span(2, LAYERS)):
        stage = load_stage(packed, span, StageSettings("float32", quantization), manifest=manifest)
        expected = load_stage(plain, span, StageSettings("float32", quantization))
        ours, theirs = (dict(one.model.named_parameters()) for one in (stage, expected))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert stage.weight_bytes == pytest.approx(spec.weight_bytes(span), rel=0.01)


MATRIX = "model.layers.3.mlp.up_proj.weight"
BASE = MATRIX.removesuffix("weight")
FP8 = torch.float8_e4m3fn


def one_scale(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


UNREAD: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "fp8 of AutoFP8 and ModelOpt": lambda weight: {
        MATRIX: (weight / one_scale(weight)).to(FP8),
        f"{BASE}weight_scale": one_scale(weight),
        f"{BASE}input_scale": torch.tensor(0.5),
    },
    "fp8 without a scale": lambda weight: {MATRIX: weight.to(FP8)},
    "nvfp4 of ModelOpt": lambda weight: {
        MATRIX: torch.zeros(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8),
        f"{BASE}weight_scale": torch.ones(weight.shape[0], weight.shape[1] // 16).to(FP8),
        f"{BASE}weight_scale_2": torch.tensor(0.5),
    },
    "int8 of bitsandbytes": lambda weight: {
        MATRIX: (weight * 127 / weight.abs().amax(1, keepdim=True)).round().to(torch.int8),
        f"{BASE}SCB": weight.abs().amax(1),
    },
    "nf4 of bitsandbytes": lambda weight: {
        MATRIX: torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        f"{MATRIX}.absmax": torch.ones(weight.numel() // 64),
        f"{MATRIX}.quant_map": torch.zeros(16),
    },
    "int8 of compressed-tensors": lambda weight: {
        MATRIX: weight.to(torch.int8),
        f"{BASE}weight_scale": torch.ones(len(weight), 1),
    },
    "words of compressed-tensors": lambda weight: {
        f"{BASE}weight_packed": torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.int32),
        f"{BASE}weight_scale": torch.ones(weight.shape[0], weight.shape[1] // 32),
        f"{BASE}weight_shape": torch.tensor(weight.shape),
    },
    "gptq": lambda weight: {
        f"{BASE}qweight": torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32),
        f"{BASE}qzeros": torch.zeros(weight.shape[1] // 32, weight.shape[0] // 8, dtype=torch.int32),
        f"{BASE}scales": torch.ones(weight.shape[1] // 32, weight.shape[0]),
    },
    "words of MLX": lambda weight: {
        MATRIX: torch.zeros(weight.shape[0], weight.shape[1] // 8, dtype=torch.uint32),
        f"{BASE}scales": torch.ones(weight.shape[0], weight.shape[1] // 64),
        f"{BASE}biases": torch.ones(weight.shape[0], weight.shape[1] // 64),
    },
}
"""Forms of which nothing in config.json needs to speak, each as what is stored for one matrix."""


def with_tensors(model: Path, folder: Path, removed: str, added: dict[str, Tensor]) -> Path:
    """A copy of a model with other tensors."""
    copy = copy_of(model, folder)
    tensors = load_file(copy / "model.safetensors")
    del tensors[removed]
    save_file(tensors | added, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("method", [None, "fp8"])
@pytest.mark.parametrize("form", UNREAD)
def test_a_matrix_whose_scales_are_not_applied_is_refused(
    form: str, method: str | None, tiny_model: TinyModel, tmp_path: Path
) -> None:
    weight = load_file(tiny_model("llama") / "model.safetensors")[MATRIX]
    folder = with_tensors(tiny_model("llama"), tmp_path / "llama", MATRIX, UNREAD[form](weight))
    if method is not None:
        edit(folder / "config.json", quantization_config={"quant_method": method})
    expected = rf"{BASE}\w+ .*is quantized .*plain weights and --quantization int8 or nf4"
    with pytest.raises(StoreError, match=expected):
        read_manifest(folder)
    with pytest.raises(WeightsError, match=expected):
        load_stage(folder, Span(2, 4), StageSettings("float32"))
    assert load_stage(folder, Span(0, 3), StageSettings("float32")).span == Span(0, 3)


@pytest.mark.parametrize("scale", ["gate_up_proj_scale", "gate_up_proj_scale_inv", "gate_up_proj_scales"])
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_fused_experts_whose_scales_are_not_applied_are_refused(
    dtype: torch.dtype, scale: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    name = "model.layers.3.mlp.experts.gate_up_proj"
    weight = load_file(tiny_model("gpt_oss") / "model.safetensors")[name]
    added = {name: weight.to(dtype), name.replace("gate_up_proj", scale): torch.ones(weight.shape[0], 1, 1)}
    folder = with_tensors(tiny_model("gpt_oss"), tmp_path / "gpt_oss", name, added)
    with pytest.raises(StoreError, match=f"{name} is quantized"):
        read_manifest(folder)
    with pytest.raises(WeightsError, match=f"{name} is quantized"):
        load_stage(folder, Span(2, 4), StageSettings("float32"))


@pytest.mark.parametrize("name", ["weight_scale", "pre_quant_scale", "SCB", "weight_zero_point"])
def test_scales_beside_a_plain_matrix_that_nobody_applies_are_refused(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    weight = load_file(tiny_model("llama") / "model.safetensors")[MATRIX]
    added = {MATRIX: weight, f"{BASE}{name}": torch.ones(len(weight))}
    folder = with_tensors(tiny_model("llama"), tmp_path / "llama", MATRIX, added)
    with pytest.raises(WeightsError, match=f"{BASE}{name} would not be applied"):
        load_stage(folder, Span(2, 4), StageSettings("float32"), manifest=read_manifest(folder))
    assert load_stage(folder, Span(0, 3), StageSettings("float32")).span == Span(0, 3)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale", "k_scale", "input_global_scale"])
def test_scales_of_activations_change_no_weights(name: str, stored: Stored, tmp_path: Path) -> None:
    packed, plain = stored("llama", "fp8")
    weight = load_file(packed / "model.safetensors")[MATRIX]
    added = {MATRIX: weight, f"{BASE}{name}": torch.tensor(0.5)}
    folder = with_tensors(packed, tmp_path / "llama", MATRIX, added)
    stages = [load_stage(one, Span(2, 4), StageSettings("float32")) for one in (folder, plain)]
    ours, theirs = (dict(stage.model.named_parameters()) for stage in stages)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("form", "part"), [("fp8", "weight_scale_inv"), ("awq", "scales")])
def test_scales_of_other_blocks_than_config_says_are_refused(
    form: str, part: str, stored: Stored, tmp_path: Path
) -> None:
    packed, _ = stored("llama", form)
    name = f"{BASE}{part}"
    scales = load_file(packed / "model.safetensors")[name]
    more = scales.repeat_interleave(2, 0).contiguous()
    folder = with_tensors(packed, tmp_path / "llama", name, {name: more})
    with pytest.raises(StoreError, match=f"{name} has the shape"):
        read_manifest(folder)
    with pytest.raises(WeightsError, match=f"{name} has the shape"):
        load_stage(folder, Span(2, 4), StageSettings("float32"))


@pytest.mark.parametrize("form", [dict, SimpleNamespace])
def test_quantization_stated_in_the_text_configuration_counts(form: Callable[..., object]) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}
    found = stored_quantization({"text_config": form(quantization_config=fp8)})
    assert found == stored_quantization({"quantization_config": fp8})
    with pytest.raises(UnsupportedStorage, match="stored quantized as 'compressed-tensors'"):
        stored_quantization({"text_config": form(quantization_config={"quant_method": "compressed-tensors"})})
    assert stored_quantization({"text_config": form()}) is None


@pytest.mark.parametrize("form", ["awq", "fp8"])
def test_altered_parts_are_refused(form: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    packed, _ = packed_and_plain(tiny_model("llama"), tmp_path, form)
    manifest = read_manifest(packed)
    suffix = "qzeros" if form == "awq" else "weight_scale_inv"
    alter_a_weight(packed, f"model.layers.3.mlp.up_proj.{suffix}")
    with pytest.raises(WeightsError, match="layer 3"):
        load_stage(packed, Span(2, 4), StageSettings("float32"), manifest=manifest)


def test_a_matrix_without_one_of_its_parts_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    packed, _ = packed_and_plain(tiny_model("llama"), tmp_path, "awq")
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.scales"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"qweight is there without .*up_proj\.scales"):
        read_manifest(packed)
    with pytest.raises(WeightsError, match=r"qweight is there without .*up_proj\.scales"):
        load_stage(packed, Span(2, 4), StageSettings("float32"))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "compressed-tensors"},
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        {"quant_method": "fp8", "weight_block_size": [1]},
    ],
)
def test_other_formats_are_refused_before_anything_is_read(
    settings: dict[str, object], tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "llama")
    edit(folder / "config.json", quantization_config=settings)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == settings
    with pytest.raises(UnsupportedArchitecture):
        load_stage(folder, Span(0, 2), StageSettings("float32"))
    with pytest.raises(StoreError, match="cannot be served"):
        read_manifest(folder)
