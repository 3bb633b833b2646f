"""Predicts which sessions are about to decode here again: those for whom prompts are computed in slices. Pure.

A session's next decode step comes when the one before it has been round the circuit. A peer does not know what the
others do meanwhile, but how long that took so far, or, for the first, what the circuit is predicted to take. Who has
not come back after LATE times as long has ended without a word, or waits for somebody else; nobody makes room for it
until it is here again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.pipeline import STEP_OVERHEAD_MS, PipelineStage

LATE = 4.0
"""Times its usual interval: beside prompts in pieces a step takes about twice as long at each hop."""
RECENT = 0.3
"""Weight of the latest interval."""


@dataclass(slots=True)
class _Session:
    waits: bool = False
    """Whether a decode step of it is here."""
    stepped_s: float | None = None
    """When its latest step was computed."""
    predicted_s: float = 0.0
    """What the circuit takes for a decode step."""
    interval_s: float | None = None
    """From one step to the next, usually; None before there were two."""


class DecodingSessions:
    """Owns what is known of the decode steps of a peer's sessions. Times are on one clock."""

    def __init__(self) -> None:
        self._sessions: dict[LeaseKey, _Session] = {}

    def record_waiting(self, key: LeaseKey) -> None:
        """A decode step of the session waits here."""
        self._sessions.setdefault(key, _Session()).waits = True

    def record_first_token(self, key: LeaseKey, now_s: float, stages: Sequence[PipelineStage]) -> None:
        """The session's prompt has been computed; its steps go round this circuit."""
        round_ms = sum(
            stage.decode_ms(1) + STEP_OVERHEAD_MS + stage.transfer_ms(1) + stage.link_ms for stage in stages
        )
        self._sessions[key] = _Session(stepped_s=now_s, predicted_s=round_ms / 1000)

    def record_decode(self, key: LeaseKey, now_s: float) -> None:
        """A decode step of the session has been computed."""
        session = self._sessions.setdefault(key, _Session())
        if session.stepped_s is not None:
            latest_s = now_s - session.stepped_s
            usual_s = latest_s if session.interval_s is None else session.interval_s
            session.interval_s = usual_s + RECENT * (latest_s - usual_s)
        session.waits, session.stepped_s = False, now_s

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._sessions.pop(key, None)

    def count(self, now_s: float) -> int:
        """How many sessions wait for a decode step of this peer, that is here or on its way."""
        return sum(one.waits or _is_on_its_way(one, now_s) for one in self._sessions.values())


def _is_on_its_way(session: _Session, now_s: float) -> bool:
    if session.stepped_s is None:
        return False
    usual_s = session.predicted_s if session.interval_s is None else session.interval_s
    return now_s - session.stepped_s <= LATE * usual_s
