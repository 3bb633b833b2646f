"""Stages that an engine holds: of one model, apart from each other, and run through in order."""

from ctypes import CDLL
from typing import Protocol

from molink.shards.batching.paged_spans import overlap
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.model.stage import Stage, StageFacts, View
from molink.shards.spec import ModelSpec, Span, merge_spans, missing_spans


class NotHeld(ValueError):
    """Layers are asked for that this engine does not hold."""

    def __init__(self, wanted: Span, held: tuple[Span, ...]) -> None:
        missing = ", ".join(str(span) for span in missing_spans(wanted, held))
        super().__init__(f"span {wanted} cannot run here: layers {missing} are not loaded")
        self.wanted = wanted
        self.held = held


class LateLibrary(Protocol):
    """What a library that is compiled while steps are made is given to. Used from the engine's thread."""

    @property
    def awaits_library(self) -> bool:
        """Whether decode steps would go by it if it were there."""
        ...

    def try_library(self) -> bool:
        """True if it may be used. Blocks for seconds, on any thread."""
        ...

    def bind_library(self, library: CDLL) -> None:
        """Decode steps through what is held now go by it from the next one on."""
        ...


class HeldStages:
    """Stages in order of their layers, and the views through which spans of them run."""

    __slots__ = ("_routes", "_spec", "_stages")

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._stages: list[Stage] = []
        self._routes: dict[Span, tuple[View, ...]] = {}

    @property
    def spans(self) -> tuple[Span, ...]:
        """The layers that can run now, in as few spans as possible."""
        return merge_spans(tuple(stage.span for stage in self._stages))

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights held, what stages share counted once."""
        shared = {id(weight): weight.nbytes for stage in self._stages for weight in stage.parameters()}
        return sum(shared.values())

    @property
    def facts(self) -> StageFacts:
        """What holds for all of them alike. There must be one."""
        return self._stages[0].facts

    @property
    def context_length(self) -> int:
        """Tokens that a sequence may have."""
        return min(self._spec.context_length, *(stage.facts.context_length for stage in self._stages))

    def add(self, stage: Stage) -> None:
        """Adds a stage. Raises ValueError where it is of another model or overlaps."""
        facts = stage.facts
        ours = (self._spec.layers, self._spec.hidden_size, self._spec.dtype)
        theirs = (facts.layers, facts.hidden_size, str(facts.dtype).removeprefix("torch."))
        if ours != theirs:
            raise ValueError(
                f"the stage is of a model with (layers, hidden size, dtype) {theirs}, not {ours}"
            )
        for other in self._stages:
            if overlap(other.span, stage.span):
                raise ValueError(f"span {stage.span} overlaps {other.span}, which is held already")
        for other in self._stages:
            stage.share_embedding(other)
        self._stages.append(stage)
        self._stages.sort(key=lambda held: held.span)
        self._routes.clear()

    def drop(self, span: Span) -> list[Span]:
        """Drops the layers of `span`; parts of stages outside it stay. Returns the spans of changed stages."""
        parts = [(stage, missing_spans(stage.span, (span,))) for stage in self._stages]
        self._routes.clear()
        self._stages = [
            stage if part == stage.span else stage.keep(part) for stage, keeps in parts for part in keeps
        ]
        return [stage.span for stage, keeps in parts if keeps != (stage.span,)]

    def require(self, span: Span) -> None:
        """Raises NotHeld where some of the layers are not held."""
        if missing_spans(span, self.spans):
            raise NotHeld(span, self.spans)

    def route(self, span: Span) -> tuple[View, ...]:
        """Views of the stages that together are the span, in order. Raises NotHeld."""
        route = self._routes.get(span)
        if route is None:
            self.require(span)
            parts = [
                (stage, Span(max(stage.span.start, span.start), min(stage.span.stop, span.stop)))
                for stage in self._stages
                if overlap(stage.span, span)
            ]
            route = self._routes[span] = tuple(stage.view(part) for stage, part in parts)
        return route

    def layouts(self, span: Span) -> list[LayerLayout]:
        """What each of the layers caches."""
        layouts: dict[int, LayerLayout] = {}
        for stage in self._stages:
            layouts.update(stage.layouts)
        return [layouts[layer] for layer in span]

    def pack_next(self) -> bool:
        """Packs one more matrix, where that was left for later; whether there was one."""
        return any(stage.pack_next() for stage in self._stages)

    @property
    def awaits_library(self) -> bool:
        """Whether decode steps through some of them would go by the compiled library if that were there."""
        return any(stage.awaits_library for stage in self._stages)

    def try_library(self) -> bool:
        """Answers `LateLibrary.try_library`."""
        return all(stage.try_library() for stage in tuple(self._stages))

    def bind_library(self, library: CDLL) -> None:
        """Decode steps go by the compiled library from now on."""
        for stage in self._stages:
            stage.bind_library(library)
