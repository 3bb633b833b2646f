"""Layers that go by fused kernels, where their own code agrees with these, give what their own code gives."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.devices.fused_reference import WrittenKernels, WrittenRows, fused_here
from support.devices.paged_reference import decoding_here
from support.models.circuit_runs import Circuit, Run, engine_with, finish, start_run
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot
from molink.shards.kernels.fused import FusedKernels, fused_on, install_fused
from molink.shards.kernels.joined_products import install_joined
from molink.shards.loading import stage_builder
from molink.shards.matrices.by_bytes import ByteProducts, gpu_product
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.matrices.quantized_matrices import Int8Matrices
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]
PROMPTS = ((5, 6, 7), (8,) * 20, (9, 10))
TOKENS = 6
FUSED = {
    "llama": {"norm", "norm of a sum", "silu", "rotation"},
    "qwen3": {"norm", "norm of a sum", "silu", "rotation"},
    "gemma2": {"norm", "norm of a sum", "gelu_tanh", "rotation"},
    "gemma3": {"norm", "norm of a sum", "gelu_tanh", "rotation"},
    "mixtral": {"norm", "norm of a sum", "rotation"},
    "gpt_oss": {"norm"},
    "gpt2": set(),
    "falcon": set(),
}
"""What of an architecture goes by kernels. Experts, half-wide rotations and layer norms keep their own way."""
IN_FULL_RUNS = ("gemma3", "mixtral", "falcon", "qwen3")


def runs_of(folder: Path, *, decodes: bool, fuses: bool) -> tuple[list[Run], int, int]:
    """Sessions that step together on two hops; how many steps were played, and rotations left to the store."""
    decoding, attention, tapes = decoding_here(sizes=(4,), fuses=fuses)
    engine = engine_with(folder, (0, 6), decoding=decoding if decodes else None)
    circuit: Circuit = [(engine, Span(0, 2)), (engine, Span(2, 6))]
    runs = [start_run(circuit, text, TOKENS) for text in PROMPTS]
    finish(circuit, runs, TOKENS)
    return runs, tapes.replays, attention.rotations


def put_in(monkeypatch: pytest.MonkeyPatch, kernels: FusedKernels) -> None:
    monkeypatch.setattr(stage_builder, "fused_on", lambda _device: kernels)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.full if name in IN_FULL_RUNS else ()) for name in FUSED],
)
def test_fused_steps_are_unfused_ones_bit_for_bit(
    tiny_model: TinyModel, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(architecture)
    theirs, _, _ = runs_of(folder, decodes=True, fuses=False)
    kernels, written = fused_here()
    put_in(monkeypatch, kernels)
    ours, replays, rotations = runs_of(folder, decodes=True, fuses=True)
    used = {name for name, count in written.calls.items() if count > 20}
    assert used | ({"rotation"} if rotations else set()) == FUSED[architecture]
    assert replays > 0 or architecture in ("mixtral", "gpt_oss", "falcon")
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))


def test_steps_that_do_not_fuse_never_ask_a_kernel(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, written = fused_here()
    put_in(monkeypatch, kernels)
    before: Counter[str] | None = None
    for decodes in (True, False):
        _, _, rotations = runs_of(tiny_model("llama"), decodes=decodes, fuses=False)
        assert rotations == 0
        before = before or Counter(written.calls)
    assert sum(written.calls.values()) < 2 * sum(before.values()) + 1, (
        "kernels are tried when layers are loaded"
    )
    assert written.calls["norm of a sum"] == 0


def test_a_kernel_that_computes_something_else_is_not_used(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, written = fused_here(wrong=True)
    put_in(monkeypatch, kernels)
    runs_of(tiny_model("llama"), decodes=True, fuses=True)
    assert written.calls["norm of a sum"] == 0
    assert written.calls["silu"] > 20, "each kernel is judged by itself"


def test_a_kernel_that_cannot_be_compiled_leaves_layers_their_own_way(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(WrittenKernels):
        def norm(self, *_arguments: object) -> tuple[Tensor, Tensor]:
            raise RuntimeError("no such card")

    failing = Failing()
    put_in(monkeypatch, FusedKernels(failing, failing))
    ours, _, _ = runs_of(tiny_model("llama"), decodes=True, fuses=True)
    assert "fused kernels are not used: they end with RuntimeError: no such card" in caplog.text
    monkeypatch.undo()
    theirs, _, _ = runs_of(tiny_model("llama"), decodes=True, fuses=False)
    assert [run.tokens for run in ours] == [run.tokens for run in theirs]


def test_a_compiler_that_cannot_be_imported_leaves_layers_their_own_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fused_on(torch.device("cuda:0")) is None
    assert "fused kernels are not used: they end with ModuleNotFoundError" in caplog.text
    assert fused_on(torch.device("cpu")) is None


class _GatedRMSNorm(nn.Module):
    """A norm that wants a gate beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8), requires_grad=False), 1e-5

    def forward(self, states: Tensor, gate: Tensor) -> Tensor:
        return functional.rms_norm(states, (8,), self.weight, self.eps) * gate


def test_a_norm_that_wants_more_than_its_states_keeps_its_own_way_and_the_others_do_not() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kernels, _ = fused_here()
    model = nn.ModuleList([_GatedRMSNorm(), LlamaRMSNorm(8).requires_grad_(requires_grad=False)])
    install_fused(model, BatchSlot(None), kernels)
    assert ["forward" in part.__dict__ for part in model] == [False, True]


class _Projections(nn.Module):
    """What takes the same inputs in an attention module."""

    def __init__(self, *, bias: bool = False, rows: tuple[int, int, int] = (8, 4, 4)) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, count, bias=bias) for count in rows)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [part(states) for part in (self.q_proj, self.k_proj, self.v_proj)]


@pytest.mark.parametrize("bias", [False, True])
def test_matrices_that_take_the_same_inputs_are_multiplied_as_one_in_steps_that_fuse(*, bias: bool) -> None:
    module, slot = _Projections(bias=bias).requires_grad_(requires_grad=False), BatchSlot(None)
    states, others = torch.randn(2, 1, 3, 8)
    expected, of_others = module(states), module(others)
    size = sum(parameter.nbytes for parameter in module.parameters())
    install_joined(module, slot)
    assert sum(parameter.nbytes for parameter in module.parameters()) == size
    owners = {
        parameter.untyped_storage().data_ptr() for parameter in (module.q_proj.weight, module.v_proj.weight)
    }
    assert len(owners) == 1
    for fuses in (False, True):
        slot.fuses = fuses
        for found, own in zip(module(states), expected, strict=True):
            torch.testing.assert_close(found, own)
            found.zero_()  # as a rotation in its place does
        for found, own in zip(module(others), of_others, strict=True):
            torch.testing.assert_close(found, own)
    query = module.q_proj(states)
    torch.testing.assert_close(module.k_proj(others), of_others[1])
    torch.testing.assert_close(module.q_proj(states), query)


@pytest.mark.parametrize("bias", [False, True])
def test_matrices_of_bytes_that_take_the_same_inputs_are_multiplied_as_one(*, bias: bool) -> None:
    module, slot = _Projections(bias=bias).requires_grad_(requires_grad=False), BatchSlot(None)
    for name, part in list(module.named_children()):
        setattr(module, name, QuantizedLinear(Int8Matrices.of(part.weight.data), part.bias))
    states = torch.randn(1, 3, 8)
    expected, held = module(states), sum(parameter.nbytes for parameter in module.parameters())
    kernels, written = fused_here()
    install_fused(module, slot, kernels)
    tried = written.calls["bytes"]
    assert sum(parameter.nbytes for parameter in module.parameters()) == held
    for fuses in (False, True):
        slot.fuses = fuses
        torch.testing.assert_close(module(states), expected)
    assert written.calls["bytes"] == tried, "processors multiply in ways of their own"


def test_matrices_that_are_not_of_a_kind_or_are_anothers_too_are_left_apart() -> None:
    quarter, tied, mixed = _Projections(), _Projections(), _Projections()
    quarter.k_proj = nn.Linear(4, 4)
    tied.v_proj.weight = tied.k_proj.weight
    mixed.q_proj = mixed.q_proj.double()
    model = nn.ModuleList([quarter, tied, mixed])
    install_joined(model, BatchSlot(None))
    assert not any("forward" in part.__dict__ for part in model.modules())


class _Attention(_Projections):
    """Projections, and a matrix that takes other inputs."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.o_proj = nn.Linear(8, 8)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [*super().forward(states), self.o_proj(states)]


def test_products_of_one_row_are_the_kernels_in_steps_that_fuse() -> None:
    module, slot, rows = _Attention().requires_grad_(requires_grad=False), BatchSlot(None), WrittenRows()
    alone, many = torch.randn(1, 1, 8), torch.randn(1, 3, 8)
    expected = module(alone)
    install_fused(module, slot, replace(fused_here()[0], rows=rows))
    assert rows.calls == 1, "the kernel is tried when layers are loaded"
    module(alone)
    slot.fuses = True
    module(many)
    assert rows.calls == 1
    for found, own in zip(module(alone), expected, strict=True):
        torch.testing.assert_close(found, own)
    assert rows.calls == 3, "joined matrices are one"


def test_a_kernel_of_one_row_that_is_wrong_or_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(WrittenRows):
        def multiply(self, *_arguments: object) -> Tensor:
            raise RuntimeError("no such card")

    for rows in (WrittenRows(wrong=True), Failing()):
        module, slot = _Attention().requires_grad_(requires_grad=False), BatchSlot(None)
        alone = torch.randn(1, 1, 8)
        expected = module(alone)
        install_fused(module, slot, replace(fused_here()[0], rows=rows))
        slot.fuses = True
        for found, own in zip(module(alone), expected, strict=True):
            torch.testing.assert_close(found, own)
        assert rows.calls <= 1
    assert "products of one row are the library's: kernels for them end with RuntimeError" in caplog.text


class _Scaled(nn.Module):
    """A layer of the same parts, which adds only half of what its attention gives."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = norm(8), norm(8)
        self.self_attn, self.mlp = nn.Identity(), nn.Identity()

    def forward(self, hidden_states: Tensor, **named: object) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        hidden_states = hidden_states + 0.5 * attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # type: ignore[no-any-return]


def test_a_layer_that_is_put_together_otherwise_keeps_its_own_way() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    layer = _Scaled(LlamaRMSNorm)
    install_fused(layer, BatchSlot(None), fused_here()[0])
    assert "forward" not in layer.__dict__
    assert "forward" in layer.input_layernorm.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 100])
def test_products_with_bytes_are_those_with_unpacked_numbers(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    matrices = Int8Matrices.of(torch.randn(48, 128, generator=generator).to(dtype))
    inputs, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((1, rows, 128), (48,)))
    slot, (kernels, written) = BatchSlot(None), fused_here()
    slot.fuses = True
    exact = matrices.weight.double() * matrices.scales.double()[:, None]
    expected = inputs.double() @ exact.T + bias.double()
    packed = matrices.weight, matrices.scales
    for by_bytes in (None, ByteProducts(slot, kernels.by_bytes)):
        product = gpu_product(by_bytes, inputs, packed, dtype, bias)
        apart = float((product.double() - expected).abs().max() / expected.abs().max())
        assert apart <= 8 * torch.finfo(dtype).eps
    assert written.calls["bytes"] == (1 if rows == 3 else 0)


@pytest.mark.parametrize("rows", [3, 100])
def test_experts_in_bytes_are_multiplied_as_they_are_kept(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    stack = Int8Matrices.of(torch.randn(3, 48, 128, generator=generator))
    holder, slot, (kernels, written) = nn.Module(), BatchSlot(None), fused_here()
    holder.experts = stack
    install_fused(holder, slot, kernels)
    tried = written.calls["bytes"]
    assert tried == 1, "the kernel is tried on one of them when layers are loaded"
    slot.fuses = True
    inputs = torch.randn(1, rows, 128, generator=generator)
    for expert in range(3):
        exact = stack.weight[expert].double() * stack.scales[expert].double()[:, None]
        expected = inputs.double() @ exact.T
        product = stack.multiply_on_gpu(inputs, None, torch.tensor(expert))
        apart = float((product.double() - expected).abs().max() / expected.abs().max())
        assert apart <= 8 * torch.finfo(torch.float32).eps
    assert written.calls["bytes"] - tried == (3 if rows == 3 else 0)
