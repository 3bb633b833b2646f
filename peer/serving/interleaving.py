"""Parts of prompts that are computed piece by piece, with decode steps in between (`prefill_pieces`)."""

import time
from collections import deque
from dataclasses import dataclass, replace

from molink.peer.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.prefill_pieces import PartLeft, PieceSize, PieceSizes
from molink.peer.serving.steps import StepInput, StepOutput, drawn
from molink.shards.engine import Engine
from molink.shards.unfinished_step import Rows, UnfinishedStep

DECODING_S = 1.0
"""So long after a decode step the next one is taken to be on its way: along its circuit, maybe."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What is computed next of a part of a prompt."""

    part: StepInput
    size: PieceSize
    context_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class PieceOutput:
    """What came of a piece."""

    whole: StepOutput | None
    """Of the part, if this was its last piece."""
    taken_s: float


class Interleaving:
    """Owner of the parts that have begun, or wait for one that has.

    `compute` runs on the engine's thread, all else on the event loop.
    """

    def __init__(self, engine: Engine, sizes: PieceSizes) -> None:
        self._engine = engine
        self._sizes = sizes
        self._parts: deque[StepInput] = deque()
        self._begun: tuple[StepInput, UnfinishedStep] | None = None
        """What the engine has of the first part."""
        self._computing = False
        self._computed_s = 0.0
        self._decoded_s = float("-inf")
        self.is_due = False
        """Whether the next piece goes before decode steps that wait."""

    def __len__(self) -> int:
        return len(self._parts)

    def keys(self) -> set[LeaseKey]:
        """The sessions whose parts these are."""
        return {one.session.key for one in self._parts}

    def take(self, inputs: tuple[StepInput, ...]) -> tuple[StepInput, ...]:
        """What of a micro-batch is to be computed at once; the rest is kept for pieces."""
        now_s = time.perf_counter()
        decodes = tuple(one for one in inputs if not one.prefill)
        if decodes:
            self._decoded_s = now_s
        elif now_s - self._decoded_s > DECODING_S:
            return inputs
        self._parts += (one for one in inputs if one.prefill)
        return decodes

    def decoded(self, work: StepWork, taken_s: float) -> None:
        """A decode step has been computed. If parts wait, a piece is due."""
        self.is_due = bool(self._parts)
        self._sizes.decoded(work, taken_s * 1000, beside=self.is_due)

    def next(self) -> Piece:
        """The first part's next piece."""
        part = self._parts[0]
        cache = part.session.cache
        if self._begun is not None and self._begun[0] is part:
            left = _left(self._begun[1])
        else:
            context_tokens = part.prefix_tokens if part.step == 0 or cache is None else cache.length
            left = PartLeft(len(part.session.span), part.count, context_tokens)
        self.is_due = False
        self._computing = True
        return Piece(part, self._sizes.next(left), left.context_tokens)

    def compute(self, piece: Piece) -> PieceOutput:
        """On the engine's thread."""
        started_s = time.perf_counter()
        part, cache = piece.part, piece.part.session.cache
        if cache is None or cache.closed:
            return PieceOutput(StepOutput((), None, (), (), started_s, 0.0, None), 0.0)
        if self._begun is None or self._begun[0] is not part:
            if part.step == 0:
                self._engine.begin_behind(cache, part.prefix_tokens)
            rows = Rows(cache, part.count, part.token_ids, part.sample)
            self._begun = part, self._engine.begin(part.session.span, rows, part.hidden)
            self._computed_s = 0.0
        result = self._engine.advance(self._begun[1], piece.size.tokens, piece.size.layers)
        whole = None if result is None else drawn(self._engine, (part,), result, started_s)
        if whole is None:
            self._engine.to_host(())  # what is learnt of a piece is its time, and not that of its launch
        taken_s = time.perf_counter() - started_s
        self._computed_s += taken_s
        return PieceOutput(whole and replace(whole, compute_s=self._computed_s), taken_s)

    def computed(self, piece: Piece, output: PieceOutput | Exception) -> StepOutput | Exception | None:
        """What came of the part, if it is through or has failed and its session has not ended."""
        self._computing = False
        if isinstance(output, PieceOutput):
            self._sizes.computed(piece.size, piece.context_tokens, output.taken_s * 1000)
        whole = output if isinstance(output, Exception) else output.whole
        ended = not self._parts or self._parts[0] is not piece.part
        if ended or whole is not None:
            self._begun = None
        if ended or whole is None:
            return None
        self._parts.popleft()
        return whole

    def forget(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._parts = deque(one for one in self._parts if one.session.key != key)
        if not self._computing and self._begun is not None and self._begun[0] not in self._parts:
            self._begun = None


def _left(step: UnfinishedStep) -> PartLeft:
    piece = step.piece
    under_way = None if piece is None else PieceSize(piece.tokens, step.span.stop - piece.layer)
    return PartLeft(len(step.span), step.left_tokens, step.row.cache.length, under_way)
