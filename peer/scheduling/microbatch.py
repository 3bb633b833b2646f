"""Which waiting steps run together next: iteration-level (continuous) batching of a peer's sessions. Pure.

Iteration-level scheduling, from Orca (Yu et al., OSDI 2022) and built upon in section 4.4 of the
decentralized-scheduling paper, chooses the batch anew for each step instead of each request: a session joins
when it arrives and leaves when it ends, and nobody waits for the longest generation. Here the steps of one
span are joined, ragged, decode and prefill under one token budget, so that a peer that serves ten circuits
still makes one matrix product per layer.

Fairness: the decode that has waited longest or the prefill that is due first (`prompt_order`) is in the next
micro-batch, whichever kind has waited longer. Prefill counts as having arrived `prefill_patience_s` later than it did,
so decode overtakes it, but not for ever. A later step of a session counts as waiting only once the step before it has
run, so the chunks of a long prompt take turns with decode instead of following one another. A prefill whose next hop
takes no more is passed over and keeps its place.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from molink.routing.cost.pipeline import COST
from molink.shards.spec import MAX_STEP_TOKENS, ModelSpec, Span

SessionT = TypeVar("SessionT")
MayPrefill: TypeAlias = Callable[[Any], bool]
"""Whether a session's next hop takes more of its prefill now."""


@dataclass(slots=True, eq=False)
class PendingStep(Generic[SessionT]):
    """One step of one session that waits for the engine. Not frozen, as that makes it slow to make and there is one
    for each token."""

    session: SessionT
    """Whatever tells sessions apart; hashable."""
    step: int
    span: Span
    tokens: int
    """Rows of this step, 1 or more."""
    arrived_s: float
    """When it came, on the same clock as all others."""
    prefill: bool
    due_s: float = 0.0
    """Of prefill: what is due first goes first, those of one time in the order of waiting."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much steps together."""

    max_tokens: int = MAX_STEP_TOKENS
    """Rows of a micro-batch. Only a single step that is larger exceeds it, and it runs alone."""
    max_sessions: int = COST.steps_per_batch
    """A session that decodes counts as often as it has rows: behind each a token may be drawn."""
    prefill_patience_s: float = 0.05
    """How much longer than a decode a prefill waits when both could run."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_sessions < 1 or not self.prefill_patience_s >= 0:
            raise ValueError(f"batch limits must be positive, got {self}")


def batch_limits(spec: ModelSpec, wanted: BatchLimits = BatchLimits()) -> BatchLimits:
    """How much steps together for this model: as much as is wanted, if its activations fit one frame."""
    most_tokens = max(1, (MAX_FRAME_BYTES - MAX_HEADER_BYTES) // spec.activation_bytes)
    return replace(wanted, max_tokens=min(wanted.max_tokens, most_tokens))


QUEUED_STEPS = 4096
"""More than that do not wait, of all sessions together."""
Step = TypeVar("Step", bound=PendingStep[Any])
_Waiting: TypeAlias = tuple[Step, float]
"""The next step of a session, and since when it could have run."""


class _SpanQueue(Generic[Step]):
    """The sessions whose next step is on the same span, each kind in the order of waiting."""

    __slots__ = ("decode", "prefill", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.decode: dict[Any, _Waiting[Step]] = {}
        self.prefill: dict[Any, _Waiting[Step]] = {}

    def oldest(self, patience_s: float, may_prefill: MayPrefill) -> _Waiting[Step] | None:
        """The step that goes first, if one may, and since when steps of its kind have waited."""
        decode = next(iter(self.decode.values()), None)
        if not self.prefill:
            return decode
        prefills = [one for one in self.prefill.values() if may_prefill(one[0].session)]
        if not prefills:
            return decode
        since_s = prefills[0][1]
        if decode is not None and decode[1] <= since_s + patience_s:
            return decode
        return min(prefills, key=_due_s)[0], since_s


class MicroBatchQueue(Generic[Step]):
    """Steps that wait for the engine, at most `capacity`.

    `next_batch` is called when the micro-batch before it has run. Time, as the queue sees it, is the latest
    arrival, and never goes back.
    """

    def __init__(self, limits: BatchLimits, capacity: int = QUEUED_STEPS) -> None:
        self._limits = limits
        self._capacity = capacity
        self._size = 0
        self._latest_s = float("-inf")
        self._groups: dict[Span, _SpanQueue[Step]] = {}
        self._group_of: dict[Any, _SpanQueue[Step]] = {}
        self._latest: _SpanQueue[Step] | None = None
        """Which a step came to last; it may be empty, and not among the others then."""
        self._later: dict[Any, deque[Step]] = {}
        self._running: list[Any] = []

    def __len__(self) -> int:
        return self._size

    def push(self, pending: Step) -> bool:
        """Queues a step behind those of the same session. False, and nothing queued, when the queue is full:
        pressure goes back to the sender.

        Raises:
            ValueError: it has no tokens.
        """
        if pending.tokens < 1:
            raise ValueError(f"a step needs at least one token, got {pending.tokens}")
        if self._size >= self._capacity:
            return False
        self._size += 1
        if pending.arrived_s > self._latest_s:
            self._latest_s = pending.arrived_s
        if pending.session in self._later:
            self._later[pending.session].append(pending)
        elif pending.session in self._group_of:
            self._later[pending.session] = deque((pending,))
        else:
            self._enter(pending)
        return True

    def forget_session(self, session: object) -> None:
        """Drops all steps of a session that has ended. No error if there are none."""
        self._size -= len(self._later.pop(session, ()))
        if session in self._running:
            self._running.remove(session)
        group = self._group_of.pop(session, None)
        if group is not None:
            if group.decode.pop(session, None) is None:
                del group.prefill[session]
            self._size -= 1
            self._drop_if_empty(group)

    def next_batch(self, may_prefill: MayPrefill = lambda _: True) -> tuple[Step, ...]:
        """Removes and returns what steps together now; () when nothing may.

        All of one span, every session at most once and its steps in the order they were added, decode before
        prefill. It holds the step that goes first, then decodes, then prefills as they are due, as long as they fit
        the limits; no prefill of a session that `may_prefill` says no to.
        """
        if not self._size:
            return ()
        if self._running:
            self._resume()
        if (found := self._first(may_prefill)) is None:
            return ()
        first, group = found
        batch = self._fill(group, first[0], may_prefill)
        for pending in batch:
            session = pending.session
            del self._group_of[session]
            if self._later and session in self._later:
                self._running.append(session)
        self._size -= len(batch)
        self._drop_if_empty(group)
        return tuple(batch)

    def _enter(self, pending: Step) -> None:
        """The step can run from now on."""
        span, session = pending.span, pending.session
        group = self._latest
        if group is None or group.span is not span:
            self._latest = group = self._groups.get(span) or _SpanQueue(span)
        if not group.decode and not group.prefill:
            self._groups[span] = group
        kind = group.prefill if pending.prefill else group.decode
        kind[session] = (pending, self._latest_s)
        self._group_of[session] = group

    def _resume(self) -> None:
        """The last micro-batch has run: what follows in its sessions begins to wait."""
        for session in self._running:
            later = self._later[session]
            self._enter(later.popleft())
            if not later:
                del self._later[session]
        self._running.clear()

    def _first(self, may_prefill: MayPrefill) -> tuple[_Waiting[Step], _SpanQueue[Step]] | None:
        """The step that has waited longest, as far as prefill counts, and its group; None if none may run."""
        patience_s = self._limits.prefill_patience_s
        found = [
            (first, group)
            for group in self._groups.values()
            if (first := group.oldest(patience_s, may_prefill)) is not None
        ]
        if len(found) > 1:
            return min(found, key=self._due_s)
        return found[0] if found else None

    def _due_s(self, found: tuple[_Waiting[Step], _SpanQueue[Step]]) -> tuple[float, bool]:
        """Which group's first step has waited longest, as far as prefill counts."""
        pending, since_s = found[0]
        return since_s + (self._limits.prefill_patience_s if pending.prefill else 0.0), pending.prefill

    def _fill(self, group: _SpanQueue[Step], first: Step, may_prefill: MayPrefill) -> list[Step]:
        """Takes `first` and what fits beside it out of the group."""
        tokens = self._limits.max_tokens - first.tokens
        sessions = self._limits.max_sessions - _drawing_rows(first)
        del (group.prefill if first.prefill else group.decode)[first.session]
        decode: list[Step] = [] if first.prefill else [first]
        prefill: list[Step] = [first] if first.prefill else []
        for kind, taken in ((group.decode, decode), (group.prefill, prefill)):
            waiting = sorted(kind.values(), key=_due_s) if taken is prefill else kind.values()
            chosen = _fitting(waiting, tokens, sessions, may_prefill) if kind else []
            for pending in chosen:
                del kind[pending.session]
                tokens -= pending.tokens
                sessions -= _drawing_rows(pending)
            taken.extend(chosen)
        return decode + prefill

    def _drop_if_empty(self, group: _SpanQueue[Step]) -> None:
        if not group.decode and not group.prefill:
            del self._groups[group.span]


def _fitting(
    waiting: Iterable[_Waiting[Step]], tokens: int, sessions: int, may_prefill: MayPrefill
) -> list[Step]:
    """Those that fit and may, in their order. What is too large is passed over; it goes first when its turn comes."""
    found: list[Step] = []
    for pending, _ in waiting:
        if tokens <= 0 or sessions <= 0:
            break
        draws = _drawing_rows(pending)
        fits = pending.tokens <= tokens and draws <= sessions
        if fits and (not pending.prefill or may_prefill(pending.session)):
            tokens -= pending.tokens
            sessions -= draws
            found.append(pending)
    return found


def _drawing_rows(pending: PendingStep[Any]) -> int:
    """Behind so many rows a token may be drawn."""
    return 1 if pending.prefill else pending.tokens


def _due_s(waiting: _Waiting[Step]) -> float:
    return waiting[0].due_s
