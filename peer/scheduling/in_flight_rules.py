"""Chooses how many micro-batches of a circuit are in flight, and how large they may be. Pure.

Decode goes round: a session's next step begins at the head when its token has come back from the tail. Sessions that
travel together are a micro-batch, and several of them keep several stages busy. Too few, and stages wait for links and
for each other; too many, and each stage reads its weights once for each. With n micro-batches an iteration, which is
the time per output token, takes the longer of two: the way of one micro-batch through all stages and links, and the
work of the busiest stage, uplink or host for all n: stages that compute on one host's processors share them.

A session has one row in a step, or with guesses several: what stages compute and links carry is counted in rows.

The rules: `system` is the MoLink system paper's (section 4.1), `transmission` the transmission paper's (section 4.3), a
number is that number, as in the latter's evaluation, and `molink`, ours, predicts an iteration for every number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage

MOST_MICRO_BATCHES = 64
ALIKE = 1.05
"""Of iterations that differ by less, the one with the fewest micro-batches counts: each costs messages, and work of
stages that other circuits and prefills could use, or that share their processors with each other."""
STILL_ALIKE = 1.025
"""Fewer than there are now count only if their iterations differ by less than this: where micro-batches become fewer,
sessions wait for others once, up to an iteration, and numbers that are about as good must not take turns."""


@dataclass(frozen=True, slots=True)
class InFlightPlan:
    """What a rule decides."""

    micro_batches: int
    """How many may be on their way at once."""
    max_sessions: int
    """The most sessions of each."""
    iteration_ms: float
    """Predicted: from one token of a session to its next."""


class Rule(Protocol):
    """How many micro-batches are in flight on a circuit."""

    def __call__(
        self,
        stages: Sequence[PipelineStage],
        sessions: int,
        max_rows: int,
        rows_each: float = 1.0,
        planned: int = 0,
    ) -> InFlightPlan:
        """`sessions` (1 or more) decode along the stages with so many rows each, 1 or with guesses more on average, and
        at most `max_rows` step together. Until now so many micro-batches were `planned`, 0: none."""


def iteration_ms(
    stages: Sequence[PipelineStage], sessions: int, micro_batches: int, rows_each: float = 1.0
) -> float:
    """The predicted time per trip, without guesses per output token, with the sessions spread evenly over the
    micro-batches, 1 or more of each, and so many rows of each session."""
    size, larger = divmod(sessions, micro_batches)
    sizes = [(round((size + 1) * rows_each), larger)] if larger else []
    sizes += [(round(size * rows_each), micro_batches - larger)]
    through_ms = pace_ms = 0.0
    shared_ms: dict[tuple[str, int], float] = {}
    for stage in stages:
        computed = [(stage.decode_ms(rows) + STEP_OVERHEAD_MS, count) for rows, count in sizes]
        sent = [(stage.transfer_ms(rows), count) for rows, count in sizes]
        through_ms += computed[0][0] + sent[0][0] + stage.link_ms
        busy_ms = [sum(taken_ms * count for taken_ms, count in work) for work in (computed, sent)]
        pace_ms = max(pace_ms, *busy_ms)
        if (host := stage.processors) is not None:
            shared_ms[host] = shared_ms.get(host, 0.0) + busy_ms[0] / host[1]
    pace_ms = max(pace_ms, *shared_ms.values()) if shared_ms else pace_ms
    return max(through_ms, pace_ms)


def molink(
    stages: Sequence[PipelineStage],
    sessions: int,
    max_rows: int,
    rows_each: float = 1.0,
    planned: int = 0,
) -> InFlightPlan:
    """The smallest number that is predicted to give each session its next token as soon as any, but for 5 %.

    The sessions are given, so that is the highest throughput too. All numbers are predicted, not only those up to the
    first that gets worse: measured profiles have steps. Of more that are planned already as many stay as give it sooner
    by half of that.
    """
    counts = range(_fewest(sessions, max_rows, rows_each), _most(sessions, max_rows, rows_each) + 1)
    predicted = [_plan(stages, sessions, count, rows_each) for count in counts]
    best_ms = min(one.iteration_ms for one in predicted)
    fewest = next(one for one in predicted if one.iteration_ms <= best_ms * ALIKE)
    now = predicted[min(max(planned, counts[0]), counts[-1]) - counts[0]]
    if fewest.micro_batches >= now.micro_batches or now.iteration_ms > best_ms * ALIKE:
        return fewest
    fewer = predicted[: predicted.index(now)]
    return next((one for one in fewer if one.iteration_ms <= best_ms * STILL_ALIKE), now)


def system(
    stages: Sequence[PipelineStage],
    sessions: int,
    max_rows: int,
    rows_each: float = 1.0,
    planned: int = 0,  # noqa: ARG001 - as every rule
) -> InFlightPlan:
    """From one micro-batch upward, as long as one more fits into the bubble that is left.

    As we read it: with N micro-batches the busiest stage computes N times in an iteration, and idles until the first
    comes round again. That residual bubble must hold one more computation. The cap on their size is an even share.
    """
    count = _fewest(sessions, max_rows, rows_each)
    while count < _most(sessions, max_rows, rows_each):
        rows = round(-(-sessions // (count + 1)) * rows_each)
        steps_ms = [stage.decode_ms(rows) + STEP_OVERHEAD_MS for stage in stages]
        through_ms = sum(steps_ms) + sum(stage.transfer_ms(rows) + stage.link_ms for stage in stages)
        if (count + 1) * max(steps_ms) > through_ms:
            break
        count += 1
    return _plan(stages, sessions, count, rows_each)


def transmission(
    stages: Sequence[PipelineStage],
    sessions: int,
    max_rows: int,
    rows_each: float = 1.0,
    planned: int = 0,  # noqa: ARG001 - as every rule
) -> InFlightPlan:
    """The best of N to 2 N for N stages, or as many as there are sessions if these are fewer."""
    fewest, most = _fewest(sessions, max_rows, rows_each), _most(sessions, max_rows, rows_each)
    counts = {min(max(fewest, count), most) for count in range(len(stages), 2 * len(stages) + 1)}
    predicted = [_plan(stages, sessions, count, rows_each) for count in sorted(counts)]
    return min(predicted, key=lambda one: one.iteration_ms)


def fixed(micro_batches: int) -> Rule:
    """Always that number, or as many as there are sessions. Raises ValueError if it is not 1 to 64."""
    if not 1 <= micro_batches <= MOST_MICRO_BATCHES:
        raise ValueError(f"1 to {MOST_MICRO_BATCHES} micro-batches can circulate, not {micro_batches}")

    def rule(
        stages: Sequence[PipelineStage],
        sessions: int,
        max_rows: int,
        rows_each: float = 1.0,
        planned: int = 0,  # noqa: ARG001 - as every rule
    ) -> InFlightPlan:
        most = min(micro_batches, _most(sessions, max_rows, rows_each))
        return _plan(stages, sessions, max(_fewest(sessions, max_rows, rows_each), most), rows_each)

    return rule


RULES: Mapping[str, Rule] = MappingProxyType(
    {"molink": molink, "system": system, "transmission": transmission}
)


def rule_named(name: str) -> Rule:
    """The rule of that name, or that number as a rule. Raises ValueError if it is neither."""
    if name in RULES:
        return RULES[name]
    if not (name.isascii() and name.isdecimal()):
        raise ValueError(f"{name!r} is neither a number nor one of {', '.join(RULES)}")
    return fixed(int(name))


def _plan(
    stages: Sequence[PipelineStage], sessions: int, micro_batches: int, rows_each: float
) -> InFlightPlan:
    predicted_ms = iteration_ms(stages, sessions, micro_batches, rows_each)
    return InFlightPlan(micro_batches, -(-sessions // micro_batches), predicted_ms)


def _fewest(sessions: int, max_rows: int, rows_each: float) -> int:
    return min(sessions, -(-sessions // max(1, int(max_rows / rows_each))))


def _most(sessions: int, max_rows: int, rows_each: float) -> int:
    return max(_fewest(sessions, max_rows, rows_each), min(sessions, MOST_MICRO_BATCHES))
