"""Predicts whether a session is about to decode here again: for such prompts are computed in slices. Pure.

A session's next decode step comes when the one before it has been round the circuit. A peer does not know what the
others do meanwhile, but how long that took so far, or, for the first, what the circuit is predicted to take. Who has
not come back after LATE times as long has ended without a word, or waits for somebody else; nobody makes room for it
until it is here again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, PipelineStage

LATE = 4.0
"""Times its usual interval: beside prompts in pieces a step takes about twice as long at each hop."""
RECENT = 0.3
"""Weight of the latest interval."""


@dataclass(slots=True)
class DecodingSession:
    """Holds what is known of the decode steps of one session. Times are on one clock."""

    waits: bool = False
    """Whether a decode step of it is here."""
    stepped_s: float | None = None
    """When its latest step was computed."""
    predicted_s: float = 0.0
    """What the circuit takes for a decode step."""
    interval_s: float | None = None
    """From one step to the next, usually; None before there were two."""

    @classmethod
    def after_prompt(cls, now_s: float, stages: Sequence[PipelineStage]) -> Self:
        """The session's prompt has been computed; its steps go round this circuit."""
        round_ms = sum(
            stage.decode_ms(1) + STEP_OVERHEAD_MS + stage.transfer_ms(1) + stage.link_ms for stage in stages
        )
        return cls(stepped_s=now_s, predicted_s=round_ms / 1000)

    def record_decode(self, now_s: float) -> None:
        """A decode step of the session has been computed."""
        if self.stepped_s is not None:
            latest_s = now_s - self.stepped_s
            usual_s = latest_s if self.interval_s is None else self.interval_s
            self.interval_s = usual_s + RECENT * (latest_s - usual_s)
        self.waits, self.stepped_s = False, now_s

    def is_near(self, now_s: float) -> bool:
        """Whether the session waits for a decode step of this peer, that is here or on its way."""
        if self.waits:
            return True
        if self.stepped_s is None:
            return False
        usual_s = self.predicted_s if self.interval_s is None else self.interval_s
        return now_s - self.stepped_s <= LATE * usual_s
