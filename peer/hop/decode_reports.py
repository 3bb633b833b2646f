"""What there is to say of a hop's decode steps to who predicts when its links need room for the next (`decode_watch`).
Pure."""

from collections.abc import Sequence
from typing import Any

from molink.peer.hop.session import HopSession, HopStep
from molink.peer.scheduling.decode_watch import DecodeBatch, IterationDetector


class DecodeReports:
    """Holds what is known of the latest decode steps."""

    def __init__(self) -> None:
        self._iterations: IterationDetector[HopSession] = IterationDetector()
        self.computing: DecodeBatch | None = None
        self.first: DecodeBatch | None = None
        """Those that were first in the latest iteration."""

    def record_begun(self, steps: Sequence[HopStep[Any, Any]], now_s: float) -> bool:
        """The engine computes these. Whether there is something to say."""
        self.computing = _decode_batch(steps, now_s)
        return self.computing is not None

    def record_computed(self, steps: Sequence[HopStep[Any, Any]], now_s: float) -> bool:
        """It has computed them. Whether there is something to say."""
        self.computing = None
        if (stepped := _decode_batch(steps, now_s)) is None:
            return False
        if self._iterations.is_first([one.session for one in steps if not one.prefill]):
            self.first = stepped
        return True

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of any session."""
        return not self._iterations

    def end_session(self, session: HopSession) -> None:
        """The session has ended."""
        self._iterations.forget_session(session)


def _decode_batch(steps: Sequence[HopStep[Any, Any]], now_s: float) -> DecodeBatch | None:
    """The decode steps among these, as of now; None if there are none."""
    rows, following, place = 0, set(), None
    for one in steps:
        if not one.prefill:
            rows += one.tokens
            following.add(one.session.next_peer_id)
            place = place or one.session.place
    if place is None:
        return None
    return DecodeBatch(now_s, rows, frozenset(following), place.stages, place.hop)
