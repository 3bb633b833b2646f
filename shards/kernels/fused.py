"""Modules whose own forward a GPU's fused kernels stand in for.

A layer of a transformer is some seven large products and thirty small operations between them; on a GPU each of these
is a launch that reads and writes everything again. Architectures keep their own code here: what a module does is found
by its parts and by comparing its own forward with the kernel's result on random rows when it is loaded. What does not
agree keeps its own way, and so does every step whose batch does not fuse.
"""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from molink.shards.attention.attention import BatchSlot
from molink.shards.attention.rotations import install_rotations
from molink.shards.errors import in_one_line
from molink.shards.kernels.joined_products import install_joined
from molink.shards.kernels.row_products import RowProduct, RowProducts
from molink.shards.matrices.by_bytes import ByteProduct, ByteProducts
from molink.shards.matrices.quantized_matrices import Int8Matrices, QuantizedMatrices

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference from the module's own result, relative to its largest number: two units in the last place."""
_ROWS = 3
_TRIED_MATRIX = (4096, 1024)
"""Large enough for kernels of one row."""
_log = logging.getLogger(__name__)


class NormKind(Enum):
    """What a root-mean-square norm does with its weight, once a row x is scaled in float32."""

    ROUNDED = "rounded"
    """weight * x, where x has been rounded to its dtype before."""
    WHOLE = "whole"
    """weight * x, rounded afterwards."""
    RAISED = "raised"
    """x * (1 + weight), rounded afterwards."""


class Activation(Enum):
    """What is done to a gate before it multiplies."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class LayerKernels(Protocol):
    """Small operations of a layer, each in one launch, rounded where the architectures' own are. Nothing waits."""

    def norm(
        self, states: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, kind: NormKind
    ) -> tuple[Tensor, Tensor]:
        """The norm of states + added, or of the states, over the last dimension; and that sum itself."""
        ...

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """The activation of `gate` times `up`."""
        ...


@dataclass(frozen=True, slots=True)
class FusedKernels:
    """What a device has."""

    layers: LayerKernels
    by_bytes: ByteProduct
    rows: RowProduct | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """A norm that the kernel computes."""

    module: nn.Module
    epsilon: float
    kind: NormKind


def fused_on(device: torch.device) -> FusedKernels | None:
    """On CUDA devices, where torch brings a Triton along that works; None elsewhere."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    try:
        from molink.shards.kernels.triton_bytes import TritonBytes
        from molink.shards.kernels.triton_layers import TritonLayers
        from molink.shards.kernels.triton_rows import TritonRows
        from molink.shards.paged_attention.paged_triton import shared_bytes_of

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        by_bytes = TritonBytes(processors, shared_bytes_of(device.index or 0), device)
        return FusedKernels(TritonLayers(), by_bytes, TritonRows())
    except Exception as error:  # noqa: BLE001 - of a compiler and its cards there is no list of errors
        _log.warning("fused kernels are not used: they end with %s", in_one_line(error))
        return None


@torch.inference_mode()
def install_fused(model: nn.Module, slot: BatchSlot, kernels: FusedKernels | None) -> None:
    """Lets modules of a loaded model compute by `kernels` in steps that fuse. Whatever a kernel raises, or a result
    that is not the module's own, leaves the module as it was."""
    if kernels is None:
        return
    modules = [module for module in model.modules() if "forward" not in module.__dict__]
    joined: list[Int8Matrices] = []
    products = RowProducts(slot)
    steps: dict[str, Callable[[], object]] = {
        "fused kernels are not used: they end with": lambda: _install_small(modules, slot, kernels.layers),
        "products of one row are the library's: kernels for them end with": lambda: _adopt(
            products, kernels.rows, model
        ),
        "matrices are multiplied one by one: joining them ends with": lambda: joined.extend(
            install_joined(model, slot, products.linear)
        ),
        "matrices of bytes are unpacked: their kernel ends with": lambda: _install_bytes(
            [*modules, *joined], slot, kernels.by_bytes
        ),
    }
    for otherwise, install in steps.items():
        try:
            install()
        except Exception as error:  # noqa: BLE001 - compilers of kernels raise what they like: each module has its own way
            _log.warning("%s %s", otherwise, in_one_line(error))
    products.install(modules)


def _adopt(products: RowProducts, kernel: RowProduct | None, model: nn.Module) -> None:
    """The kernel multiplies, if what it gives for a matrix of the model's kind is what the library gives."""
    like = next((one.weight for one in model.modules() if type(one) is nn.Linear), None)
    if kernel is None or like is None or like.dtype not in TOLERANCES:
        return
    weight, inputs = _random(_TRIED_MATRIX, like), _random((1, 1, _TRIED_MATRIX[1]), like)
    found = kernel.multiply(inputs, weight, weight[:, 0])
    expected = nn.functional.linear(inputs, weight, weight[:, 0])
    if _difference(found, expected) <= TOLERANCES[like.dtype]:
        products.kernel = kernel


def _install_small(modules: Sequence[nn.Module], slot: BatchSlot, kernels: LayerKernels) -> None:
    norms = _install_norms(modules, slot, kernels)
    _install_gates(modules, slot, kernels)
    _install_residuals(modules, slot, kernels, norms)
    install_rotations(modules, slot)


def _install_norms(
    modules: Iterable[nn.Module], slot: BatchSlot, kernels: LayerKernels
) -> dict[nn.Module, _Norm]:
    found: dict[nn.Module, _Norm] = {}
    kinds: dict[tuple[object, ...], NormKind | None] = {}
    for module in modules:
        epsilon = _epsilon(module)
        if epsilon is None:
            continue
        weight = module.weight
        like = (type(module), weight.shape, weight.dtype)
        if like not in kinds:
            kinds[like] = _kind_of(module, epsilon, kernels)
        kind = kinds[like]
        if kind is not None:
            found[module] = _Norm(module, epsilon, kind)
            module.__dict__["forward"] = _norm_forward(module, slot, kernels, found[module])
    return found


def _epsilon(module: nn.Module) -> float | None:
    """What a root-mean-square norm adds to the mean; None of other modules."""
    weight = getattr(module, "weight", None)
    named = "RMSNorm" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 1
    if not named or len(list(module.parameters())) != 1:
        return None
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((value for value in values if isinstance(value, float)), None)


def _kind_of(module: nn.Module, epsilon: float, kernels: LayerKernels) -> NormKind | None:
    weight: Tensor = module.weight  # type: ignore[assignment] # as `_epsilon` saw
    rows = _random((_ROWS, len(weight)), weight)
    expected = _asked(type(module).forward, module, rows)
    if expected is None or expected.dtype is not weight.dtype:
        return None
    differences = {
        kind: _difference(kernels.norm(rows, None, weight, epsilon, kind)[0], expected) for kind in NormKind
    }
    best = min(differences, key=lambda kind: differences[kind])
    return best if differences[best] <= TOLERANCES[weight.dtype] else None


def _norm_forward(
    module: nn.Module, slot: BatchSlot, kernels: LayerKernels, norm: _Norm
) -> Callable[..., Tensor]:
    own, weight = module.forward, module.weight

    def forward(states: Tensor, *others: object, **named: object) -> Tensor:
        if not slot.fuses or others or named or states.dtype is not weight.dtype:
            return own(states, *others, **named)  # type: ignore[no-any-return]
        return kernels.norm(states, None, weight, norm.epsilon, norm.kind)[0]

    return forward


_ACTIVATIONS = {
    "SiLU": Activation.SILU,
    "SiLUActivation": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "PytorchGELUTanh": Activation.GELU_TANH,
}


def _install_gates(modules: Iterable[nn.Module], slot: BatchSlot, kernels: LayerKernels) -> None:
    agreed: dict[tuple[object, ...], bool] = {}
    for module in modules:
        parts = {name for name, _ in module.named_children()}
        activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
        if activation is None or parts != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
            continue
        like = (type(module), activation)
        if like not in agreed:
            agreed[like] = _multiplies_by_gate(module, kernels, activation)
        if agreed[like]:
            module.__dict__["forward"] = _gate_forward(module, slot, kernels, activation)


def _multiplies_by_gate(module: nn.Module, kernels: LayerKernels, activation: Activation) -> bool:
    """Whether the module's forward is down(activation(gate) * up), and the kernel's activation is its own: asked with
    stand-ins of its matrices, whose results are the same however they are multiplied."""
    weight: Tensor = module.gate_proj.weight  # type: ignore[union-attr,assignment] # a module with these parts
    matrix = getattr(module.gate_proj, "matrix", None)
    dtype = matrix.dtype if isinstance(matrix, QuantizedMatrices) else weight.dtype
    if dtype not in TOLERANCES:
        return False
    gates, ups = (4 * _random((_ROWS, 96), weight, dtype, seed) for seed in (0, 1))
    stand_in = SimpleNamespace(
        gate_proj=lambda _: gates,
        up_proj=lambda _: ups,
        down_proj=lambda states: states,
        act_fn=module.act_fn,
    )
    own = _asked(type(module).forward, stand_in, gates)
    return own is not None and _difference(kernels.gate(gates, ups, activation), own) <= TOLERANCES[dtype]


def _gate_forward(
    module: Any,  # noqa: ANN401 - a module with these parts
    slot: BatchSlot,
    kernels: LayerKernels,
    activation: Activation,
) -> Callable[..., Tensor]:
    own = module.forward

    def forward(states: Tensor, *others: object, **named: object) -> Tensor:
        if not slot.fuses or others or named:
            return own(states, *others, **named)  # type: ignore[no-any-return]
        gated = kernels.gate(module.gate_proj(states), module.up_proj(states), activation)
        return module.down_proj(gated)  # type: ignore[no-any-return]

    return forward


_BEFORE_ONLY = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_BEFORE_AND_BEHIND = (*_BEFORE_ONLY, "pre_feedforward_layernorm", "post_feedforward_layernorm")

Adding = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]
"""Of two tensors and a norm: the norm of their sum, and the sum."""


def _before_only(layer: Any, states: Tensor, add: Adding, **named: Any) -> Tensor:  # noqa: ANN401 - modules
    """A layer that normalizes what goes into attention and feed-forward network."""
    attended, *_ = layer.self_attn(hidden_states=layer.input_layernorm(states), **named)
    normed, summed = add(states, attended, layer.post_attention_layernorm)
    return summed + layer.mlp(normed)  # type: ignore[no-any-return]


def _before_and_behind(layer: Any, states: Tensor, add: Adding, **named: Any) -> Tensor:  # noqa: ANN401 - modules
    """A layer that also normalizes what comes of them."""
    attended, *_ = layer.self_attn(hidden_states=layer.input_layernorm(states), **named)
    attended = layer.post_attention_layernorm(attended)
    normed, summed = add(states, attended, layer.pre_feedforward_layernorm)
    return summed + layer.post_feedforward_layernorm(layer.mlp(normed))  # type: ignore[no-any-return]


_WIRINGS = (
    (_BEFORE_ONLY, _before_only, "post_attention_layernorm"),
    (_BEFORE_AND_BEHIND, _before_and_behind, "pre_feedforward_layernorm"),
)


def _install_residuals(
    modules: Iterable[nn.Module], slot: BatchSlot, kernels: LayerKernels, norms: dict[nn.Module, _Norm]
) -> None:
    wirings: dict[type, Callable[..., Tensor] | None] = {}
    for module in modules:
        parts = {name for name, _ in module.named_children()}
        for names, wiring, added in _WIRINGS:
            norm = norms.get(getattr(module, added, None))  # type: ignore[arg-type]
            if parts != set(names) or norm is None:
                continue
            kind = type(module)
            if kind not in wirings:
                wirings[kind] = wiring if _is_wired(kind, wiring, names) else None
            if wirings[kind] is not None:
                module.__dict__["forward"] = _layer_forward(module, slot, kernels, norm, wiring)


def _is_wired(kind: type, wiring: Callable[..., Tensor], names: tuple[str, ...]) -> bool:
    """Whether layers of this class put their parts together so: asked with functions in the place of the parts."""

    def part(index: int) -> Callable[..., Any]:
        def state(states: Tensor) -> Tensor:
            return torch.sin(states * (1 + index) + index)

        def attention(*, hidden_states: Tensor, **_named: object) -> tuple[Tensor, None]:
            return state(hidden_states), None

        return attention if names[index] == "self_attn" else state

    stand_in = SimpleNamespace(**{name: part(index) for index, name in enumerate(names)})
    states = torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 3, 4)
    own = _asked(kind.forward, stand_in, states)  # type: ignore[attr-defined]

    def add(one: Tensor, other: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return norm(one + other), one + other

    return own is not None and torch.equal(own, wiring(stand_in, states, add))


def _layer_forward(
    module: nn.Module, slot: BatchSlot, kernels: LayerKernels, norm: _Norm, wiring: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    own = module.forward

    def add(states: Tensor, added: Tensor, _norm: object) -> tuple[Tensor, Tensor]:
        return kernels.norm(states, added, norm.module.weight, norm.epsilon, norm.kind)  # type: ignore[arg-type]

    def forward(hidden_states: Tensor, *others: object, **named: object) -> Tensor:
        if not slot.fuses or others or hidden_states.dtype is not norm.module.weight.dtype:
            return own(hidden_states, *others, **named)  # type: ignore[no-any-return]
        return wiring(module, hidden_states, add, **named)

    return forward


def _install_bytes(modules: Iterable[nn.Module], slot: BatchSlot, kernel: ByteProduct) -> None:
    agreed: dict[tuple[object, ...], bool] = {}
    for matrices in modules:
        if not isinstance(matrices, Int8Matrices):
            continue
        like = (matrices.shape, matrices.dtype)
        if like not in agreed:
            rows = _random((_ROWS, matrices.shape[1]), matrices.weight, matrices.dtype)
            first = 0 if matrices.is_stack else ...
            expected = matrices.multiply_on_gpu(rows, None, first)
            packed = matrices.weight[first], matrices.scales[first]
            found = kernel.multiply(rows, *packed, None) if kernel.takes(rows) else None
            agreed[like] = found is not None and _difference(found, expected) <= TOLERANCES[matrices.dtype]
        if agreed[like]:
            matrices.by_bytes = ByteProducts(slot, kernel)


def _asked(forward: Callable[..., Any], stand_in: object, states: Tensor) -> Tensor | None:
    """What a class's own forward makes of the states; None where it wants more, of the stand-in or beside the states,
    as gated norms do."""
    try:
        result = inspect.unwrap(forward)(stand_in, states)
    except Exception:  # noqa: BLE001 - it is another kind of module
        return None
    return result if isinstance(result, Tensor) else None


def _random(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(like.device, dtype or like.dtype)


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max().clamp_min(1e-30)
    return float((found.double() - expected.double()).abs().max() / largest.double())
