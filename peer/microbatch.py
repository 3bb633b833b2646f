"""Which waiting steps run together next: iteration-level (continuous) batching of a peer's sessions. Pure.

Iteration-level scheduling, from Orca (Yu et al., OSDI 2022) and built upon in section 4.4 of the
decentralized-scheduling paper, chooses the batch anew for each step instead of each request: a session joins
when it arrives and leaves when it ends, and nobody waits for the longest generation. Here the steps of one
span are joined, ragged, decode and prefill under one token budget, so that a peer that serves ten circuits
still makes one matrix product per layer.

Fairness: the step that has waited longest is in the next micro-batch, always. A prefill counts as having
arrived `prefill_patience_s` later than it did, so decode overtakes it, but not for ever. A later step of a
session counts as waiting only once the step before it has run, so the chunks of a long prompt take turns with
decode instead of following one another.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from molink.peer.leases import LeaseKey
from molink.shards.spec import Span


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

    max_tokens: int = 512
    """Rows of a micro-batch. Only a single step that is larger exceeds it, and it runs alone."""
    max_sessions: int = 64
    prefill_patience_s: float = 0.05
    """How much longer than a decode a prefill waits when both could run."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_sessions < 1 or not self.prefill_patience_s >= 0:
            raise ValueError(f"batch limits must be positive, got {self}")


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

    def oldest(self, patience_s: float) -> _Waiting:
        """Of this group, which is not empty, the step that goes first."""
        if not self.prefill:
            return next(iter(self.decode.values()))
        prefill = next(iter(self.prefill.values()))
        if not self.decode:
            return prefill
        decode = next(iter(self.decode.values()))
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

    def next(self) -> tuple[PendingStep, ...]:
        """Removes and returns what steps together now; () when nothing waits.

        All of one span, every session at most once and its steps in the order they were added, decode before
        prefill. It holds the step that has waited longest, then decodes, then prefills, as long as they fit
        the limits.
        """
        self._resume()
        if not self._groups:
            return ()
        patience_s = self._limits.prefill_patience_s
        if len(self._groups) == 1:
            ((span, group),) = self._groups.items()
            first = group.oldest(patience_s)
        else:
            first, span, group = self._oldest_group(patience_s)
        batch = self._fill(group, first.pending)
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

    def _oldest_group(self, patience_s: float) -> tuple[_Waiting, Span, _Group]:
        def due_s(found: tuple[_Waiting, Span, _Group]) -> tuple[float, bool]:
            waiting = found[0]
            return waiting.since_s + (patience_s if waiting.pending.prefill else 0.0), waiting.pending.prefill

        return min(
            ((group.oldest(patience_s), span, group) for span, group in self._groups.items()), key=due_s
        )

    def _fill(self, group: _Group, first: PendingStep) -> list[PendingStep]:
        """Takes `first` and what fits beside it out of the group."""
        tokens = self._limits.max_tokens - first.tokens
        sessions = self._limits.max_sessions - 1
        del (group.prefill if first.prefill else group.decode)[first.key]
        decode: list[PendingStep] = [] if first.prefill else [first]
        prefill: list[PendingStep] = [first] if first.prefill else []
        for kind, taken in ((group.decode, decode), (group.prefill, prefill)):
            chosen = list(_fitting(kind, tokens, sessions)) if kind else ()
            for pending in chosen:
                del kind[pending.key]
                tokens -= pending.tokens
                sessions -= 1
            taken.extend(chosen)
        return decode + prefill

    def _drop_if_empty(self, span: Span, group: _Group) -> None:
        if not group.decode and not group.prefill:
            del self._groups[span]


def _fitting(kind: OrderedDict[LeaseKey, _Waiting], tokens: int, sessions: int) -> Iterator[PendingStep]:
    """Those that fit, longest waiting first. What is too large is passed over; it goes first when it is the
    oldest."""
    for waiting in kind.values():
        if tokens <= 0 or sessions <= 0:
            return
        if waiting.pending.tokens <= tokens:
            tokens -= waiting.pending.tokens
            sessions -= 1
            yield waiting.pending
