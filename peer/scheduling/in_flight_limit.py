"""Which of the head's sessions take their next step now, and with whom: the rule of `in_flight_rules.py` kept. Pure.

A session whose token has come back is ready. It goes on at once if fewer micro-batches of its circuit are on their way
than the rule allows, and otherwise with the next that comes back; all that are ready go together, up to the rule's
size. Only one micro-batch of a circuit is at the head's own engine at a time, or two would become one there.

Nobody waits longer for the others than an iteration takes, as predicted or as the last one did; a session that is alone
on its circuit never waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.in_flight_rules import Circulation, Rule
from molink.peer.scheduling.pipeline import Circuit, PipelineStage

MOST_HELD_S = 1.0
"""No session is held longer, whatever was predicted."""


@dataclass(slots=True)
class _MicroBatch:
    """Sessions that took a step together, those whose token has not come back."""

    begun_s: float
    out: set[LeaseKey]


@dataclass(slots=True)
class _Round:
    """The sessions that decode along one circuit."""

    circuit: Circuit
    stages: Sequence[PipelineStage]
    sessions: set[LeaseKey] = field(default_factory=set)
    ready: dict[LeaseKey, float] = field(default_factory=dict)
    """Since when, longest first."""
    travelling: list[_MicroBatch] = field(default_factory=list)
    at_head: set[LeaseKey] = field(default_factory=set)
    """Of the micro-batch that was let go last, until the head has computed it."""
    decided: Circulation | None = None
    """For as many sessions as there are now."""
    iteration_s: float = 0.0
    """Of the micro-batch that came back last."""


class CirculationLimit:
    """What circulates, circuit by circuit, of the sessions whose head is here."""

    def __init__(self, rule: Rule, max_sessions: int) -> None:
        self._rule = rule
        self._max_sessions = max_sessions
        self._rounds: dict[Circuit, _Round] = {}
        self._round_of: dict[LeaseKey, _Round] = {}

    def __contains__(self, key: LeaseKey) -> bool:
        """Whether the session decodes along a circuit, as far as is known here."""
        return key in self._round_of

    def join(self, key: LeaseKey, circuit: Circuit, stages: Sequence[PipelineStage]) -> None:
        """A session decodes along that circuit from now on."""
        round_ = self._rounds.setdefault(circuit, _Round(circuit, stages))
        round_.stages = stages
        round_.sessions.add(key)
        round_.decided = None
        self._round_of[key] = round_

    def returned(self, key: LeaseKey, now_s: float) -> None:
        """The token of a session that has joined is back, and there is a next step. It is due at the next `release`."""
        round_ = self._round_of[key]
        if (done := _take_out(round_, key)) is not None:
            round_.iteration_s = now_s - done.begun_s
        round_.ready.setdefault(key, now_s)

    def stepped(self, keys: Iterable[LeaseKey]) -> None:
        """The head has computed steps of these sessions, known here or not."""
        for key in keys:
            if (round_ := self._round_of.get(key)) is not None:
                round_.at_head.discard(key)

    def leave(self, key: LeaseKey) -> None:
        """The session has ended, wherever its step is. No error if it never joined."""
        round_ = self._round_of.pop(key, None)
        if round_ is None:
            return
        _take_out(round_, key)
        round_.ready.pop(key, None)
        round_.sessions.discard(key)
        round_.decided = None
        if not round_.sessions:
            del self._rounds[round_.circuit]

    def release(self, now_s: float) -> tuple[LeaseKey, ...]:
        """The sessions that take their next step now; those of one circuit together."""
        released: list[LeaseKey] = []
        for round_ in self._rounds.values():
            if round_.ready and not round_.at_head and self._may_go(round_, now_s):
                batch = list(round_.ready)[: self._decided(round_).max_sessions]
                for key in batch:
                    del round_.ready[key]
                round_.travelling.append(_MicroBatch(now_s, set(batch)))
                round_.at_head = set(batch)
                released += batch
        return tuple(released)

    def due_s(self) -> float | None:
        """When somebody will have waited long enough, even if nothing comes back; None: nobody waits for that."""
        waiting = [round_ for round_ in self._rounds.values() if round_.ready and not round_.at_head]
        return min(map(self._patience_ends_s, waiting), default=None)

    def _may_go(self, round_: _Round, now_s: float) -> bool:
        if now_s >= self._patience_ends_s(round_):
            return True
        # what has been away for so much longer is lost, and ends when its sessions do
        lost_s = now_s - 2 * max(self._iteration_s(round_), MOST_HELD_S)
        counted = sum(batch.begun_s > lost_s for batch in round_.travelling)
        return counted < self._decided(round_).micro_batches

    def _patience_ends_s(self, round_: _Round) -> float:
        return next(iter(round_.ready.values())) + min(self._iteration_s(round_), MOST_HELD_S)

    def _iteration_s(self, round_: _Round) -> float:
        return max(self._decided(round_).iteration_ms / 1000, round_.iteration_s)

    def _decided(self, round_: _Round) -> Circulation:
        if round_.decided is None:
            round_.decided = self._rule(round_.stages, len(round_.sessions), self._max_sessions)
        return round_.decided


def _take_out(round_: _Round, key: LeaseKey) -> _MicroBatch | None:
    """The session travels no more. The micro-batch that is no more either, if all of it have come back or ended."""
    round_.at_head.discard(key)
    for batch in round_.travelling:
        if key in batch.out:
            batch.out.discard(key)
            if batch.out:
                return None
            round_.travelling.remove(batch)
            return batch
    return None
