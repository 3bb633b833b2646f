"""Limits the micro-batches in flight on each circuit as `in_flight_rules.py` says: who takes the next step now. Pure.

A session whose token has come back is ready. It goes on at once if fewer micro-batches of its circuit are on their way
than the rule allows, and otherwise with the next that comes back; all that are ready go together, up to the rule's
size, those first that travel already. Only one micro-batch of a circuit is at the head's own engine at a time, or two
would become one there.

Nobody waits longer for the others than an iteration takes, as predicted or as the last one did; a session that is alone
on its circuit never waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from molink.peer.scheduling.in_flight_rules import InFlightPlan, Rule
from molink.peer.scheduling.trip_load import NO_GUESSES, BatchLoad, TripBegun, TripLoad
from molink.peer.scheduling.trip_times import TripTimes
from molink.routing.cost.pipeline import PipelineStage
from molink.shards.spec import Span

Circuit: TypeAlias = tuple[tuple[str, Span], ...]
"""Who serves what, in order: peer ids and spans."""
SessionT = TypeVar("SessionT")
MOST_HELD_S = 1.0
"""No session is held longer, whatever was predicted."""
ROWS_WEIGHT = 0.1
"""Of the latest trips of all sessions in the average of their rows."""
OTHER_ROWS = 1.25
"""With so many times as many rows, or as few, another number of micro-batches may be the best."""


@dataclass(slots=True)
class _MicroBatch(Generic[SessionT]):
    """Sessions that took a step together, those whose token has not come back."""

    begun_s: float
    awaited: set[SessionT]
    rows: int
    tokens: float
    """That its trips are expected to bring."""
    guesses: int = 0
    """Of the rows."""
    predicted_ms: float = 0.0
    """0: nobody has predicted it."""
    lengthened_ms: float = 0.0
    """Of that, what guesses make."""
    guessing_ms: float = 0.0
    """That guessing took, before it left."""


@dataclass(slots=True)
class _CircuitState(Generic[SessionT]):
    """Holds the sessions that decode along one circuit."""

    circuit: Circuit
    stages: Sequence[PipelineStage]
    sessions: dict[SessionT, bool] = field(default_factory=dict)
    """Whether each one's tokens are guessed."""
    ready: dict[SessionT, float] = field(default_factory=dict)
    """Since when, longest first."""
    newcomers: set[SessionT] = field(default_factory=set)
    """Who has not been let go yet."""
    in_flight: list[_MicroBatch[SessionT]] = field(default_factory=list)
    at_head: set[SessionT] = field(default_factory=set)
    """Of the micro-batch that was let go last, until the head has computed it."""
    plan: InFlightPlan | None = None
    """The latest one."""
    iteration_s: float = 0.0
    """Of the micro-batch that came back last."""
    times: TripTimes = field(default_factory=TripTimes)
    """What micro-batches took, beside what was predicted."""
    rows_each: float = 1.0
    """Of a session's trips, of late: with guesses more than one."""
    planned_rows: float = 0.0
    """For which `plan` was made; 0: there is to be another one, for as many sessions as there are now."""


class InFlightLimit(Generic[SessionT]):
    """Limits how many micro-batches of the sessions whose head is here are in flight, circuit by circuit."""

    def __init__(self, rule: Rule, max_rows: int) -> None:
        """`max_rows`: of a micro-batch, at most."""
        self._rule = rule
        self._max_rows = max_rows
        self._states: dict[Circuit, _CircuitState[SessionT]] = {}
        self._state_of: dict[SessionT, _CircuitState[SessionT]] = {}

    def __len__(self) -> int:
        """Sessions that decode along a circuit, as far as is known here."""
        return len(self._state_of)

    def __contains__(self, session: SessionT) -> bool:
        """Whether the session decodes along a circuit, as far as is known here."""
        return session in self._state_of

    def add_session(
        self, session: SessionT, circuit: Circuit, stages: Sequence[PipelineStage], *, guessed: bool = False
    ) -> None:
        """A session decodes along that circuit from now on. `guessed`: somebody guesses its tokens."""
        state = self._states.setdefault(circuit, _CircuitState(circuit, stages))
        state.stages = stages
        state.sessions[session] = guessed
        state.newcomers.add(session)
        state.planned_rows = 0.0
        self._state_of[session] = state

    def record_return(self, session: SessionT, now_s: float) -> None:
        """The token of a session that was added is back, and there is a next step: due at the next `release_ready`."""
        state = self._state_of[session]
        if (done := _remove(state, session)) is not None:
            state.iteration_s = now_s - done.begun_s
            if done.predicted_ms:
                taken_ms = 1000 * state.iteration_s - done.guessing_ms
                state.times.record(done.predicted_ms, done.lengthened_ms, taken_ms)
        state.ready.setdefault(session, now_s)

    def record_computed(self, keys: Iterable[SessionT]) -> None:
        """The head has computed steps of these sessions, known here or not."""
        for session in keys:
            if (state := self._state_of.get(session)) is not None:
                state.at_head.discard(session)

    def forget_session(self, session: SessionT) -> None:
        """The session has ended, wherever its step is. No error if it never joined."""
        state = self._state_of.pop(session, None)
        if state is None:
            return
        _remove(state, session)
        state.ready.pop(session, None)
        state.sessions.pop(session, None)
        state.newcomers.discard(session)
        state.planned_rows = 0.0
        if not state.sessions:
            del self._states[state.circuit]

    def release_ready(self, now_s: float) -> tuple[SessionT, ...]:
        """The sessions that take their next step now; those of one circuit together."""
        released: list[SessionT] = []
        for state in self._states.values():
            if state.ready and not state.at_head and self._may_release(state, now_s):
                batch = self._next_batch(state, now_s)
                state.newcomers.difference_update(batch)
                for session in batch:
                    del state.ready[session]
                state.in_flight.append(_MicroBatch(now_s, set(batch), len(batch), len(batch)))
                state.at_head = set(batch)
                released += batch
        return tuple(released)

    def load_of(self, session: SessionT, prompts: int = 0) -> TripLoad:
        """What shares the circuit with the trip of a session that was released last, and so many prompts: others of its
        micro-batch count as what has been recorded of theirs, and as one row before that."""
        state = self._state_of[session]
        own = next(batch for batch in reversed(state.in_flight) if session in batch.awaited)
        beside = None
        if own.rows > 1:
            beside = BatchLoad(own.rows - 1, own.tokens - 1, own.guesses, own.guessing_ms)
        others = tuple(
            BatchLoad(one.rows, one.tokens, one.guesses, one.guessing_ms)
            for one in state.in_flight
            if one is not own
        )
        has_bystanders, times = not all(state.sessions.values()), state.times
        return TripLoad(beside, others, times.waited_ms, has_bystanders, times.lengthens, prompts)

    def record_begun(self, session: SessionT, trip: TripBegun) -> None:
        """That trip of a session that was released last has begun."""
        state = self._state_of[session]
        if trip is NO_GUESSES and state.rows_each == state.planned_rows == 1:
            return  # nothing is guessed here
        own = next(batch for batch in reversed(state.in_flight) if session in batch.awaited)
        own.rows += trip.guesses
        own.guesses += trip.guesses
        own.tokens += trip.tokens - 1
        own.predicted_ms = max(own.predicted_ms, trip.predicted_ms)
        own.lengthened_ms = max(own.lengthened_ms, trip.lengthened_ms)
        own.guessing_ms += trip.guessing_ms
        state.rows_each += ROWS_WEIGHT / len(state.sessions) * (1 + trip.guesses - state.rows_each)
        if not state.planned_rows / OTHER_ROWS < state.rows_each < state.planned_rows * OTHER_ROWS:
            state.planned_rows = 0.0

    def due_s(self) -> float | None:
        """When somebody will have waited long enough, even if nothing comes back; None: nobody waits for that."""
        waiting = [state for state in self._states.values() if state.ready and not state.at_head]
        return min(map(self._patience_ends_s, waiting), default=None)

    def _may_release(self, state: _CircuitState[SessionT], now_s: float) -> bool:
        if now_s >= self._patience_ends_s(state):
            return True
        # what has been away for so much longer is lost, and ends when its sessions do
        lost_s = now_s - 2 * max(self._iteration_s(state), MOST_HELD_S)
        counted = sum(batch.begun_s > lost_s for batch in state.in_flight)
        return counted < self._plan_of(state).micro_batches

    def _next_batch(self, state: _CircuitState[SessionT], now_s: float) -> list[SessionT]:
        """The ready sessions that go together. Who begins to decode takes no place from those who travel already: of
        these one would wait for the next micro-batch, which may have a place."""
        most, ready = self._plan_of(state).max_sessions, list(state.ready)
        if len(ready) > most and now_s < self._patience_ends_s(state):
            ready.sort(key=state.newcomers.__contains__)
        return ready[:most]

    def _patience_ends_s(self, state: _CircuitState[SessionT]) -> float:
        return next(iter(state.ready.values())) + min(self._iteration_s(state), MOST_HELD_S)

    def _iteration_s(self, state: _CircuitState[SessionT]) -> float:
        return max(self._plan_of(state).iteration_ms / 1000, state.iteration_s)

    def _plan_of(self, state: _CircuitState[SessionT]) -> InFlightPlan:
        if state.plan is None or not state.planned_rows:
            planned = 0 if state.plan is None else state.plan.micro_batches
            state.plan = self._rule(
                state.stages, len(state.sessions), self._max_rows, state.rows_each, planned
            )
            state.planned_rows = state.rows_each
        return state.plan


def _remove(state: _CircuitState[SessionT], session: SessionT) -> _MicroBatch[SessionT] | None:
    """The session travels no more. The micro-batch that is no more either, if all of it have come back or ended."""
    state.at_head.discard(session)
    for batch in state.in_flight:
        if session in batch.awaited:
            batch.awaited.discard(session)
            if batch.awaited:
                return None
            state.in_flight.remove(batch)
            return batch
    return None
