"""What a hop knows of one session in one epoch, and the steps of it that pass. Values, and one owner of state.

All that is kept for a session while it lasts is kept in its `HopSession`, so that it ends with it. Only orders among
sessions are elsewhere: the micro-batch queue, the limit of micro-batches in flight, prompts that wait for others, and
frames that wait for a link; `HopCore` takes the session out of them when it ends.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeAlias, TypeVar

from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decoding_sessions import DecodingSession
from molink.peer.scheduling.in_flight_limit import Circuit
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.scheduling.microbatch import BatchLimits, PendingStep
from molink.peer.scheduling.prefill_window import ReceiveWindow, SendWindow
from molink.peer.scheduling.prompt_order import due_s
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill_chunks import Cut
from molink.shards.spec import Span

Payload = TypeVar("Payload")
"""What a driver has computed of a step, or sent: token ids and hidden rows, or nothing in a simulation."""
MANY_TOKENS = 2**31
NONE_AWAITED: Final = -1
PayloadOf: TypeAlias = Callable[[int, int], Any]
"""The payload of the prompt's tokens from the first of two places to the second."""


@dataclass(frozen=True, slots=True)
class HopPlace:
    """Where a peer is in a session's circuit, and what the session has reserved there."""

    circuit: Circuit
    """Peer ids and spans of all hops, in order."""
    hop: int
    stages: tuple[PipelineStage, ...]
    """The circuit for predictions."""
    prompt_tokens: int
    """Of the generation's first circuit; a later one starts on more."""
    capacity_tokens: int
    encoding: str = ""
    """How activations travel to the next hop; sessions that differ in it take different frames."""
    most_tokens: int = MANY_TOKENS
    """The generation is over with so many of the sequence."""

    @property
    def span(self) -> Span:
        return self.circuit[self.hop][1]

    @property
    def last_position(self) -> int:
        """Of the last token that may be drawn."""
        return min(self.most_tokens, self.capacity_tokens) - 1

    @property
    def next_peer_id(self) -> str:
        """Where this hop's output goes: the next hop, or from the tail back to the head."""
        return self.circuit[(self.hop + 1) % len(self.circuit)][0]

    @property
    def previous_peer_id(self) -> str:
        return self.circuit[self.hop - 1][0]


class HopSession:
    """Owns the state of one session at one hop. `HopCore` alone changes it; a driver may add to it by inheritance.

    What is asked for each row of the place is kept beside it.
    """

    def __init__(self, key: LeaseKey, place: HopPlace) -> None:
        self.key = key
        self.place = place
        self.span = place.span
        self.next_peer_id = place.next_peer_id
        self.previous_peer_id = place.previous_peer_id
        self.way = (place.next_peer_id, place.encoding)
        """What two sessions have in common whose rows go in one frame."""
        self.is_head = place.hop == 0
        self.is_tail = place.hop == len(place.circuit) - 1
        self.progress = HopProgress()
        self.prefill = HopPrefill(SendWindow(), ReceiveWindow())
        self.decoding: DecodingSession | None = None
        """What is known of its decode steps; None before the first one, and where nobody asks."""
        self.ended = False
        """Whether its epoch is over here; what still comes of it is dropped."""

    @property
    def feeding_peer_ids(self) -> tuple[str, ...]:
        """Who sends its rows to this hop, and guesses."""
        return (self.previous_peer_id, self.next_peer_id) if self.is_tail else (self.previous_peer_id,)

    @property
    def waits(self) -> bool:
        """Whether the session waits for this peer: for its engine, or for room on its way."""
        prefill = self.prefill
        return bool(self.progress.queued or prefill.chunks or prefill.parts)


@dataclass(slots=True)
class HopProgress:
    """How far a session has come at a hop."""

    next_step: int = 0
    """The step that is expected next; older ones are repeats."""
    end: int = 0
    """The position behind what the cache holds once all that has come in is stepped."""
    least_position: int = 0
    """Where the next step may begin at least: where the one before it did, or in step 0 as far back as the cache that
    was found can go."""
    history_tokens: int = 0
    """At the head: the length of the sequence so far; 0 before its start."""
    queued: int = 0
    """Steps that wait for the engine, without parts of prompts that it computes in slices."""
    guesser: Any = None
    """At the head: what guesses its tokens (`speculation.Guesser`); None: nobody does."""
    guesses: int = 0
    """At the head: how many guesses the step has that is on its way; NONE_AWAITED: none is, and no token may come."""
    told_guesses: tuple[int, Any] = 0, ()
    """At the tail: the latest step of which the head has told guesses, and those, for who draws."""
    moves: bool = False
    """At the head: whether the next token is the last of this epoch, unless guesses are on their way with it."""
    draws_to: float = math.inf
    """At the tail: the position up to which tokens can be drawn; the step that would draw one beyond it waits."""
    scores: bool = False
    """At the tail: whether all of the prompt's rows are scored, for which the token behind each has to be known."""
    waiting: deque[Any] = field(default_factory=deque)
    """At the tail: such steps (`HopStep`), in order."""

    def must_wait(self, position: int, tokens: int, draws: int) -> bool:
        """Whether a step of so many tokens from that position on waits until more of the sequence is known."""
        return bool(draws or self.scores) and position + tokens - draws >= self.draws_to

    def allow_draws(self, position: int) -> list[Any]:
        """Tokens can be drawn up to there: the steps that waited for that, in order."""
        self.draws_to, allowed = position, []
        while self.waiting:
            step = self.waiting[0]
            if self.must_wait(step.position, step.tokens, step.draws):
                break
            allowed.append(self.waiting.popleft())
        return allowed

    def may_begin_at(self, position: int) -> bool:
        """Whether the next step may: nowhere with a gap before it, and within an epoch never further back than in the
        step before. Before its first step a cache can always be emptied."""
        return self.least_position <= position <= self.end or position == 0 == self.next_step


@dataclass(slots=True)
class HopPrefill:
    """A session's prompt at a hop: what waits of it, and what neighbours may send."""

    send_window: SendWindow
    receive_window: ReceiveWindow
    due_s: float = 0.0
    """When the prompt is due here (`prompt_order`); 0 where nobody heeds it."""
    chunks: deque[int] = field(default_factory=deque)
    """At the head: the tokens of each chunk that has not been queued."""
    chunk_begin: int = 0
    """Where the next chunk begins in what was started."""
    payload_of: PayloadOf | None = None
    parts: int = 0
    """Steps that are computed in slices."""
    held_frames: int = 0
    """Frames with its rows for which the link has no room."""


Session = TypeVar("Session", bound=HopSession)


@dataclass(slots=True, eq=False)
class HopStep(PendingStep[Session], Generic[Session, Payload]):
    """One session's share of a step. Nobody but the core and its slices changes it."""

    draws: int = field(kw_only=True)
    """After so many rows, the last ones, the tail may draw a token: 0 or 1, or with guesses one more than these."""
    payload: Payload = field(kw_only=True)
    position: int = 0
    """Where in the sequence it begins: so many tokens are before it. What the cache holds from there on is cut off."""
    left_tokens: int = 0
    """Those that are not through the span; fewer than `tokens` only while a prompt's part is computed in slices."""

    @property
    def guesses(self) -> int:
        """How many of the tokens, the last ones, are guesses."""
        return self.draws - 1 if self.draws > 1 else 0


ArrivedRows: TypeAlias = tuple[Session, int, int, int, bool, int, Payload]
"""Session, step, tokens, after how many of them a token may be drawn (`HopStep.draws`), whether they are of a prompt,
the position of the first of them in the sequence, and what came. A tuple, since there is one for each token of each
session; so are those below."""
DrawnToken: TypeAlias = tuple[Session, int, int, bool, Payload, Any]
"""Session, step after which it was drawn, position in the sequence, whether the generation ends with it, what the
head's next step computes, and what the client gets."""
GuessedStep: TypeAlias = tuple[Session, int, Payload]
"""Session, step, and what that computes: a token, and guesses behind it."""
Credit: TypeAlias = tuple[Session, int]
"""Session, and the step up to which all of its prefill has been computed."""


def due_of_prompt(session: HopSession, position: int, tokens: int, now_s: float) -> float:
    """When a prompt is due whose first so many tokens are there, from that position on."""
    place = session.place
    left = max(session.progress.history_tokens, place.prompt_tokens) - position
    return due_s(place.stages, max(tokens, left), now_s)


def work_of(steps: Sequence[HopStep[Session, Payload]], layers: int) -> StepWork:
    """What these steps of one span take to compute, for whoever predicts it, in a model of so many layers."""
    span = steps[0].session.span
    decode_contexts: list[int] = []
    prefills: list[tuple[int, int]] = []
    for one in steps:
        if one.prefill:
            prefills.append((one.tokens, one.position))
        else:
            decode_contexts += range(one.position, one.position + one.tokens)
    ends = span.start == 0, span.stop == layers
    return StepWork(len(span), *ends, tuple(decode_contexts), tuple(prefills))


@dataclass(frozen=True, slots=True)
class HopSettings:
    """What a hop goes by as long as its peer runs."""

    peer_id: str
    activation_bytes: int
    """Of a row as the engine has it."""
    most_step_tokens: int
    """A step of more is refused."""
    limits: BatchLimits
    rule: Rule
    """Of micro-batches in flight, where the head is here."""
    cut: Cut
    """Of prompts whose head is here."""
    uses_deadlines: bool = False
    """Whether links send prompts as they are due (`prompt_order`)."""
    uses_forecasts: bool = True
    """Whether links go by when the next decode is expected: without that there is no `ExpectDecode`."""

    def fault_of_step(
        self, session: HopSession, step: int, position: int, tokens: int, *, prefill: bool
    ) -> str | None:
        """What is wrong with a step that is not a repeat; None: nothing, and if it is prefill of another hop it counts
        in the window. So what waits of a session is a window of prefill and one decode step, whatever its previous hop
        sends."""
        progress, capacity_tokens = session.progress, session.place.capacity_tokens
        if step != progress.next_step or not 1 <= tokens <= self.most_step_tokens:
            return f"step {step} of {tokens} rows came when step {progress.next_step} was expected"
        if not progress.may_begin_at(position):
            allowed = f"{progress.least_position} to {progress.end}"
            return f"step {step} begins at position {position}, and may at {allowed}"
        if position + tokens > capacity_tokens:
            return f"step {step} goes beyond the {capacity_tokens} tokens that were reserved"
        return None if session.is_head else self._fault_of_waiting(session, step, tokens, prefill=prefill)

    def _fault_of_waiting(self, session: HopSession, step: int, tokens: int, *, prefill: bool) -> str | None:
        """What is wrong with a step that comes now, by what waits here of another hop's session.

        Prefill has a window. A decode step's token was drawn from the step before, which every hop had computed by
        then, and its guesses travel with it: so nothing waits that it could come behind, in whatever order links carry
        messages, and a new epoch is another session.
        """
        if prefill:
            if session.prefill.receive_window.admit(step, tokens * self.activation_bytes):
                return None
            return f"step {step} came while as much prefill waited here as may"
        if session.progress.queued or session.progress.waiting or session.prefill.parts:
            return f"decode step {step} came while an earlier step waited here"
        return None
