"""What a hop sends on: a micro-batch's rows in frames, and frames of prefill for which a link has no room. Pure.

Prefill waits for two things before it is stepped: for the session's window at the next hop (`prefill_window`), and for
the frames to that hop that its link had no room for. Such frames wait here, at most those of two micro-batches: the one
that found the link full and the one that the engine had begun by then.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

from molink.peer.hop.session import Credit, DrawnToken, HopStep, Payload, Session

SHORT_PROMPT_TOKENS: Final = 16
"""What is computed of a prompt whose other blocks are shared, at most: choices of one prompt begin so."""


@dataclass(slots=True, eq=False)
class OutgoingFrame(Generic[Session, Payload]):
    """Rows of a micro-batch that go to one peer in one frame."""

    peer_id: str
    encoding: str
    steps: tuple[HopStep[Session, Payload], ...]
    """Whose rows these are, in order."""
    firsts: tuple[int, ...]
    """Where the rows of each begin in the micro-batch's output."""
    output: object = None
    """The driver's: what it sends, or makes that of."""

    @property
    def prefill(self) -> bool:
        """Whether these are rows of prompts."""
        return self.steps[0].prefill

    @property
    def is_short(self) -> bool:
        """Whether these are rows of short, whole prompts alone: as many as a trip with guesses has, and no chunk goes
        before them, so that they may go as decode rows do."""
        return all(_is_short(one) for one in self.steps)

    @property
    def due_s(self) -> float:
        """Of prompts: when they are due; 0 where nobody heeds it."""
        return self.steps[0].session.prefill.due_s if self.prefill and not self.is_short else 0.0


def frames_of(
    steps: Sequence[HopStep[Session, Payload]], *, prompts_apart: bool, output: object = None
) -> list[OutgoingFrame[Session, Payload]]:
    """A micro-batch's rows by the peer that they go to and the encoding that they go in, in order: decode rows in one
    frame, and those of prompts in another, or in one for each but for short ones, which the next hop is to compute
    together as well.

    In one frame they would be decode traffic, and a chunk of a prompt would overtake the chunk before it.
    """
    way = steps[0].session.way
    if not steps[-1].prefill and all(one.session.way == way for one in steps):  # decode goes before prefill
        if len(steps) == 1:
            return [OutgoingFrame(*way, tuple(steps), (0,), output)]
        return [OutgoingFrame(*way, tuple(steps), tuple(_firsts(steps)), output)]
    ways: dict[tuple[str, str], list[tuple[HopStep[Session, Payload], int]]] = {}
    for one, first in zip(steps, _firsts(steps), strict=True):
        ways.setdefault(one.session.way, []).append((one, first))
    frames = []
    for (peer_id, encoding), parts in ways.items():
        decode = [part for part in parts if not part[0].prefill]
        prefill = [part for part in parts if part[0].prefill]
        for together in (decode, *_apart(prefill)) if prompts_apart else (decode, prefill):
            if together:
                whose, firsts = zip(*together, strict=True)
                frames.append(OutgoingFrame(peer_id, encoding, whose, firsts, output))
    return frames


def _apart(
    prefill: Sequence[tuple[HopStep[Session, Payload], int]],
) -> Iterable[list[tuple[HopStep[Session, Payload], int]]]:
    """Each prompt for itself, so that it can go as it is due; what is short and whole goes in one."""
    short: list[tuple[HopStep[Session, Payload], int]] = []
    for part in prefill:
        if _is_short(part[0]):
            short.append(part)
        else:
            yield [part]
    yield short


def _is_short(one: HopStep[Any, Any]) -> bool:
    return one.prefill and one.step == 0 and one.draws > 0 and one.tokens <= SHORT_PROMPT_TOKENS


def _firsts(steps: Sequence[HopStep[Any, Any]]) -> list[int]:
    firsts, first = [], 0
    for one in steps:
        firsts.append(first)
        first += one.tokens
    return firsts


def tokens_by_head(
    tokens: Sequence[DrawnToken[Session, Payload]],
) -> tuple[dict[str, list[DrawnToken[Session, Payload]]], list[DrawnToken[Session, Payload]]]:
    """Drawn tokens by the head elsewhere that they go to, and those whose head is here."""
    by_head: dict[str, list[DrawnToken[Session, Payload]]] = {}
    drawn_here = []
    for token in tokens:
        session = token[0]
        if session.is_head:
            drawn_here.append(token)
        elif not session.ended:
            by_head.setdefault(session.next_peer_id, []).append(token)
    return by_head, drawn_here


def credits_by_hop(steps: Iterable[HopStep[Session, Payload]]) -> dict[str, list[Credit[Session]]]:
    """These have been computed: what is to be said of it to previous hops, where that is worth a frame by now."""
    told: dict[str, list[Credit[Session]]] = {}
    for one in steps:
        session = one.session
        if not one.prefill or session.is_head or session.ended:
            continue
        if session.prefill.receive_window.record_computed(one.step):
            told.setdefault(session.previous_peer_id, []).append((session, one.step))
    return told


class HeldFrames(Generic[Session, Payload]):
    """Owns the frames of prefill that their link had no room for, in order, by next peer."""

    def __init__(self) -> None:
        self._frames: dict[str, deque[OutgoingFrame[Session, Payload]]] = {}

    def __len__(self) -> int:
        """Peers for which some wait."""
        return len(self._frames)

    def __contains__(self, peer_id: str) -> bool:
        return peer_id in self._frames

    def of_peer(self, peer_id: str) -> Sequence[OutgoingFrame[Session, Payload]]:
        """Those that wait for a peer's link, in order."""
        return tuple(self._frames.get(peer_id, ()))

    def hold(self, frame: OutgoingFrame[Session, Payload]) -> None:
        """A frame waits behind those to the same peer."""
        self._frames.setdefault(frame.peer_id, deque()).append(frame)
        for one in frame.steps:
            one.session.prefill.held_frames += 1

    def sorted_out(
        self, frames: Iterable[OutgoingFrame[Session, Payload]]
    ) -> Iterable[tuple[str, list[OutgoingFrame[Session, Payload]]]]:
        """What of these is to be posted, by peer; prefill behind frames that wait is held."""
        by_peer: dict[str, list[OutgoingFrame[Session, Payload]]] = {}
        for frame in frames:
            if frame.prefill and frame.peer_id in self._frames:
                self.hold(frame)
            else:
                by_peer.setdefault(frame.peer_id, []).append(frame)
        return by_peer.items()

    def drop_first(self, peer_id: str, count: int) -> None:
        """So many wait no longer."""
        frames = self._frames.get(peer_id)
        while frames and count:
            for one in frames.popleft().steps:
                one.session.prefill.held_frames -= 1
            count -= 1
        if not frames:
            self._frames.pop(peer_id, None)

    def drop_ended(self) -> None:
        """Sessions have ended: a frame that waits for such alone is dropped."""
        for peer_id, frames in tuple(self._frames.items()):
            left = deque(frame for frame in frames if any(not one.session.ended for one in frame.steps))
            if left:
                self._frames[peer_id] = left
            else:
                del self._frames[peer_id]
