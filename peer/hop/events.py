"""What happens to a hop, and what it does: the events and effects of `HopCore`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

from molink.peer.hop.frames import OutgoingFrame
from molink.peer.hop.layered_prefill import PrefillSlice
from molink.peer.hop.session import ArrivedRows, Credit, DrawnToken, GuessedStep, HopStep, Payload, Session
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.decode_watch import DecodeBatch

# -- events


@dataclass(slots=True)
class TokensDrawn(Generic[Session, Payload]):
    """Event: at the tail, tokens that `BatchComputed` did not have, though their step had been computed: they had to
    wait."""

    tokens: Sequence[DrawnToken[Session, Payload]]


@dataclass(frozen=True, slots=True)
class SessionOpened(Generic[Session]):
    """Event: a session has a lease at this hop."""

    session: Session


@dataclass(frozen=True, slots=True)
class SessionReady(Generic[Session]):
    """Event: the session has its cache, before any step of it; without this event it is an empty one."""

    session: Session
    held_tokens: int
    """Of the sequence, which the cache holds."""
    least_tokens: int
    """It can go back to so many of them, or more, or to none."""


@dataclass(frozen=True, slots=True)
class PromptExpected(Generic[Session]):
    """Event: at the head, the session's lease has been granted, or is ready: it may start at any moment."""

    session: Session
    tokens: int
    """To compute, about."""


@dataclass(frozen=True, slots=True)
class PromptStarted(Generic[Session]):
    """Event: at the head, the session starts, once."""

    session: Session
    tokens: int
    """To compute, 1 or more."""
    position: int
    """Of the first of them in the sequence: the KV cache holds those before."""
    payload_of: Callable[[int, int], Any]
    """The payload of the tokens to compute from the first of two places to the second."""


@dataclass(frozen=True, slots=True)
class MoveAsked(Generic[Session]):
    """Event: at the head, the session goes on in its next epoch: with the token that comes next this one is over."""

    session: Session


@dataclass(frozen=True, slots=True)
class SessionContinued(Generic[Session, Payload]):
    """Event: at the head, the session goes on from the epoch before with that token, as its first step."""

    session: Session
    position: int
    """Of the token in the sequence: the KV caches of all hops hold those before."""
    payload: Payload


@dataclass(slots=True)
class RowsArrived(Generic[Session, Payload]):
    """Event: the previous hop's output for some sessions."""

    peer_id: str
    """Who sent them; what is not from a session's previous hop is dropped."""
    rows: Sequence[ArrivedRows[Session, Payload]]


@dataclass(slots=True)
class TokensReturned(Generic[Session, Payload]):
    """Event: at the head, the tail's tokens."""

    peer_id: str
    tokens: Sequence[DrawnToken[Session, Payload]]


@dataclass(frozen=True, slots=True)
class FaultFound(Generic[Session]):
    """Event: what a neighbour sent of a session is no step of it, or no guess. It ends the epoch if that is its
    previous hop, or its head."""

    session: Session
    peer_id: str
    detail: str


@dataclass(slots=True)
class WindowUpdated(Generic[Session]):
    """Event: a next hop has computed prefill that went there."""

    peer_id: str
    stepped: Sequence[Credit[Session]]


@dataclass(frozen=True, slots=True)
class DrawsAllowed(Generic[Session]):
    """Event: at the tail, all is known that draws up to that position depend on beside logits: what the sequence is
    before it, and what a grammar lets follow. Without this event that is nothing; with it, what draws beyond waits."""

    session: Session
    position: int


@dataclass(frozen=True, slots=True)
class GuessesReady(Generic[Session]):
    """Event: answers `AskGuesses` for these sessions: it has been guessed for them, or will not be."""

    sessions: Sequence[Session]


@dataclass(slots=True)
class BatchComputed(Generic[Session, Payload]):
    """Event: answers `ComputeBatch`, or says what came of parts of prompts with their last slice."""

    through: Sequence[HopStep[Session, Payload]]
    """Those whose rows or tokens are there, in order; without those of sessions that had ended."""
    failures: Sequence[tuple[HopStep[Session, Payload], str]] = ()
    """Those that the engine could not compute, and why."""
    tokens: Sequence[DrawnToken[Session, Payload]] = ()
    """At the tail."""
    output: object = None
    """Elsewhere: what `ForwardRows` sends parts of."""
    frames: Sequence[OutgoingFrame[Session, Payload]] = ()
    """Instead of `output`, where the driver has made the frames already (`frames_of`)."""
    compute_s: float = 0.0
    work: StepWork | None = None
    """None: the time says nothing of such work."""


@dataclass(slots=True)
class SliceComputed(Generic[Session, Payload]):
    """Event: answers `ComputeSlice`. `PrefillSlice.advanced` makes one for a slice of which nothing failed."""

    slice_: PrefillSlice[Session, Payload]
    whole: BatchComputed[Session, Payload] | None
    """What came of the parts that are over, if some are."""
    left: Sequence[tuple[HopStep[Session, Payload], int, int]]
    """Of the others: tokens that are not through, and those of them that are between layers."""
    layers_left: int
    """For the tokens between layers."""
    taken_s: float
    is_complete: bool
    """Whether it is the time of what was to be computed: nobody was left out, or failed."""


@dataclass(frozen=True, slots=True)
class FramesRefused(Generic[Session, Payload]):
    """Event: the link to a next hop has no room for some of what `ForwardRows` had for it."""

    peer_id: str
    frames: Sequence[OutgoingFrame[Session, Payload]]


@dataclass(frozen=True, slots=True)
class LinkHasRoom:
    """Event: answers `AwaitRoom`; the link may be gone too."""

    peer_id: str


@dataclass(frozen=True, slots=True)
class HeldRetried:
    """Event: answers `RetryHeld`: so many of the frames, in order, wait no longer."""

    peer_id: str
    frames: int


@dataclass(frozen=True, slots=True)
class Undelivered(Generic[Session]):
    """Event: there is no open link for what these sessions had for a peer."""

    peer_id: str
    sessions: Sequence[Session]
    detail: str


@dataclass(frozen=True, slots=True)
class Woken:
    """Event: the time of `WakeAt` has come."""


@dataclass(frozen=True, slots=True)
class SessionEnded(Generic[Session]):
    """Event: the session's lease has ended, or somebody has failed it. Nothing of it is left then."""

    session: Session


HopEvent: TypeAlias = (
    SessionOpened[Session]
    | SessionReady[Session]
    | PromptExpected[Session]
    | PromptStarted[Session]
    | MoveAsked[Session]
    | SessionContinued[Session, Payload]
    | RowsArrived[Session, Payload]
    | TokensReturned[Session, Payload]
    | FaultFound[Session]
    | WindowUpdated[Session]
    | DrawsAllowed[Session]
    | TokensDrawn[Session, Payload]
    | GuessesReady[Session]
    | BatchComputed[Session, Payload]
    | SliceComputed[Session, Payload]
    | FramesRefused[Session, Payload]
    | LinkHasRoom
    | HeldRetried
    | Undelivered[Session]
    | Woken
    | SessionEnded[Session]
)

# -- effects


@dataclass(slots=True)
class ComputeBatch(Generic[Session, Payload]):
    """Effect: the engine computes these together; `BatchComputed` answers."""

    steps: Sequence[HopStep[Session, Payload]]


@dataclass(slots=True)
class ComputeSlice(Generic[Session, Payload]):
    """Effect: the engine computes this slice; `SliceComputed` answers."""

    slice_: PrefillSlice[Session, Payload]


@dataclass(frozen=True, slots=True)
class DropSlice:
    """Effect: nobody needs the tokens between layers any more."""


@dataclass(slots=True)
class ForwardRows(Generic[Session, Payload]):
    """Effect: frames go to a next hop, in order. Prefill that finds no room holds up prefill behind it; what was not
    posted comes back with `FramesRefused`, or `Undelivered` where there is no link."""

    peer_id: str
    frames: Sequence[OutgoingFrame[Session, Payload]]


@dataclass(frozen=True, slots=True)
class AwaitRoom:
    """Effect: `LinkHasRoom` is to come once something has left the link to that peer, or it is gone."""

    peer_id: str


@dataclass(slots=True)
class RetryHeld(Generic[Session, Payload]):
    """Effect: prefill that was refused goes now, in order, up to the first frame that is refused again; `HeldRetried`
    answers. Without a link all are `Undelivered`, and wait no longer."""

    peer_id: str
    frames: Sequence[OutgoingFrame[Session, Payload]]


@dataclass(slots=True)
class SendTokens(Generic[Session, Payload]):
    """Effect: drawn tokens go to the head of their sessions, in one frame."""

    peer_id: str
    tokens: Sequence[DrawnToken[Session, Payload]]


@dataclass(frozen=True, slots=True)
class SendGuesses(Generic[Session, Payload]):
    """Effect: at the head, the guesses in steps' payloads go to these sessions' tail in one frame, and to no hop
    between. Without them it draws one token of each."""

    peer_id: str
    steps: Sequence[GuessedStep[Session, Payload]]


@dataclass(frozen=True, slots=True)
class AskGuesses(Generic[Session]):
    """Effect: at the head, so many tokens are to be guessed for each of these sessions, whose next steps wait for that.
    `GuessesReady` answers, before long whatever happens."""

    asked: Sequence[tuple[Session, int]]


@dataclass(slots=True)
class SendWindowUpdate(Generic[Session]):
    """Effect: the previous hop is told what has been computed here."""

    peer_id: str
    stepped: Sequence[Credit[Session]]


@dataclass(slots=True)
class DeliverTokens(Generic[Session, Payload]):
    """Effect: at the head, tokens go to the sessions' clients. The engine may take up its work before."""

    tokens: Sequence[DrawnToken[Session, Payload]]


@dataclass(frozen=True, slots=True)
class EpochOver(Generic[Session, Payload]):
    """Effect: answers `MoveAsked`: this token is the first step of the next epoch, and nothing of this one follows."""

    session: Session
    position: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class FailSession(Generic[Session]):
    """Effect: the session's client is told that its epoch is over here, and who is blamed. It has ended here."""

    session: Session
    peer_id: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Effect: `Woken` is to come then, in place of an earlier such wish; earlier ones may be answered as well."""

    at_s: float


@dataclass(slots=True)
class ExpectDecode:
    """Effect: what there is to say of decode once all before it has been done (`decode_watch`)."""

    computing: DecodeBatch | None
    first: DecodeBatch | None
    """Where none is computed: the one that was first in the latest iteration, on its way round."""


@dataclass(slots=True)
class RecordBatch:
    """Effect: a micro-batch is counted, once its output is on its way."""

    compute_s: float
    sessions: int
    tokens: int
    work: StepWork | None


HopEffect: TypeAlias = (
    ComputeBatch[Session, Payload]
    | ComputeSlice[Session, Payload]
    | DropSlice
    | ForwardRows[Session, Payload]
    | AwaitRoom
    | RetryHeld[Session, Payload]
    | SendTokens[Session, Payload]
    | SendGuesses[Session, Payload]
    | AskGuesses[Session]
    | SendWindowUpdate[Session]
    | DeliverTokens[Session, Payload]
    | EpochOver[Session, Payload]
    | FailSession[Session]
    | WakeAt
    | ExpectDecode
    | RecordBatch
)
