"""Executes slices of prompts on the engine, and keeps the partial steps of the parts that have begun.

What is wrong with one session of a piece is its own, as in `steps`: the others get what they would have got.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from molink.peer.compute.backend import SlicingEngine, StageEngine
from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.steps import (
    StepFailure,
    StepInput,
    StepOutput,
    StepPayload,
    drawn,
    scores_of,
    settle_draws,
)
from molink.peer.hop.layered_prefill import PrefillSlice
from molink.shards.batching import partial_step
from molink.shards.batching.partial_step import PartialStep, Rows, join_slice_batches

StepSlice: TypeAlias = PrefillSlice[ServedSession, StepPayload]
"""So many tokens of some parts of prompts through so many layers."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceOutput:
    """The output of a slice."""

    whole: StepOutput | None
    """Of the parts that it was the last piece of, and of those that failed, if there are some."""
    left: tuple[tuple[StepInput, int, int], ...]
    """Of the other parts that have begun: tokens that are not through, and those of them that are between layers."""
    layers_left: int
    """For the tokens between layers."""
    taken_s: float
    is_complete: bool
    """Whether it is the time of what was to be computed: nobody was left out, or failed, and no prompt was scored."""


def slice_executor_of(engine: StageEngine) -> "SliceExecutor | None":
    """The executor of an engine's slices; None where it computes none."""
    if not isinstance(engine, SlicingEngine):
        return None
    executor = SliceExecutor(engine)
    engine.let_finish_slices(executor.finish)
    return executor


class SliceExecutor:
    """Executes slices, and owns the tokens between layers. On the engine's thread."""

    def __init__(self, engine: SlicingEngine) -> None:
        self._engine = engine
        self._under_way: partial_step.SliceBatch | None = None
        """Tokens between layers."""
        self._parts: tuple[StepInput, ...] = ()
        """Whose these tokens are, and others of their slice."""
        self._finished: _Finished | None = None
        """What came of tokens that were taken through all layers before they were asked for."""
        self._computed_s = 0.0
        """Of slices since a part was through."""

    def drop(self) -> None:
        """Nobody needs the tokens between layers any more. Called while nothing is computed."""
        self._under_way, self._parts, self._finished = None, (), None

    def finish(self) -> bool:
        """Takes the tokens between layers through all of them now, for `compute` to give what came of them when it is
        asked to go on; whether there were some. For an engine whose KV cache is full of them."""
        one, self._under_way = self._under_way, None
        if one is None:
            return False
        started_s = time.perf_counter()
        finished = _Finished([], [])
        sessions = {part.payload.partial: part.session for part in self._parts}
        for place, step in enumerate(one.steps):  # one by one: who has ended by then is left out
            # where its epoch is over, its cache may be the next one's
            if not sessions[step].ended and not step.row.cache.closed:
                layers = step.span.stop - one.layer
                finished.ways.extend(_advance(self._engine, one.of([place]), layers, finished.failed))
        self._finished = finished
        self._computed_s += time.perf_counter() - started_s
        return True

    def compute(self, slice_: StepSlice) -> SliceOutput:
        """Computes the slice."""
        started_s = time.perf_counter()
        failures: list[StepFailure] = []
        finished, self._finished = self._finished, None
        one = self._gathered(slice_, failures) if slice_.begins else self._going_on(slice_)
        self._under_way = None
        if one is not None:
            finished = _Finished([], [])
            finished.ways.extend(_advance(self._engine, one, slice_.size.layers, finished.failed))
        done, result = self._through(slice_, finished, failures) if finished is not None else ((), None)
        whole = StepOutput((), None, (), (), started_s, 0.0, None)
        if done and result is not None:
            whole = drawn(self._engine, done, result, started_s)
        else:
            self._engine.to_host(())  # what is learnt of a slice is its time, and not that of its launch
        taken_s = time.perf_counter() - started_s
        self._computed_s += taken_s
        is_complete = one is not None and len(one.steps) == len(slice_.parts) and not failures
        is_complete = is_complete and not any(map(scores_of, slice_.parts))
        if not done and not failures:
            return SliceOutput(None, *self._left(slice_, ()), taken_s, is_complete)
        failures += whole.failures
        whole = replace(whole, compute_s=self._computed_s, failures=tuple(failures))
        self._computed_s = 0.0
        return SliceOutput(whole, *self._left(slice_, whole.everyone), taken_s, is_complete)

    def _left(
        self, slice_: StepSlice, over: Collection[StepInput]
    ) -> tuple[tuple[tuple[StepInput, int, int], ...], int]:
        """What is left of the slice's parts that are not over, and the layers for what is between some."""
        one = self._under_way
        between = {} if one is None else dict(zip(one.steps, one.tokens, strict=True))
        left = tuple(
            (part, step.left_tokens, between.get(step, 0))
            for part in slice_.parts
            if part not in over and (step := part.payload.partial) is not None
        )
        return left, 0 if one is None else one.steps[0].span.stop - one.layer

    def _gathered(self, slice_: StepSlice, failures: list[StepFailure]) -> partial_step.SliceBatch | None:
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
        payload = part.payload
        if payload.partial is None:
            if cache.length != part.position:
                self._engine.begin_behind(cache, part.position)
            settle_draws(part)
            rows = Rows(cache, part.tokens, payload.token_ids, part.draws, scores=scores_of(part))
            payload.partial = self._engine.begin_partial(part.span, rows, payload.inputs())
        return True

    def _gather(
        self, parts: Sequence[StepInput], tokens: Sequence[int], failures: list[StepFailure]
    ) -> partial_step.SliceBatch | None:
        """In one piece as many as can be: the KV cache may have no room for all at once. The others come later."""
        try:
            steps = [part.payload.partial for part in parts if part.payload.partial is not None]
            return self._engine.gather_slice(steps, tokens)
        except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
            if len(parts) == 1:
                failures.append(StepFailure(parts[0], error))
                return None
        half = len(parts) // 2
        first = self._gather(parts[:half], tokens[:half], failures)
        return first or self._gather(parts[half:], tokens[half:], failures)

    def _going_on(self, slice_: StepSlice) -> partial_step.SliceBatch | None:
        """What is between layers of those that have not ended."""
        live = {part.payload.partial for part in slice_.parts if not _has_ended(part)}
        one = self._under_way
        if one is None or live.issuperset(one.steps):
            return one
        kept = [place for place, step in enumerate(one.steps) if step in live]
        return one.of(kept) if kept else None

    def _through(
        self, slice_: StepSlice, finished: "_Finished", failures: list[StepFailure]
    ) -> tuple[tuple[StepInput, ...], Tensor | None]:
        """Keeps what is between layers. Returns the parts that are through, and what the engine gave for them."""
        parts = {step: part for part in slice_.parts if (step := part.payload.partial) is not None}
        failures += (StepFailure(parts[step], error) for step, error in finished.failed if step in parts)
        ways = [way for way in finished.ways if parts.keys() >= set(way[0].steps)]
        going_on = [one for one, _, _ in ways if one.layer < one.steps[0].span.stop]
        self._under_way, self._parts = (
            (join_slice_batches(going_on), slice_.parts) if going_on else (None, ())
        )
        results = [result for _, _, result in ways if result is not None]
        result = results[0] if len(results) == 1 else torch.cat(results) if results else None
        return tuple(parts[step] for _, through, _ in ways for step in through), result


_Advanced = tuple[partial_step.SliceBatch, tuple[PartialStep, ...], Tensor | None]
"""A piece that was advanced, and as `SlicingEngine.advance_slice` returns it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """What came of tokens that were taken through layers."""

    ways: list[_Advanced]
    failed: list[tuple[PartialStep, Exception]]


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


def _has_ended(part: StepInput) -> bool:
    """Whether the part's session has ended, as far as its cache knows."""
    return part.session.cache is None or part.session.cache.closed
