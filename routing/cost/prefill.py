"""Prefill prediction: what the chunks of a prompt take on a circuit, as jobs that pass through a permutation flow shop.

A device computes one chunk after the other, and an uplink sends one after the other: two machines for each stage, with
room for all that waits between them. A chunk is done at a machine when that machine has taken it after the one before,
and the link has brought it (Johnson, Optimal two- and three-stage production schedules, 1954; for any number of
machines in Pinedo, Scheduling, section 6.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.cost.cost import prefill_points
from molink.routing.cost.pipeline import COST, STEP_OVERHEAD_MS, PipelineStage


class PrefillPipeline:
    """Stages of a circuit as arrays, so that many ways to cut a prompt are predicted at once."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = [_StageTimes.of(stage) for stage in stages]
        self._links_ms = np.array([stage.link_ms for stage in stages])
        self._heads_ms = np.array([stage.head_ms for stage in stages])
        """Of the chunk that ends the prompt, and of no other."""

    def prefill_ms(self, cuts: Sequence[IntArray]) -> FloatArray:
        """Of each cut, chunk lengths in order: predicted milliseconds from the head's first step to when the last
        stage has ended and its link, too, has brought the token. No cut is empty, and all have the same sum.

        A chunk is done when it has come, or the one before is done, and its own time has passed: of all k,
        C_k = T_k + max over j <= k of (arrival_j - T_(j-1)), with T the sums of the times so far.
        """
        lengths = np.zeros((len(cuts), max(map(len, cuts))), dtype=np.int64)
        for row, cut in zip(lengths, cuts, strict=True):
            row[: len(cut)] = cut
        came_ms = np.zeros(lengths.shape)
        taken_ms = self._taken_ms(lengths, np.cumsum(lengths, axis=1, dtype=np.float64) - lengths)
        taken_ms[:, lengths == 0] = 0.0
        for number, cut in enumerate(cuts):
            taken_ms[::2, number, len(cut) - 1] += self._heads_ms
        for number, machine_ms in enumerate(taken_ms):
            passed_ms = np.cumsum(machine_ms, axis=1)
            came_ms = passed_ms + np.maximum.accumulate(came_ms - (passed_ms - machine_ms), axis=1)
            if number % 2:
                came_ms += self._links_ms[number // 2]
        done_ms: FloatArray = came_ms[:, -1]
        return done_ms

    def equal_ms(self, counts: IntArray, prompt_tokens: int) -> FloatArray:
        """About `prefill_ms`, for so many chunks of one length each: the first through all machines, the others at the
        slowest's pace. Each is taken to follow half of the others: what the context adds is right in sum."""
        lengths = -(-prompt_tokens // counts)
        taken_ms = self._taken_ms(lengths, (prompt_tokens - lengths) / 2)
        once_ms = float(self._links_ms.sum() + self._heads_ms.sum())
        predicted_ms: FloatArray = taken_ms.sum(axis=0) + once_ms + (counts - 1) * taken_ms.max(axis=0)
        return predicted_ms

    def _taken_ms(self, lengths: IntArray, context_tokens: FloatArray) -> FloatArray:
        """[2 * stages, *lengths]: how long a chunk behind that context occupies each device, and then the uplink behind
        it, but for the head's time. The last stage sends nothing but a token."""
        taken_ms = np.empty((2 * len(self._stages), *lengths.shape))
        for number, stage in enumerate(self._stages):
            taken_ms[2 * number] = stage.compute_ms(lengths, context_tokens)
            taken_ms[2 * number + 1] = stage.row_transfer_ms * lengths
        taken_ms[-1] = 0.0
        return taken_ms


@dataclass(frozen=True, slots=True, eq=False)
class _StageTimes:
    """A stage's `prefill_ms` and `transfer_ms` of many chunks at once, the head's time left out."""

    rows: FloatArray
    """Ascending: at these a layer takes `layer_ms`, in between on the line, beyond `beyond_ms` a row more."""
    layer_ms: FloatArray
    beyond_ms: float
    context_ms: float
    """Of a layer, for each row and token before it."""
    layers: int
    fixed_ms: float
    row_transfer_ms: float

    @classmethod
    def of(cls, stage: PipelineStage) -> Self:
        facts = stage.facts
        points, beyond_ms = prefill_points(facts.layer_latencies, COST, facts.prefill_latencies)
        return cls(
            rows=np.array([point.batch_size for point in points], dtype=np.float64),
            layer_ms=np.array([point.layer_ms for point in points], dtype=np.float64),
            beyond_ms=beyond_ms,
            context_ms=facts.prefill_context_ms / 1000,
            layers=stage.layers,
            fixed_ms=facts.step_ms + stage.embed_ms + STEP_OVERHEAD_MS,
            row_transfer_ms=stage.transfer_ms(1),
        )

    def compute_ms(self, tokens: IntArray, context_tokens: FloatArray) -> FloatArray:
        """How long chunks of so many tokens occupy the device, each behind that context."""
        layer_ms: FloatArray = np.interp(tokens, self.rows, self.layer_ms)
        layer_ms += self.beyond_ms * np.maximum(0.0, tokens - self.rows[-1])
        layer_ms += self.context_ms * tokens * context_tokens
        taken_ms: FloatArray = self.fixed_ms + self.layers * layer_ms
        return taken_ms


def prefill_ms(stages: Sequence[PipelineStage], lengths: Sequence[int]) -> float:
    """As `PrefillPipeline.prefill_ms`, of one cut."""
    return float(PrefillPipeline(stages).prefill_ms([np.array(lengths)])[0])
