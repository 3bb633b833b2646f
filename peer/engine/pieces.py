"""Pieces of prompts at the engine: what it has of the parts that have begun, and what comes of them.

What is wrong with one session of a piece is its own, as in `steps`: the others get what they would have got.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from molink.peer.engine.steps import StepFailure, StepInput, StepOutput, drawn
from molink.peer.scheduling.prefill_slices import PartLeft, PieceSize
from molink.shards.batching import partial_step
from molink.shards.batching.engine import Engine
from molink.shards.batching.partial_step import Rows, UnfinishedStep, joined


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is computed next of parts of prompts."""

    parts: tuple[StepInput, ...]
    left: tuple[PartLeft, ...]
    """Of each."""
    size: PieceSize
    begins: bool
    """Whether these tokens have not been through any layer."""


@dataclass(frozen=True, slots=True, eq=False)
class PieceOutput:
    """What came of a piece."""

    whole: StepOutput | None
    """Of the parts that it was the last piece of, and of those that failed, if there are some."""
    taken_s: float
    is_complete: bool
    """Whether it is the time of what was to be computed: nobody was left out, or failed."""


class BegunParts:
    """Owner of what the engine has of parts that have begun.

    `compute` runs on the engine's thread; all else on the event loop, while that does not.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: dict[StepInput, UnfinishedStep] = {}
        self._under_way: partial_step.Piece | None = None
        """Tokens between layers."""
        self._computed_s = 0.0
        """Of pieces since a part was through."""

    @property
    def layers_under_way(self) -> int:
        """Those that are left for the tokens between layers; 0 if there are none."""
        piece = self._under_way
        return 0 if piece is None else piece.steps[0].span.stop - piece.layer

    def tokens_under_way(self) -> dict[StepInput, int]:
        """Whose tokens are between layers, and how many."""
        if self._under_way is None:
            return {}
        parts = {step: part for part, step in self._steps.items()}
        tokens = zip(self._under_way.steps, self._under_way.tokens, strict=True)
        return {parts[step]: count for step, count in tokens if step in parts}

    def left(self, part: StepInput) -> PartLeft:
        """What there is to compute of a part that has begun or not."""
        step, cache = self._steps.get(part), part.session.cache
        if step is not None:
            return PartLeft(step.left_tokens, step.row.cache.length, part.sample)
        context_tokens = part.prefix_tokens if part.step == 0 or cache is None else cache.length
        return PartLeft(part.count, context_tokens, part.sample)

    def keep(self, parts: Collection[StepInput]) -> None:
        """All other parts are over."""
        self._steps = {part: step for part, step in self._steps.items() if part in parts}
        if not self.tokens_under_way():
            self._under_way = None

    def compute(self, piece: Piece) -> PieceOutput:
        """On the engine's thread."""
        started_s = time.perf_counter()
        failures: list[StepFailure] = []
        one = self._gathered(piece, failures) if piece.begins else self._going_on(piece)
        self._under_way = None
        done, result = self._advanced(one, piece.size.layers, failures) if one is not None else ((), None)
        whole = StepOutput((), None, (), (), started_s, 0.0, None)
        if done and result is not None:
            whole = drawn(self._engine, done, result, started_s)
        else:
            self._engine.to_host(())  # what is learnt of a piece is its time, and not that of its launch
        taken_s = time.perf_counter() - started_s
        self._computed_s += taken_s
        is_complete = one is not None and len(one.steps) == len(piece.parts) and not failures
        if not done and not failures:
            return PieceOutput(None, taken_s, is_complete)
        failures += whole.failures
        whole = replace(whole, compute_s=self._computed_s, failures=tuple(failures))
        self._computed_s = 0.0
        return PieceOutput(whole, taken_s, is_complete)

    def _gathered(self, piece: Piece, failures: list[StepFailure]) -> partial_step.Piece | None:
        """The tokens of those that have not ended, before their first layer."""
        begun: list[StepInput] = []
        tokens: list[int] = []
        for part, count in zip(piece.parts, piece.size.tokens, strict=True):
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
            self._steps[part] = self._engine.begin(part.session.span, rows, part.hidden)
        return True

    def _gather(
        self, parts: Sequence[StepInput], tokens: Sequence[int], failures: list[StepFailure]
    ) -> partial_step.Piece | None:
        """In one piece as many as can be: the KV cache may have no room for all at once. The others come later."""
        try:
            return self._engine.gather([self._steps[part] for part in parts], tokens)
        except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
            if len(parts) == 1:
                failures.append(StepFailure(parts[0], error))
                return None
        half = len(parts) // 2
        first = self._gather(parts[:half], tokens[:half], failures)
        return first or self._gather(parts[half:], tokens[half:], failures)

    def _going_on(self, piece: Piece) -> partial_step.Piece | None:
        """What is between layers of those that have not ended."""
        live = {self._steps[part] for part in piece.parts if not has_ended(part)}
        one = self._under_way
        if one is None or live.issuperset(one.steps):
            return one
        kept = [place for place, step in enumerate(one.steps) if step in live]
        return one.of(kept) if kept else None

    def _advanced(
        self, piece: partial_step.Piece, layers: int, failures: list[StepFailure]
    ) -> tuple[tuple[StepInput, ...], Tensor | None]:
        """Takes the piece through the layers, without those that fail. Returns the parts that are through, and what
        the engine gave for them."""
        parts = {step: part for part, step in self._steps.items()}
        failed: list[tuple[UnfinishedStep, Exception]] = []
        ways = _advance(self._engine, piece, layers, failed)
        failures += (StepFailure(parts[step], error) for step, error in failed)
        going_on = [one for one, _, _ in ways if one.layer < one.steps[0].span.stop]
        self._under_way = joined(going_on) if going_on else None
        results = [result for _, _, result in ways if result is not None]
        result = results[0] if len(results) == 1 else torch.cat(results) if results else None
        return tuple(parts[step] for _, through, _ in ways for step in through), result


_Advanced = tuple[partial_step.Piece, tuple[UnfinishedStep, ...], Tensor | None]
"""A piece that was advanced, and as `Engine.advance` returns it."""


def _advance(
    engine: Engine,
    piece: partial_step.Piece,
    layers: int,
    failed: list[tuple[UnfinishedStep, Exception]],
) -> list[_Advanced]:
    """The piece as a whole, or in parts if it cannot be taken through the layers as a whole."""
    lengths = [step.row.cache.length for step in piece.steps]
    try:
        return [(piece, *engine.advance(piece, layers))]
    except Exception as error:  # noqa: BLE001 - a session's boundary: who it is, is found by trying again
        if len(piece.steps) == 1:
            failed.append((piece.steps[0], error))
            return []
    kept = []
    for place, (step, length) in enumerate(zip(piece.steps, lengths, strict=True)):
        try:
            if step.row.cache.length > length:
                step.row.cache.truncate(length, same_tokens=True)
        except Exception as error:  # noqa: BLE001 - a session's boundary, as above
            failed.append((step, error))
        else:
            kept.append(place)
    halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    return [one for half in halves if half for one in _advance(engine, piece.of(half), layers, failed)]


def has_ended(part: StepInput) -> bool:
    """Whether the part's session has ended, as far as its cache knows."""
    return part.session.cache is None or part.session.cache.closed
