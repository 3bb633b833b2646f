"""A loaded span of a model, able to run any span inside it."""

import enum
import inspect
from collections.abc import Callable, Iterator
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from molink.shards.attention.attention import AttendingBatch, BatchSlot
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.model.boundary import Boundary
from molink.shards.model.later_packing import LaterWork
from molink.shards.model.partial_model import cut_view, head_of, layers_path
from molink.shards.model.probe import ProbeBatch
from molink.shards.spec import Span

_ATTENDED_CACHES = ("cache", "past_key_values")
_STATE_CACHES = ("cache_params",)
"""Parameters by which a forward takes its cache: of models with attention, and of models that only keep states."""


class Batching(enum.Enum):
    """How the tokens of several sessions go through a model in one step."""

    PACKED = "packed"
    """One after the other in one row; attention is ours and tells the sessions apart."""
    PADDED = "left-padded"
    """A row for each session; attention is the model's own."""
    ROWS = "rows"
    """A row for each session, whose layers may keep states; attention is ours."""
    SERIAL_ROWS = "rows, token by token"
    """The same, but several new tokens of a session go one after the other."""
    LONE = "one by one"
    """Each session by itself, whose layers may keep states; attention is the model's own."""

    @property
    def attends(self) -> bool:
        """Whether attention is ours."""
        return self in (Batching.PACKED, Batching.ROWS, Batching.SERIAL_ROWS)

    @property
    def keeps_states(self) -> bool:
        """Whether layers may keep something else than keys and values."""
        return self in (Batching.ROWS, Batching.SERIAL_ROWS, Batching.LONE)


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What a stage knows of the model it is a part of."""

    architecture: str
    layers: int
    hidden_size: int
    vocabulary_size: int
    context_length: int
    """Most tokens of a sequence for which a stage computes what the model would."""
    dtype: torch.dtype


class View:
    """A span ready to run: stock layers in the architecture's own forward, without what generation adds
    around it."""

    __slots__ = (
        "_base",
        "_boundary",
        "_cache",
        "_forward",
        "_head",
        "_head_forward",
        "_places",
        "_slot",
        "_starts",
        "span",
    )

    packs = True
    """Whether its attention goes through the batch that it runs; else it is the model's own."""

    def __init__(self, model: PreTrainedModel, span: Span, layers: int, slot: BatchSlot) -> None:
        self.span = span
        self._slot = slot
        self._starts = span.start == 0
        path = layers_path(model)
        self._base = model.get_submodule(path.rpartition(".")[0])
        self._boundary = Boundary()
        self._boundary.install(model.get_submodule(path), starts=self._starts, ends=span.stop == layers)
        self._forward = _undecorated(self._base)
        self._cache = cache_parameter(self._forward)
        parameters = inspect.signature(self._forward).parameters
        self._places = "position_ids" in parameters or self._cache in _ATTENDED_CACHES
        """Whether it is told positions; models without any attention are not."""
        self._head = head_of(model) if span.stop == layers else None
        self._head_forward = _undecorated(self._head) if self._head is not None else None

    @property
    def takes_hidden_states(self) -> bool:
        """Whether the architecture's forward has the parameters that a span needs."""
        return self._cache != "" and "inputs_embeds" in inspect.signature(self._forward).parameters

    @property
    def exact(self) -> bool:
        """Whether steps of one session equal transformers' bit for bit."""
        return self._slot.exact

    def run(self, inputs: Tensor, positions: Tensor, batch: AttendingBatch) -> Tensor:
        """Token ids [1, tokens] (where the span starts the model) or hidden states [1, tokens, hidden]
        through all layers of the span and, where it ends the model, the final norm. Returns [1, tokens,
        hidden]."""
        return self._attended(inputs, positions, batch)

    def try_out(self, inputs: Tensor, positions: Tensor, probe: ProbeBatch) -> Tensor:
        """One new sequence [1, tokens] (or [1, tokens, hidden]) through the span, for `probe` to see what is
        cached."""
        return self._attended(inputs, positions, probe)

    def _attended(self, inputs: Tensor, positions: Tensor, batch: AttendingBatch) -> Tensor:
        self._slot.batch = batch
        self._slot.begin(batch)
        try:
            return self._through(inputs, positions, batch, None)
        finally:
            self._slot.batch = None

    def _through(self, inputs: Tensor, positions: Tensor, cache: object, mask: Tensor | None) -> Tensor:
        named = {self._cache: cache} | ({"position_ids": positions} if self._places else {})
        boundary = self._boundary
        boundary.entering = None if self._starts else inputs
        try:
            output = self._forward(
                self._base,
                input_ids=inputs if self._starts else None,
                inputs_embeds=None if self._starts else inputs,
                attention_mask=mask,
                use_cache=True,
                **named,
            )
            hidden: Tensor = output.last_hidden_state if boundary.leaving is None else boundary.leaving
        finally:
            boundary.entering = boundary.leaving = None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[1, rows, hidden] as `run` returned it to float32 logits [rows, vocabulary]."""
        if self._head_forward is None:
            raise ValueError(f"span {self.span} does not end the model: it has no logits")
        logits: Tensor = self._head_forward(self._head, inputs_embeds=hidden).logits
        return logits[0].float()


class Stage:
    """The layers of a span in memory, shared by views of any span inside.

    `model` holds `span` and nothing else of the parameters. Made by `loader.load_stage`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        span: Span,
        facts: StageFacts,
        layouts: dict[int, LayerLayout],
        slot: BatchSlot,
        view_class: type[View],
        later: LaterWork,
    ) -> None:
        self.span = span
        self.facts = facts
        self.layouts = layouts
        self._model = model
        self._slot = slot
        self._view_class = view_class
        self._later = later
        self._views: dict[Span, View] = {}

    @property
    def model(self) -> PreTrainedModel:
        """Whose layers and weights, as far as they are of its span, these are."""
        return self._model

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights held, those shared between two places counted once."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """All weights held, each once."""
        return iter(self._model.parameters())

    def share_embedding(self, other: "Stage") -> None:
        """Where the tokens' embedding is tied to the head, and both ends of the model are here: one memory for both."""
        if not getattr(self._model.config, "tie_word_embeddings", False):
            return
        ours, theirs = (getattr(_embedding(stage.model), "weight", None) for stage in (self, other))
        if ours is None or theirs is None or ours is theirs:
            return
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter is ours:
                    setattr(module, name, theirs)

    def view(self, span: Span) -> View:
        """The part of this stage that runs `span`. Raises ValueError where it is not inside."""
        found = self._views.get(span)
        if found is None:
            found = self._views[span] = self._view_class(self._cut(span), span, self.facts.layers, self._slot)
        return found

    def keep(self, span: Span) -> "Stage":
        """A stage of a part of this one; once nothing refers to this one any more, the rest is freed."""
        layouts = {layer: self.layouts[layer] for layer in span}
        return Stage(self._cut(span), span, self.facts, layouts, self._slot, self._view_class, self._later)

    def pack_next(self) -> bool:
        """Packs one more of the matrices that `load_stage` has left to be packed later; whether there was one. On the
        thread that runs the views."""
        packing = self._later.packing
        return packing is not None and packing.next()

    @property
    def awaits_library(self) -> bool:
        """Whether its decode steps would go by the compiled library if that were there."""
        few_rows = self._later.few_rows
        return few_rows is not None and few_rows.is_awaited

    def try_library(self) -> bool:
        """True if a library that was compiled since may be used. Blocks for seconds; any thread may call it."""
        return self._later.ways.try_library()

    def bind_library(self, library: CDLL) -> None:
        """Its decode steps go by the compiled library from now on. On the thread that runs the views."""
        few_rows = self._later.few_rows
        if few_rows is not None and few_rows.is_awaited:
            few_rows.bind(library)

    def _cut(self, span: Span) -> PreTrainedModel:
        if not self.span.covers(span):
            raise ValueError(f"this stage holds {self.span}, which does not cover {span}")
        return cut_view(self._model, self.span, span, self.facts.layers)


def cache_parameter(forward: Callable[..., Any]) -> str:
    """Name of the parameter by which a forward takes its cache, empty if it takes none. Releases of transformers
    differ in it, and so do architectures."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _ATTENDED_CACHES + _STATE_CACHES if name in parameters), "")


def shorten_lookups(layers: nn.Module) -> None:
    """Lets Python find parameters and submodules of loaded layers as plain attributes: torch's own lookup,
    run some thirty times per layer and token, costs 4 to 8 % of a small model's step on a CPU."""
    for module in layers.modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.__dict__.update(module._parameters)  # noqa: SLF001 - torch has no public way to list absent ones too
            module.__dict__.update(module._modules)  # noqa: SLF001 - as above


def _embedding(model: PreTrainedModel) -> nn.Module | None:
    """The embedding of tokens, or what stands in its place."""
    embedding: nn.Module | None = model.get_input_embeddings()
    return embedding


def _undecorated(module: nn.Module) -> Callable[..., Any]:
    """The architecture's own forward. Transformers wraps it to collect outputs and fill in defaults, none of
    which a stage asks for; unwrapped it also runs on a view, which is not registered for such collecting."""
    forward: Callable[..., Any] = inspect.unwrap(type(module).forward)
    return forward
