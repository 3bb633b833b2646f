"""What the transmission of prefill needs to know of decode: when a step begins, and when an iteration did.

The transmission paper's section 4.2 predicts from these when the uplink is needed next for decode: `computing` gives
its t_s and, with the stage's profile, T_d; `awaiting` gives t_p, and with the circuit's stages T_o and T_m.
"""

from collections.abc import Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from molink.routing.cost.pipeline import PipelineStage

SessionT = TypeVar("SessionT")


class DecodeBatch(NamedTuple):
    """The decode steps of one micro-batch of this peer."""

    at_s: float
    """When it began, or finished; `time.perf_counter`."""
    tokens: int
    next_peer_ids: frozenset[str]
    """Whose links its output takes."""
    stages: tuple[PipelineStage, ...]
    """The circuit, of its first session if they take several."""
    hop: int
    """Which of the stages this peer is."""


class DecodeWatch(Protocol):
    """Who is told. Called on the event loop, for each micro-batch: it must be quick."""

    def computing(self, batch: DecodeBatch) -> None:
        """The engine computes a micro-batch with decode steps."""

    def awaiting(self, first: DecodeBatch) -> None:
        """It computes none: the next is the one that was first in the latest iteration, on its way round."""


class IterationDetector(Generic[SessionT]):
    """Detects the first decode micro-batch of each iteration: a new one begins with a session that has had its step."""

    def __init__(self) -> None:
        self._stepped: set[SessionT] = set()

    def __len__(self) -> int:
        """Sessions that have had their step in this iteration."""
        return len(self._stepped)

    def forget_session(self, session: SessionT) -> None:
        """The session has ended."""
        self._stepped.discard(session)

    def is_first(self, sessions: Iterable[SessionT]) -> bool:
        """Whether these sessions' steps, which have run just now, are the first of an iteration."""
        sessions = set(sessions)
        first = not self._stepped or not self._stepped.isdisjoint(sessions)
        if first:
            self._stepped = sessions
        else:
            self._stepped |= sessions
        return first
