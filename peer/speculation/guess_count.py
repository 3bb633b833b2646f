"""How many guesses travel with a session's next token: as many as bring those who share the circuit the most predicted
tokens in a time, which is the least time per token. Pure.

A trip of k guesses brings the expected 1 + q1 + ... + qk tokens, where qi is the chance that the first i are right, and
costs every hop k rows more. While distance is what takes the time, these are nearly free. Where engines or uplinks are
the bottleneck, every row delays the other sessions, so that few guesses pay, or none; since their tokens count like
one's own, no session takes more from the others than it gains. What is not guessed gains nothing, and is made to wait
by a tenth at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul

from molink.peer.scheduling.trip_load import ALONE, BatchLoad, TripLoad
from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage

BYSTANDERS_WAIT = 1.1
"""By this factor guesses may lengthen the trips of sessions whose tokens nobody guesses."""
NOBODY = BatchLoad(0, 0.0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What one micro-batch of some number of rows takes along a circuit."""

    way_ms: float
    """Once round, if it never waits."""
    computed_ms: float
    """Of that, the engines' part."""
    sent_ms: float
    """How long it occupies the uplink that it occupies longest."""
    busy_ms: tuple[float, ...]
    """How long it occupies each engine, each uplink, and the processors of each host that several stages share."""


class CircuitCosts:
    """Holds what micro-batches take along one circuit, by rows, as far as that has been asked."""

    def __init__(self, stages: Sequence[PipelineStage]) -> None:
        self._stages = stages
        self._by_rows: dict[int, StepCosts] = {}

    def of_rows(self, rows: int) -> StepCosts:
        """Of a micro-batch of so many rows, 1 or more."""
        if (found := self._by_rows.get(rows)) is None:
            found = self._by_rows[rows] = _costs(self._stages, rows)
        return found

    def busy_ms(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """As `StepCosts.busy_ms`, of micro-batches of so many rows together; empty if there are none."""
        return tuple(map(sum, zip(*[self.of_rows(rows).busy_ms for rows in sizes], strict=True)))

    def pace_ms(self, rows: int, others_ms: Sequence[float] = ()) -> float:
        """The work of whatever is busiest with a micro-batch of so many rows, and with the others' work (`busy_ms`)."""
        own_ms = self.of_rows(rows).busy_ms
        return max(map(add, own_ms, others_ms)) if others_ms else max(own_ms)

    def trip_ms(self, rows: int, other_sizes: Sequence[int] = ()) -> float:
        """From a trip's beginning to the next one's: the micro-batch's way, or the work for it and all others of
        whatever is busiest."""
        return max(self.of_rows(rows).way_ms, self.pace_ms(rows, self.busy_ms(other_sizes)))


def guess_count(
    chances: Sequence[float], costs: CircuitCosts, load: TripLoad = ALONE, guess_ms: float = 0.0
) -> int:
    """How many of the guesses travel, given how likely each is right if those before it are: the first so many. Each
    is still to be guessed, which takes the head so long.

    What guesses lengthen a trip by counts as many times as it was measured to be more than predicted. Guessing for all
    sessions is one head's work: who travels along waits for it, and no trip takes less than all of it.

    Where trips take longer than predicted because they wait for engines, a row counts for what it makes others wait as
    well: in a queue the delay of all that one piece of work causes is that work over the idle share. Where prompts are
    on their way, each of them waits for what guesses take of the uplink. Where tokens of other sessions are not
    guessed, all guesses together may make a trip BYSTANDERS_WAIT times as long at most.
    """
    beside = NOBODY if load.beside is None else load.beside
    others_ms = costs.busy_ms([one.rows for one in load.others])
    other_ways_ms = [(one.tokens, costs.of_rows(one.rows).way_ms + load.waited_ms) for one in load.others]
    first = costs.of_rows(beside.rows + 1)
    crowding = load.waited_ms / first.computed_ms if first.computed_ms else 0.0

    def trip_ms(rows: int, others_ms: Sequence[float]) -> tuple[float, float]:
        """What a trip takes, and what passes between two of those micro-batches at least."""
        own = costs.of_rows(rows)
        way_ms = own.way_ms + load.waited_ms + crowding * (own.computed_ms - first.computed_ms)
        pace_ms = costs.pace_ms(rows, others_ms) + load.waited_ms
        return max(way_ms, pace_ms), pace_ms

    unguessed_ms = trip_ms(beside.sessions + 1, costs.busy_ms([one.sessions for one in load.others]))[0]
    most_ms = BYSTANDERS_WAIT * unguessed_ms if load.has_bystanders else math.inf
    others_guessing_ms = sum([one.guessing_ms for one in load.others])
    best, most_tokens_per_ms, tokens = 0, 0.0, beside.tokens
    for guesses, together in enumerate(accumulate(chances, mul, initial=1.0)):
        tokens += together
        rows = beside.rows + 1 + guesses
        taken_ms, pace_ms = trip_ms(rows, others_ms)
        guessing_ms = beside.guessing_ms + guesses * guess_ms
        pace_ms = max(pace_ms, others_guessing_ms + guessing_ms)
        taken_ms += (load.lengthens - 1) * max(0.0, taken_ms - unguessed_ms) + guessing_ms
        taken_ms = max(taken_ms, pace_ms)
        if guesses and taken_ms > most_ms:
            break
        delayed_ms = load.prompts * (costs.of_rows(rows).sent_ms - first.sent_ms)
        tokens_per_ms = tokens / (taken_ms + delayed_ms)
        for others, other_ms in other_ways_ms:
            tokens_per_ms += others / max(other_ms, pace_ms)
        if tokens_per_ms > most_tokens_per_ms:
            best, most_tokens_per_ms = guesses, tokens_per_ms
    return best


def predicted_ms(costs: CircuitCosts, guesses: int, load: TripLoad = ALONE) -> float:
    """What a trip with so many guesses takes beside that load, if nothing waits for what others use."""
    beside_rows = 0 if load.beside is None else load.beside.rows
    return costs.trip_ms(beside_rows + 1 + guesses, [one.rows for one in load.others])


def lengthened_ms(costs: CircuitCosts, guesses: int, load: TripLoad = ALONE) -> float:
    """How much of `predicted_ms` guesses make, those of others too."""
    beside_sessions = 0 if load.beside is None else load.beside.sessions
    without_ms = costs.trip_ms(beside_sessions + 1, [one.sessions for one in load.others])
    return max(0.0, predicted_ms(costs, guesses, load) - without_ms)


def _costs(stages: Sequence[PipelineStage], rows: int) -> StepCosts:
    computed = [stage.decode_ms(rows) + STEP_OVERHEAD_MS for stage in stages]
    sent = [stage.transfer_ms(rows) for stage in stages]
    hosts: dict[str, float] = {}
    for stage, computed_ms in zip(stages, computed, strict=True):
        if (host := stage.processors) is not None:
            hosts[host[0]] = hosts.get(host[0], 0.0) + computed_ms / host[1]
    way_ms = sum(computed) + sum(sent) + sum(stage.link_ms for stage in stages)
    return StepCosts(way_ms, sum(computed), max(sent), (*computed, *sent, *hosts.values()))
