"""Quantized stages hold what is announced, and compute the same however the model is split."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.deadline import DEADLINE_S
from support.live_tensors import live_tensor_bytes
from support.models.circuit_runs import greedy, greedy_joining, spec_for, start_run, step_runs
from support.models.stored_models import alter_a_weight, copy_of, write_model
from support.models.tiny_models import LAYERS
from support.pairwise import pairwise, usually
from torch.nn.functional import linear
from transformers import PreTrainedModel

from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.dimensions import is_quantizable, matrix_size
from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.errors import QuantizationUnavailable, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.matrices.nf4_products import BLOCK
from molink.shards.matrices.quantize import QuantizedLinear, StreamingQuantizer
from molink.shards.matrices.quantized_matrices import Int8Matrices, Nf4Matrices, QuantizedMatrices
from molink.shards.spec import QUANTIZATIONS, Span

TinyModel = Callable[[str], Path]
PROMPT = (5, 9, 200, 31, 7)
WHOLE = Span(0, LAYERS)
KINDS = ("llama", "gpt2", "phi3", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")


def engine_of(folder: Path, quantization: str, *spans: Span, dtype: str = "float32") -> Engine:
    stages = [load_stage(folder, span, StageSettings(dtype, quantization, exact=True)) for span in spans]
    engine = Engine(spec_for(stages[0], dtype), "cpu")
    for stage in stages:
        engine.attach(stage)
    return engine


@pytest.mark.parametrize(
    ("kind", "quantization"),
    usually(
        [(kind, ("int8", "nf4")[at % 2]) for at, kind in enumerate(KINDS)],
        [(kind, ("nf4", "int8")[at % 2]) for at, kind in enumerate(KINDS)],
    ),
)
def test_a_stage_holds_what_is_announced(kind: str, quantization: str, tmp_path: Path) -> None:
    folder = write_model(kind, tmp_path / kind)
    spec = describe(folder, "bfloat16", quantization)
    for span in (Span(0, 2), Span(2, 4), Span(5, 6)):
        held = load_stage(folder, span, StageSettings("bfloat16", quantization)).weight_bytes
        assert held == pytest.approx(spec.weight_bytes(span), rel=0.01)


@pytest.mark.parametrize(
    ("kind", "dtype", "quantization"),
    pairwise(["llama", "mixtral", "gpt2"], ["float32", "bfloat16"], ["int8", "nf4"]),
)
def test_a_split_model_gives_the_logits_of_a_whole_one_bit_for_bit(
    kind: str, dtype: str, quantization: str, tiny_model: TinyModel
) -> None:
    """In every run each pair of kind, dtype and quantization, and `full` all."""
    folder = tiny_model(kind)
    spans = (Span(0, 2), Span(2, 5), Span(5, 6))
    circuits = (
        [(engine_of(folder, quantization, WHOLE, dtype=dtype), WHOLE)],
        [(engine_of(folder, quantization, span, dtype=dtype), span) for span in spans],
    )
    whole, split = (start_run(circuit, PROMPT, 8) for circuit in circuits)
    for circuit, run in zip(circuits, (whole, split), strict=True):
        while len(run.tokens) < 8:
            step_runs(circuit, [run])
    assert split.tokens == whole.tokens
    assert all(torch.equal(one, other) for one, other in zip(split.logits, whole.logits, strict=True))


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_what_else_is_in_the_batch_changes_no_token(quantization: str, tiny_model: TinyModel) -> None:
    circuit = [(engine_of(tiny_model("llama"), quantization, WHOLE), WHOLE)]
    prompts = [PROMPT, (3, 4), (9, 8, 7, 6, 5, 4, 3)]
    assert greedy_joining(circuit, prompts, 8) == [greedy(circuit, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_parts_of_a_quantized_stage_can_be_given_up_and_loaded_again(
    quantization: str, tiny_model: TinyModel
) -> None:
    folder = tiny_model("mixtral")
    engine = engine_of(folder, quantization, WHOLE)
    expected, before = greedy([(engine, WHOLE)], PROMPT, 8), engine.weight_bytes
    engine.detach(Span(2, 5))
    rest = load_stage(folder, Span(2, 5), StageSettings("float32", quantization))
    assert engine.weight_bytes + rest.weight_bytes == before
    engine.attach(rest)
    assert greedy([(engine, WHOLE)], PROMPT, 8) == expected


def test_nf4_is_that_of_bitsandbytes() -> None:
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    packed, state = bitsandbytes.functional.quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
    ours = Nf4Matrices.of(values)
    assert torch.equal(ours.weight, packed.view(-1))
    assert torch.equal(ours.scales, state.absmax)
    assert torch.equal(ours[...], bitsandbytes.functional.dequantize_4bit(packed, state))


def test_int8_is_that_of_bitsandbytes() -> None:
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    packed, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(values)
    ours = Int8Matrices.of(values)
    assert torch.equal(ours.weight, packed)
    torch.testing.assert_close(
        ours[...], bitsandbytes.functional.int8_vectorwise_dequant(packed, largest), rtol=1e-6, atol=0
    )


@given(
    rows=st.integers(1, 9).map(lambda count: count * 8),
    columns=st.integers(1, 12).map(lambda count: count * 8),
    stack=st.integers(1, 3),
    kind=st.sampled_from([Int8Matrices, Nf4Matrices]),
)
def test_matrices_come_back_within_the_rounding_of_their_scale(
    rows: int, columns: int, stack: int, kind: type[Int8Matrices] | type[Nf4Matrices]
) -> None:
    values = torch.randn(stack, rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    matrices = kind.of(values)
    for index in range(stack):
        error = (matrices.unpacked(index) - values[index]).abs()
        if kind is Int8Matrices:
            assert bool((error <= values[index].abs().amax(-1, keepdim=True) * 0.51 / 127).all())
        else:  # the widest gap between two numbers of the format is 0.304 of the block's largest
            blocks = error.view(-1, BLOCK) / values[index].view(-1, BLOCK).abs().amax(-1, keepdim=True)
            assert float(blocks.max()) <= 0.304 / 2 + 1e-3


@pytest.mark.parametrize("kind", [Int8Matrices, Nf4Matrices])
def test_a_quantized_linear_layer_multiplies_by_its_matrix(
    kind: type[Int8Matrices] | type[Nf4Matrices],
) -> None:
    generator = torch.Generator().manual_seed(2)
    matrix = kind.of(torch.randn(32, 128, generator=generator))
    bias = torch.nn.Parameter(torch.randn(32, generator=generator))
    inputs = torch.randn(3, 128, generator=generator)
    with torch.inference_mode():
        result = QuantizedLinear(matrix, bias)(inputs)
        torch.testing.assert_close(result, linear(inputs, matrix[...], bias))


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 40).map(lambda count: count * 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
)
def test_int8_products_of_few_rows_and_of_many_are_those_of_its_matrix(
    rows: int, columns: int, dtype: torch.dtype, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    matrix = Int8Matrices.of(torch.randn(24, columns, generator=generator).to(dtype))
    bias = torch.nn.Parameter(torch.randn(24, generator=generator).to(dtype)) if with_bias else None
    inputs = torch.randn(2, 2 * rows, columns, generator=generator).to(dtype)[:1, ::2]
    exact = linear(inputs.double(), matrix.weight.double() * matrix.scales.double().unsqueeze(-1))
    with torch.inference_mode():
        result = QuantizedLinear(matrix, bias)(inputs)
    assert result.dtype is dtype
    expected = exact if bias is None else exact + bias.double()
    # each number's scale, the product and the sum with the bias are rounded
    rounding = torch.finfo(dtype).eps * (exact.abs() + expected.abs() + columns**0.5)
    # and so is each sum on the way, in float32
    summing = torch.finfo(torch.float32).eps * max(columns, 84)
    assert bool(((result.double() - expected).abs() <= 2 * rounding + summing).all())


def test_routers_norms_and_biases_are_not_quantized() -> None:
    assert is_quantizable("model.layers.0.mlp.gate_proj.weight", (96, 64))
    assert is_quantizable("model.layers.0.mlp.experts.gate_up_proj", (4, 192, 64))
    for name, shape in (
        ("model.layers.0.mlp.gate.weight", (4, 64)),
        ("model.layers.0.block_sparse_moe.gate.weight", (4, 64)),
        ("model.layers.0.mlp.router.weight", (64, 64)),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 64)),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 192)),
        ("model.layers.0.input_layernorm.weight", (64,)),
    ):
        assert matrix_size(name, shape) == (0, 0)


def test_altered_weights_are_refused_while_they_are_quantized(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "llama")
    manifest = read_manifest(folder)
    load_stage(folder, WHOLE, StageSettings("float32", "nf4"), manifest=manifest)
    alter_a_weight(folder, "model.layers.3.mlp.up_proj.weight")
    with pytest.raises(WeightsError, match="layer 3"):
        load_stage(folder, WHOLE, StageSettings("float32", "nf4"), manifest=manifest)


def test_a_matrix_of_another_shape_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copy_of(tiny_model("llama"), tmp_path / "llama")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 128'))
    with pytest.raises(WeightsError, match=r"other shapes than config\.json says: .*mlp"):
        load_stage(folder, Span(1, 3), StageSettings("float32", "int8"))


def test_without_bitsandbytes_it_is_said_what_to_install(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(QuantizationUnavailable, match=r"pip install 'molink\[quantization\]'"):
        load_stage(tiny_model("llama"), WHOLE, StageSettings("float32", "nf4"))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("llama", "float32", marks=pytest.mark.full),
        ("llama", "bfloat16"),
        pytest.param("mixtral", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_all_tensors_that_a_stage_keeps_after_steps_take_what_is_announced(
    kind: str, dtype: str, quantization: str, tiny_model: TinyModel
) -> None:
    """Whatever it keeps besides its weights, such as copies that are packed for a product, would count. Of a quantized
    model one matrix may be there unpacked: that is work space, which is announced apart."""
    folder, span = tiny_model(kind), Span(1, 5)
    gc.collect()
    before = live_tensor_bytes()
    engine = engine_of(folder, quantization, span, dtype=dtype)
    cache = engine.new_cache(span, 16)
    for count in (6, 1):
        hidden = torch.ones(count, 64, dtype=getattr(torch, dtype))
        engine.step(span, [Rows(cache, count, None, logit_rows=0)], hidden)
    cache.close()
    del cache, hidden
    assert engine.limit_kv(0)
    gc.collect()
    held = live_tensor_bytes() - before
    announced = describe(folder, dtype, quantization).weight_bytes(span)
    unpacked = 96 * 64 * torch.finfo(getattr(torch, dtype)).bits // 8
    scratch = 0 if quantization == "none" else unpacked * (2 if kind == "mixtral" else 1)
    assert 0.98 * (held - scratch) <= announced <= 1.05 * held


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_no_more_than_one_matrix_at_a_time_is_in_memory_unquantized(
    quantization: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the end of each layer, when another one has come from the file: all tensors, less what stays."""
    folder = tiny_model("llama")
    before, names, beyond = live_tensor_bytes(), [], []
    convert = StreamingQuantizer.convert

    def counting(
        self: StreamingQuantizer, input_dict: dict[str, object], *, model: PreTrainedModel, **rest: object
    ) -> dict[str, torch.Tensor]:
        names.extend(input_dict)
        if len(names) % 7 == 0:
            matrices = [module for module in model.modules() if isinstance(module, QuantizedMatrices)]
            kept = sum(matrix.weight.nbytes + matrix.scales.nbytes for matrix in matrices)
            beyond.append(live_tensor_bytes() - before - kept)
        return convert(self, input_dict, model=model, **rest)

    monkeypatch.setattr(StreamingQuantizer, "convert", counting)
    load_stage(folder, Span(1, 5), StageSettings("float32", quantization))
    matrix, layer = 96 * 64 * 4, (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) * 4
    assert len(beyond) == 4
    assert max(beyond) < 2 * matrix + 8192 < layer


MEASURE = """
import sys, threading, time
from pathlib import Path
import psutil, torch
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import QUANTIZATIONS, Span
folder, quantization = Path(sys.argv[1]), sys.argv[2]
settings = StageSettings("bfloat16", quantization)
load_stage(folder, Span(0, 1), settings)
process = psutil.Process()
before = process.memory_info().rss
stage = load_stage(folder, Span(1, 6), settings)
print(stage.weight_bytes, process.memory_info().rss - before)
"""


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_resident_memory_is_that_of_the_quantized_weights(quantization: str, big_model: Path) -> None:
    """Of 100 MB in bfloat16, no more stays than the quantized weights and a little for the process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(big_model), quantization],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    weights, resident = map(int, done.stdout.split())
    assert resident <= 1.25 * weights + 24e6


@pytest.fixture(scope="module")
def big_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    folder = tmp_path_factory.mktemp("big")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder
