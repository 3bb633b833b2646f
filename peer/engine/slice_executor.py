"""Executes slices of prompts on the engine, and keeps the partial steps of the parts that have begun.

What is wrong with one session of a piece is its own, as in `steps`: the others get what they would have got.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.peer.compute.backend import SlicingEngine
from molink.peer.engine.steps import StepFailure, StepInput, StepOutput, drawn
from molink.peer.scheduling.prefill_slices import RemainingPrefill, SliceSize
from molink.shards.batching import partial_step
from molink.shards.batching.partial_step import PartialStep, Rows, join_slice_batches


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlice:
    """A prefill slice: so many tokens of some parts of prompts through so many layers."""

    parts: tuple[StepInput, ...]
    left: tuple[RemainingPrefill, ...]
    """Of each."""
    size: SliceSize
    begins: bool
    """Whether these tokens have not been through any layer."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceOutput:
    """The output of a slice."""

    whole: StepOutput | None
    """Of the parts that it was the last piece of, and of those that failed, if there are some."""
    taken_s: float
    is_complete: bool
    """Whether it is the time of what was to be computed: nobody was left out, or failed."""


class SliceExecutor:
    """Executes slices, and owns the partial steps of the parts that have begun.

    `compute` runs on the engine's thread; all else on the event loop, while that does not.
    """

    def __init__(self, engine: SlicingEngine) -> None:
        self._engine = engine
        self._steps: dict[StepInput, PartialStep] = {}
        self._under_way: partial_step.SliceBatch | None = None
        """Tokens between layers."""
        self._computed_s = 0.0
        """Of pieces since a part was through."""

    @property
    def layers_under_way(self) -> int:
        """Those that are left for the tokens between layers; 0 if there are none."""
        slice_ = self._under_way
        return 0 if slice_ is None else slice_.steps[0].span.stop - slice_.layer

    def tokens_under_way(self) -> dict[StepInput, int]:
        """Whose tokens are between layers, and how many."""
        if self._under_way is None:
            return {}
        parts = {step: part for part, step in self._steps.items()}
        tokens = zip(self._under_way.steps, self._under_way.tokens, strict=True)
        return {parts[step]: count for step, count in tokens if step in parts}

    def remaining(self, part: StepInput) -> RemainingPrefill:
        """What there is to compute of a part that has begun or not."""
        step, cache = self._steps.get(part), part.session.cache
        if step is not None:
            return RemainingPrefill(step.left_tokens, step.row.cache.length, part.sample)
        context_tokens = part.prefix_tokens if part.step == 0 or cache is None else cache.length
        return RemainingPrefill(part.count, context_tokens, part.sample)

    def keep_only(self, parts: Collection[StepInput]) -> None:
        """All other parts are over."""
        self._steps = {part: step for part, step in self._steps.items() if part in parts}
        if not self.tokens_under_way():
            self._under_way = None

    def compute(self, slice_: PrefillSlice) -> SliceOutput:
        """On the engine's thread."""
        started_s = time.perf_counter()
        failures: list[StepFailure] = []
        one = self._gathered(slice_, failures) if slice_.begins else self._going_on(slice_)
        self._under_way = None
        done, result = self._advanced(one, slice_.size.layers, failures) if one is not None else ((), None)
        whole = StepOutput((), None, (), (), started_s, 0.0, None)
        if done and result is not None:
            whole = drawn(self._engine, done, result, started_s)
        else:
            self._engine.to_host(())  # what is learnt of a piece is its time, and not that of its launch
        taken_s = time.perf_counter() - started_s
        self._computed_s += taken_s
        is_complete = one is not None and len(one.steps) == len(slice_.parts) and not failures
        if not done and not failures:
            return SliceOutput(None, taken_s, is_complete)
        failures += whole.failures
        whole = replace(whole, compute_s=self._computed_s, failures=tuple(failures))
        self._computed_s = 0.0
        return SliceOutput(whole, taken_s, is_complete)

    def _gathered(self, slice_: PrefillSlice, failures: list[StepFailure]) -> partial_step.SliceBatch | None:
        """The tokens of those that have not ended, before their first layer."""
        begun: list[StepInput] = []
        tokens: list[int] = []
        for part, count in zip(slice_.parts, slice_.size.tokens, strict=True):
            try:
                if self._begin(part):
                    begun.append(part)
                    tokens.append(count)
            except Exception as error:  # noqa: BLE001 - a session's boundary: the others' parts go on without it
                failures.append(StepFailure(part, error))
        return self._gather(begun, tokens, failures) if begun else None

    def _begin(self, part: StepInput) -> bool:
        """The engine has the part from now on; False: its session has ended."""
        cache = part.session.cache
        if cache is None or cache.closed:
            return False
        if part not in self._steps:
            if part.step == 0:
                self._engine.begin_behind(cache, part.prefix_tokens)
            rows = Rows(cache, part.count, part.token_ids, part.sample)
            self._steps[part] = self._engine.begin_partial(part.session.span, rows, part.hidden)
        return True

    def _gather(
        self, parts: Sequence[StepInput], tokens: Sequence[int], failures: list[StepFailure]
    ) -> partial_step.SliceBatch | None:
        """In one piece as many as can be: the KV cache may have no room for all at once. The others come later."""
        try:
            return self._engine.gather_slice([self._steps[part] for part in parts], tokens)
        except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
            if len(parts) == 1:
                failures.append(StepFailure(parts[0], error))
                return None
        half = len(parts) // 2
        first = self._gather(parts[:half], tokens[:half], failures)
        return first or self._gather(parts[half:], tokens[half:], failures)

    def _going_on(self, slice_: PrefillSlice) -> partial_step.SliceBatch | None:
        """What is between layers of those that have not ended."""
        live = {self._steps[part] for part in slice_.parts if not has_ended(part)}
        one = self._under_way
        if one is None or live.issuperset(one.steps):
            return one
        kept = [place for place, step in enumerate(one.steps) if step in live]
        return one.of(kept) if kept else None

    def _advanced(
        self, slice_: partial_step.SliceBatch, layers: int, failures: list[StepFailure]
    ) -> tuple[tuple[StepInput, ...], Tensor | None]:
        """Takes the piece through the layers, without those that fail. Returns the parts that are through, and what
        the engine gave for them."""
        parts = {step: part for part, step in self._steps.items()}
        failed: list[tuple[PartialStep, Exception]] = []
        ways = _advance(self._engine, slice_, layers, failed)
        failures += (StepFailure(parts[step], error) for step, error in failed)
        going_on = [one for one, _, _ in ways if one.layer < one.steps[0].span.stop]
        self._under_way = join_slice_batches(going_on) if going_on else None
        results = [result for _, _, result in ways if result is not None]
        result = results[0] if len(results) == 1 else torch.cat(results) if results else None
        return tuple(parts[step] for _, through, _ in ways for step in through), result


_Advanced = tuple[partial_step.SliceBatch, tuple[PartialStep, ...], Tensor | None]
"""A piece that was advanced, and as `SlicingEngine.advance_slice` returns it."""


def _advance(
    engine: SlicingEngine,
    slice_: partial_step.SliceBatch,
    layers: int,
    failed: list[tuple[PartialStep, Exception]],
) -> list[_Advanced]:
    """The piece as a whole, or in parts if it cannot be taken through the layers as a whole."""
    lengths = [step.row.cache.length for step in slice_.steps]
    try:
        return [(slice_, *engine.advance_slice(slice_, layers))]
    except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
        if len(slice_.steps) == 1:
            failed.append((slice_.steps[0], error))
            return []
    kept = []
    for place, (step, length) in enumerate(zip(slice_.steps, lengths, strict=True)):
        try:
            if step.row.cache.length > length:
                step.row.cache.truncate(length, same_tokens=True)
        except Exception as error:  # noqa: BLE001 - a session's boundary, as above
            failed.append((step, error))
        else:
            kept.append(place)
    halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    return [one for half in halves if half for one in _advance(engine, slice_.of(half), layers, failed)]


def has_ended(part: StepInput) -> bool:
    """Whether the part's session has ended, as far as its cache knows."""
    return part.session.cache is None or part.session.cache.closed
