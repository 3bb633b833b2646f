"""Gathers prompts, which wait a moment for others whose sessions are about to start: requests that come at once. Pure.

Requests that come at once do not start at once: each has a lease to ask for first. If the first one's prompt is
computed alone, all others wait for it, and the weights are read once more for them. The head knows who is about to
start: whose lease has been granted, or has been ready for a moment. So what has started waits for what is about to, as
long as one pass for all of them saves time.

No client can use this against others. A wait ends after the time that the pass saves, and after MOST_WAIT_S at the
latest; a session that has not started so long after it could have is not waited for; and after a wait in vain there is
no other until REST times as long has passed. Nobody waits for a prompt much longer than those that are here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from molink.peer.profiling.profile import StepWork
from molink.shards.spec import Span

SessionT = TypeVar("SessionT")
MOST_WAIT_S = 0.05
"""Of a prompt, for others. Eight requests of one client on the same machine all start within 30 ms."""
REST = 20.0
"""Times a wait in vain: so these take less than a twentieth of the time, whoever leases and does not start."""
LONGER = 2.0
"""A prompt is waited for if it has at most so many times the tokens of the longest one that is here."""

PredictedTime: TypeAlias = Callable[[StepWork], float]
"""Milliseconds that a step takes."""


@dataclass(frozen=True, slots=True)
class _Expected:
    tokens: int
    since_s: float
    """When it was heard last that the session may start."""


@dataclass(slots=True)
class _Group(Generic[SessionT]):
    """Of one span, since only such prompts are computed together."""

    here: dict[SessionT, int] = field(default_factory=dict)
    """Tokens of the prompts that wait."""
    expected: dict[SessionT, _Expected] = field(default_factory=dict)
    since_s: float | None = None
    """Since when these could be computed."""


class PromptGathering(Generic[SessionT]):
    """Owns what is known of prompts that wait, and of sessions that are about to start. Times are on one clock."""

    def __init__(self, predicted_ms: PredictedTime, most_tokens: int) -> None:
        """One pass takes at most so many tokens."""
        self._predicted_ms = predicted_ms
        self._most_tokens = most_tokens
        self._groups: dict[Span, _Group[SessionT]] = {}
        self._rests_until_s = float("-inf")

    def __len__(self) -> int:
        """Prompts that wait, and sessions that are about to start."""
        return sum(len(group.here) + len(group.expected) for group in self._groups.values())

    def expect_prompt(self, session: SessionT, span: Span, tokens: int, now_s: float) -> None:
        """A session's lease has been granted, or is ready now: a prompt of about so many tokens is on its way."""
        self._groups.setdefault(span, _Group()).expected[session] = _Expected(tokens, now_s)

    def add_prompt(self, session: SessionT, span: Span, tokens: int) -> None:
        """The session's prompt is here, and has so many tokens to compute."""
        group = self._groups.setdefault(span, _Group())
        group.expected.pop(session, None)
        group.here[session] = tokens

    def forget_session(self, session: SessionT) -> None:
        """The session has ended. No error if it is not known."""
        for span, group in tuple(self._groups.items()):
            group.expected.pop(session, None)
            group.here.pop(session, None)
            self._drop_if_empty(span, group)

    def release_ready(self, now_s: float) -> tuple[SessionT, ...]:
        """The prompts that wait no longer, in the order in which they came. To be asked when the engine is free."""
        released: list[SessionT] = []
        for span, group in tuple(self._groups.items()):
            if group.here and self._until_s(span, group, now_s) <= now_s:
                self._learn(group, now_s)
                released += group.here
                group.here, group.since_s = {}, None
                self._drop_if_empty(span, group)
        return tuple(released)

    def due_s(self, now_s: float) -> float | None:
        """When some of those that wait are released, even if nobody comes; None: nobody waits."""
        waiting = [(span, group) for span, group in self._groups.items() if group.here]
        return min((self._until_s(span, group, now_s) for span, group in waiting), default=None)

    def _until_s(self, span: Span, group: _Group[SessionT], now_s: float) -> float:
        if group.since_s is None:
            group.since_s = now_s
        here, longest = sum(group.here.values()), LONGER * max(group.here.values())
        if now_s < self._rests_until_s:
            return now_s
        coming = [
            one
            for one in group.expected.values()
            if one.tokens <= longest and now_s < one.since_s + MOST_WAIT_S
        ]
        tokens = _fitting((one.tokens for one in coming), self._most_tokens - here)
        if not tokens:
            return now_s
        saved_s = saved_ms(self._predicted_ms, len(span), min(here, tokens), self._most_tokens) / 1000
        patient_s = group.since_s + min(saved_s, MOST_WAIT_S)
        return min(patient_s, max(one.since_s for one in coming) + MOST_WAIT_S)

    def _learn(self, group: _Group[SessionT], now_s: float) -> None:
        """Whoever was waited for and has not come is not waited for again, and nobody else is for a while."""
        since_s = now_s if group.since_s is None else group.since_s
        missing = any(one.since_s + MOST_WAIT_S > since_s for one in group.expected.values())
        if missing and now_s > since_s and now_s >= self._rests_until_s:
            self._rests_until_s = now_s + REST * (now_s - since_s)
        group.expected.clear()

    def _drop_if_empty(self, span: Span, group: _Group[SessionT]) -> None:
        if not group.here and not group.expected:
            del self._groups[span]


def saved_ms(predicted_ms: PredictedTime, layers: int, few: int, most_tokens: int) -> float:
    """What one pass saves over two, of which that of fewer tokens has `few`: what these take beyond their share of a
    pass of `most_tokens`. The difference of three predictions would mostly be their errors."""

    def pass_ms(tokens: int) -> float:
        return predicted_ms(StepWork(layers, starts=True, ends=True, prefills=((tokens, 0),)))

    return max(0.0, pass_ms(few) - pass_ms(most_tokens) * few / most_tokens)


def _fitting(tokens: Iterable[int], most: int) -> int:
    """The sum of the first of them that together are no more."""
    total = 0
    for one in tokens:
        if total + one > most:
            break
        total += one
    return total
