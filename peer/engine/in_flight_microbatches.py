"""Begins the next steps of the head's sessions, as the limit of micro-batches in flight lets them."""

import asyncio
import time
from collections.abc import Callable, Iterable

from molink.peer.engine.sessions import HopSession
from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.in_flight_limit import InFlightLimit
from molink.peer.scheduling.in_flight_rules import Rule
from molink.peer.wire.protocol import molink_pb2 as pb

Begin = Callable[[HopSession, pb.Token], None]


class InFlightMicroBatches:
    """Owns the next steps that wait for others of their circuit. On the event loop."""

    def __init__(self, rule: Rule, max_sessions: int, begin: Begin, wake: Callable[[], None]) -> None:
        """`begin` queues the step that takes the token; `wake` is called when steps were queued by the clock."""
        self._limit = InFlightLimit(rule, max_sessions)
        self._begin = begin
        self._wake = wake
        self._waiting: dict[LeaseKey, tuple[HopSession, pb.Token]] = {}
        self._look: asyncio.TimerHandle | None = None

    def record_return(self, session: HopSession, token: pb.Token) -> None:
        """A token is back, and its session has a next step: it begins now, if its circuit has no other hop, or with
        a later `release_ready`."""
        if session.is_tail:
            self._begin(session, token)
            return
        if session.key not in self._limit:
            self._limit.add_session(session.key, session.plan.circuit, session.plan.stages)
        self._waiting[session.key] = session, token
        self._limit.record_return(session.key, time.perf_counter())

    def record_computed(self, keys: Iterable[LeaseKey]) -> None:
        """These sessions' steps have been computed here: their circuits' next micro-batches may begin."""
        self._limit.record_computed(keys)
        self.release_ready()

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._waiting.pop(key, None)
        self._limit.forget_session(key)

    def release_ready(self) -> None:
        """Begins what may begin now, and looks again when somebody has waited long enough."""
        now_s = time.perf_counter()
        for key in self._limit.release_ready(now_s):
            self._begin(*self._waiting.pop(key))
        due_s = self._limit.due_s() if self._waiting else None
        if due_s is not None and self._look is None:
            delay_s = max(0.0, due_s - now_s)
            self._look = asyncio.get_running_loop().call_later(delay_s, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self.release_ready()
        self._wake()
