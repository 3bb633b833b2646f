"""Which waiting steps run together next: iteration-level (continuous) batching of a peer's sessions. Pure.

Iteration-level scheduling, from Orca (Yu et al., OSDI 2022) and built upon in section 4.4 of the
decentralized-scheduling paper, chooses the batch anew for each step instead of each request: a session joins
when it arrives and leaves when it ends, and nobody waits for the longest generation. Here the steps of one
span are joined, ragged, decode and prefill under one token budget, so that a peer that serves ten circuits
still makes one matrix product per layer.

Fairness: the step that has waited longest is in the next micro-batch, always. A prefill counts as having
arrived `prefill_patience_s` later than it did, so decode overtakes it, but not for ever. A later step of a
session counts as waiting only once the step before it has run, so the chunks of a long prompt take turns with
decode instead of following one another. A prefill whose next hop takes no more is passed over and keeps its place.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from molink.peer.leases import LeaseKey
from molink.peer.protocol.frames import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from molink.shards.spec import MAX_STEP_TOKENS, ModelSpec, Span

MayPrefill: TypeAlias = Callable[[LeaseKey], bool]
"""Whether a session's next hop takes more of its prefill now."""


@dataclass(frozen=True, slots=True)
class PendingStep:
    """One step of one session that waits for the engine."""

    key: LeaseKey
    step: int
    span: Span
    tokens: int
    """Rows of this step, 1 or more."""
    arrived_s: float
    """When it came, on the same clock as all others."""
    prefill: bool


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much steps together."""

    max_tokens: int = MAX_STEP_TOKENS
    """Rows of a micro-batch. Only a single step that is larger exceeds it, and it runs alone."""
    max_sessions: int = 64
    prefill_patience_s: float = 0.05
    """How much longer than a decode a prefill waits when both could run."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_sessions < 1 or not self.prefill_patience_s >= 0:
            raise ValueError(f"batch limits must be positive, got {self}")


def batch_limits(spec: ModelSpec, wanted: BatchLimits = BatchLimits()) -> BatchLimits:
    """How much steps together for this model: as much as is wanted, if its activations fit one frame."""
    most_tokens = max(1, (MAX_FRAME_BYTES - MAX_HEADER_BYTES) // spec.activation_bytes)
    return replace(wanted, max_tokens=min(wanted.max_tokens, most_tokens))


@dataclass(slots=True)
class _Waiting:
    """The next step of a session, and since when it could have run."""

    pending: PendingStep
    since_s: float


class _Group:
    """The sessions whose next step is on the same span, each kind in the order of waiting."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.decode: OrderedDict[LeaseKey, _Waiting] = OrderedDict()
        self.prefill: OrderedDict[LeaseKey, _Waiting] = OrderedDict()

    def oldest(self, patience_s: float, may_prefill: MayPrefill) -> _Waiting | None:
        """The step that goes first, if one may."""
        decode = next(iter(self.decode.values()), None)
        prefill = next((one for one in self.prefill.values() if may_prefill(one.pending.key)), None)
        if prefill is None or decode is None:
            return prefill or decode
        return decode if decode.since_s <= prefill.since_s + patience_s else prefill


class MicroBatchQueue:
    """Steps that wait for the engine, at most `capacity`.

    `next` is called when the micro-batch before it has run. Time, as the queue sees it, is the latest
    arrival, and never goes back.
    """

    def __init__(self, limits: BatchLimits, capacity: int = 4096) -> None:
        self._limits = limits
        self._capacity = capacity
        self._size = 0
        self._latest_s = float("-inf")
        self._groups: dict[Span, _Group] = {}
        self._span_of: dict[LeaseKey, Span] = {}
        self._later: dict[LeaseKey, deque[PendingStep]] = {}
        self._running: list[LeaseKey] = []

    def __len__(self) -> int:
        return self._size

    def add(self, pending: PendingStep) -> bool:
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
        if pending.key in self._later:
            self._later[pending.key].append(pending)
        elif pending.key in self._span_of:
            self._later[pending.key] = deque((pending,))
        else:
            self._enter(pending)
        return True

    def discard(self, key: LeaseKey) -> None:
        """Drops all steps of a session that has ended. No error if there are none."""
        self._size -= len(self._later.pop(key, ()))
        if key in self._running:
            self._running.remove(key)
        span = self._span_of.pop(key, None)
        if span is not None:
            group = self._groups[span]
            if group.decode.pop(key, None) is None:
                del group.prefill[key]
            self._size -= 1
            self._drop_if_empty(span, group)

    def next(self, may_prefill: MayPrefill = lambda _: True) -> tuple[PendingStep, ...]:
        """Removes and returns what steps together now; () when nothing may.

        All of one span, every session at most once and its steps in the order they were added, decode before
        prefill. It holds the step that has waited longest, then decodes, then prefills, as long as they fit
        the limits; no prefill of a session that `may_prefill` says no to.
        """
        self._resume()
        found = [
            (first, span, group)
            for span, group in self._groups.items()
            if (first := group.oldest(self._limits.prefill_patience_s, may_prefill)) is not None
        ]
        if not found:
            return ()
        first, span, group = found[0] if len(found) == 1 else min(found, key=self._due_s)
        batch = self._fill(group, first.pending, may_prefill)
        for pending in batch:
            del self._span_of[pending.key]
            if self._later and pending.key in self._later:
                self._running.append(pending.key)
        self._size -= len(batch)
        self._drop_if_empty(span, group)
        return tuple(batch)

    def _enter(self, pending: PendingStep) -> None:
        """The step can run from now on."""
        group = self._groups.get(pending.span)
        if group is None:
            group = self._groups[pending.span] = _Group()
        kind = group.prefill if pending.prefill else group.decode
        kind[pending.key] = _Waiting(pending, self._latest_s)
        self._span_of[pending.key] = pending.span

    def _resume(self) -> None:
        """The last micro-batch has run: what follows in its sessions begins to wait."""
        for key in self._running:
            later = self._later[key]
            self._enter(later.popleft())
            if not later:
                del self._later[key]
        self._running.clear()

    def _due_s(self, found: tuple[_Waiting, Span, _Group]) -> tuple[float, bool]:
        """Which group's first step has waited longest, as far as prefill counts."""
        waiting, prefill = found[0], found[0].pending.prefill
        return waiting.since_s + (self._limits.prefill_patience_s if prefill else 0.0), prefill

    def _fill(self, group: _Group, first: PendingStep, may_prefill: MayPrefill) -> list[PendingStep]:
        """Takes `first` and what fits beside it out of the group."""
        tokens = self._limits.max_tokens - first.tokens
        sessions = self._limits.max_sessions - 1
        del (group.prefill if first.prefill else group.decode)[first.key]
        decode: list[PendingStep] = [] if first.prefill else [first]
        prefill: list[PendingStep] = [first] if first.prefill else []
        for kind, taken in ((group.decode, decode), (group.prefill, prefill)):
            chosen = list(_fitting(kind, tokens, sessions, may_prefill)) if kind else ()
            for pending in chosen:
                del kind[pending.key]
                tokens -= pending.tokens
                sessions -= 1
            taken.extend(chosen)
        return decode + prefill

    def _drop_if_empty(self, span: Span, group: _Group) -> None:
        if not group.decode and not group.prefill:
            del self._groups[span]


def _fitting(
    kind: OrderedDict[LeaseKey, _Waiting], tokens: int, sessions: int, may_prefill: MayPrefill
) -> Iterator[PendingStep]:
    """Those that fit and may, longest waiting first. What is too large is passed over; it goes first when it is
    the oldest."""
    for waiting in kind.values():
        if tokens <= 0 or sessions <= 0:
            return
        pending = waiting.pending
        if pending.tokens <= tokens and (not pending.prefill or may_prefill(pending.key)):
            tokens -= pending.tokens
            sessions -= 1
            yield pending
