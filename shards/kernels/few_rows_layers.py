"""Decoder layers of the Llama family as one call each, for a step of few tokens on a processor (`few_rows.c`): one of
each of few sessions, or with guesses several.

Between the products of such a step nothing reads weights, and each of torch's operations finds the caches full of them.
Here nothing lies between: threads go from one product to the next, and from one row's keys to the next one's. The
first step of so many rows through a layer of each kind is computed both ways; where they differ by more than
rounding, layers of that kind keep to the other way for so many.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from molink.shards.attention.attention import AttentionRules
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.native.few_rows import FewRows, FewRowsMatrix, MatrixFields

LANES: Final = 16
MOST_DIM: Final = 256
MOST_SHARED: Final = 16
"""Query heads of a key head."""
_ROUNDING_UNITS: Final = 4
_LEAST_ROUNDING: Final = 1e-5
"""As in `fused_layers.py`."""

Part: TypeAlias = Any
"""A module; torch says of each of its parts that it may be a tensor."""
Angles: TypeAlias = tuple[Tensor, Tensor]
Otherwise: TypeAlias = Callable[[Tensor, Angles, Any], Tensor]
"""The layer in torch's operations: of hidden states, cosines and sines, and the batch."""


class _LayerFields(ctypes.Structure):
    """`layer` of `few_rows.c`."""

    _fields_ = (
        ("heads", MatrixFields * 3), ("out", MatrixFields), ("gated", MatrixFields * 2), ("down", MatrixFields),
        *((name, ctypes.c_void_p) for name in ("before", "behind", "query_norm", "key_norm")),
        *((name, ctypes.c_int64) for name in ("head_matrices", "gated_matrices")),
        *((name, ctypes.c_int64) for name in ("queries", "keys", "dim", "hidden", "inner", "window")),
        *((f"{name}_epsilon", ctypes.c_float) for name in ("before", "behind", "query", "key")),
        ("scaling", ctypes.c_float),
    )  # fmt: skip


class Contexts(Protocol):
    """Where the keys and values of a step's sessions lie."""

    address: int
    """Of `context` of `few_rows.c` for each session."""
    heads: int
    dim: int
    dtype: torch.dtype


class FewRowsSteps:
    """What the layers of one stage share while a step goes through them. Used from one thread."""

    __slots__ = ("_angles", "_of", "_shared", "alike", "few_rows")

    def __init__(self, few_rows: FewRows) -> None:
        self.few_rows = few_rows
        self.alike: dict[tuple[object, int], bool] = {}
        """Of each kind of layer and number of rows, whether it was found to give what torch's operations give."""
        self._shared = torch.empty(0)
        self._of: Tensor | None = None
        self._angles = torch.empty(0)

    def angles(self, cosines: Tensor, sines: Tensor) -> int:
        """Address of both in float32, [2, rows, dim]; the same of all layers in a step."""
        if self._of is not cosines:
            self._angles = torch.stack((cosines.flatten(), sines.flatten())).float()
            self._of = cosines
        return self._angles.data_ptr()

    def shared(self, floats: int) -> int:
        """Address of memory for so many, until the next layer."""
        if self._shared.numel() < floats:
            with torch.inference_mode(mode=False):
                self._shared = torch.empty(floats)
        return self._shared.data_ptr()


class FewRowsLayer:
    """One layer, to be called with its hidden states; in other steps than those of few tokens it runs otherwise."""

    __slots__ = (
        "_fields",
        "_kept",
        "_kind",
        "_layer",
        "_most",
        "_most_rows",
        "_of",
        "_owners",
        "_rules",
        "_shared",
        "_steps",
        "_used",
    )

    def __init__(self, layer: Part, kind: object, rules: AttentionRules, steps: FewRowsSteps) -> None:
        """`kind`: what layers have in common that run by the same code."""
        self._layer = layer
        self._of = kind
        self._kind: tuple[object, ...] = ()
        """With the forms of the matrices, for they may be packed later."""
        self._rules = rules
        self._steps = steps
        self._used: tuple[FewRowsMatrix | None, ...] = ()
        self._fields: _LayerFields | None = None
        self._kept: list[Tensor] = []
        self._owners = _projections(layer)
        self._most = self._shared = self._most_rows = 0

    def __call__(self, states: Tensor, angles: Angles, batch: Any, otherwise: Otherwise) -> Tensor:  # noqa: ANN401 - a batch, as transformers' caches are
        """Hidden states [1, tokens, hidden] behind the layer."""
        rows, found = states.shape[1], getattr(batch, "contexts", None)
        if (
            found is None
            or rows > self._steps.few_rows.most_rows
            or not self._is_ready()
            or rows > self._most_rows
        ):
            return otherwise(states, angles, batch)
        place: tuple[Contexts, int] | None = found(self._layer.self_attn.layer_idx)
        if place is None or not self._reads(place[0], states.dtype):
            return otherwise(states, angles, batch)
        alike = self._steps.alike.get((self._kind, rows))
        if alike is None:
            return self._tried(states, angles, batch, otherwise, place)
        return self._run(states, angles, *place) if alike else otherwise(states, angles, batch)

    def _reads(self, contexts: Contexts, dtype: torch.dtype) -> bool:
        """Whether the library can read and write them."""
        fields = self._fields
        shape = None if fields is None else (fields.keys, fields.dim, dtype)
        return shape == (contexts.heads, contexts.dim, contexts.dtype)

    def _tried(
        self,
        states: Tensor,
        angles: Angles,
        batch: Any,  # noqa: ANN401 - as above
        otherwise: Otherwise,
        place: tuple[Contexts, int],
    ) -> Tensor:
        own = otherwise(states, angles, batch)
        fresh = batch.fresh(self._layer.self_attn.layer_idx)
        stored = [view.clone() for view in fresh]
        found = self._run(states, angles, *place)
        pairs = [*zip((own - states)[0], (found - states)[0], strict=True), *zip(stored, fresh, strict=True)]
        most = max(_LEAST_ROUNDING, _ROUNDING_UNITS * torch.finfo(states.dtype).eps)
        self._steps.alike[self._kind, states.shape[1]] = all(
            float((one.float() - two.float()).norm()) <= most * float(one.float().norm())
            for one, two in pairs
        )
        for view, one in zip(fresh, stored, strict=True):
            view.copy_(one)
        return own

    def _run(self, states: Tensor, angles: Angles, contexts: Contexts, slot: int) -> Tensor:
        steps, threads, rows = self._steps, torch.get_num_threads(), states.shape[1]
        states = states.contiguous()
        result = torch.empty_like(states)
        steps.few_rows.library.few_rows_layer(
            ctypes.addressof(self._fields),  # type: ignore[arg-type] # there are some where it is ready
            rows, states.data_ptr(), steps.angles(*angles), contexts.address, slot,
            states.dtype is torch.bfloat16, result.data_ptr(), steps.shared(rows * self._shared),
            steps.few_rows.scratch(self._most, max(rows, threads)), self._most, threads,
        )  # fmt: skip
        return result

    def _is_ready(self) -> bool:
        """Whether the library has all of its matrices, as they lie now: they may be packed between steps."""
        used = tuple(_matrix_of(owner) for owner in self._owners)
        if used != self._used:
            self._used, self._fields = used, None
            if all(matrix is not None for matrix in used):
                self._describe([matrix for matrix in used if matrix is not None])
        return self._fields is not None

    def _describe(self, matrices: list[FewRowsMatrix]) -> None:
        attention, layer = self._layer.self_attn, self._layer
        dim, shares = attention.head_dim, attention.num_key_value_groups
        count = 1 if hasattr(attention, "qkv_proj") else 3
        heads, (out, *gated, down) = matrices[:count], matrices[count:]
        hidden, inner = out.fields.rows, down.fields.columns
        queries = out.fields.columns // dim
        every = sum(one.fields.rows for one in heads)
        forms = [tuple(one.fields.form for one in together) for together in (heads, [out], gated, [down])]
        fits = dim % LANES == 0 and dim <= MOST_DIM and shares <= MOST_SHARED and queries % shares == 0
        fits = fits and every == (queries + 2 * queries // shares) * dim
        if not fits or any(len(set(together)) > 1 for together in forms):
            return
        self._kept = []
        fields = _LayerFields()
        for place, matrix, owner in zip(
            _places(fields, len(heads), len(gated)), matrices, self._owners, strict=True
        ):
            copied = MatrixFields.from_buffer_copy(matrix.fields)
            copied.bias = self._floats(owner.bias)
            place(copied)
        norms = {"before": layer.input_layernorm, "behind": layer.post_attention_layernorm}
        norms |= {"query": getattr(attention, "q_norm", None), "key": getattr(attention, "k_norm", None)}
        for name, norm in norms.items():
            if norm is not None:
                field = name if name in ("before", "behind") else f"{name}_norm"
                setattr(fields, field, self._floats(norm.weight))
                setattr(fields, f"{name}_epsilon", norm.variance_epsilon)
        fields.head_matrices, fields.gated_matrices = len(heads), len(gated)
        fields.queries, fields.keys, fields.dim = queries, queries // shares, dim
        fields.hidden, fields.inner = hidden, inner
        fields.window = self._rules.sliding_window or 0
        fields.scaling = dim**-0.5 if self._rules.scaling is None else self._rules.scaling
        self._most_rows = min(matrix.most_rows for matrix in matrices)
        self._most = max(hidden, inner, queries * dim)
        self._shared = every + queries * dim + hidden + inner
        self._kind = (self._of, *forms)
        self._fields = fields

    def _floats(self, numbers: Tensor | None) -> int | None:
        """Address of a copy in float32, which is kept."""
        if numbers is None:
            return None
        self._kept.append(numbers.detach().float().contiguous())
        return self._kept[-1].data_ptr()


def _places(fields: _LayerFields, heads: int, gated: int) -> list[Callable[[MatrixFields], None]]:
    """Where the matrices of a layer belong, in the order of `_projections`."""

    def into(array: Any, index: int) -> Callable[[MatrixFields], None]:  # noqa: ANN401 - ctypes' arrays have no type
        return lambda matrix: array.__setitem__(index, matrix)

    def named(name: str) -> Callable[[MatrixFields], None]:
        return lambda matrix: setattr(fields, name, matrix)

    places = [into(fields.heads, index) for index in range(heads)] + [named("out")]
    return [*places, *(into(fields.gated, index) for index in range(gated)), named("down")]


def _projections(layer: Part) -> tuple[Part, ...]:
    """The modules that multiply: queries, keys and values or what has become one of them, output, gate and up or what
    has become one of them, down."""
    attention, mlp = layer.self_attn, layer.mlp
    separate = not hasattr(attention, "qkv_proj")
    heads = [attention.q_proj, attention.k_proj, attention.v_proj] if separate else [attention.qkv_proj]
    gated = [mlp.gate_up_proj] if hasattr(mlp, "gate_up_proj") else [mlp.gate_proj, mlp.up_proj]
    return (*heads, attention.o_proj, *gated, mlp.down_proj)


def _matrix_of(module: nn.Module) -> FewRowsMatrix | None:
    if isinstance(module, QuantizedLinear):
        return module.matrix.few_rows if module.is_whole else None
    found: FewRowsMatrix | None = module.__dict__.get("few_rows")
    return found
