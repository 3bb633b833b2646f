"""Queueing: one client's generations wait for their turn to ask a swarm for a circuit, on the event loop."""

import asyncio
import math
import random
from collections.abc import Callable, Mapping

from molink.client.epochs.circuit_events import NoRoute, Problem, ReservationRefused
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.turns import MOST_WAITING, TurnQueue
from molink.client.errors import SwarmError, SwarmUnavailable

MOST_QUEUED_S = 600.0
"""Longest wait for a turn, however quickly those before it begin and end."""


class GenerationQueue:
    """Queue of the generations that one client has begun of a model: each waits here for its turn. `TurnQueue` decides
    whose that is."""

    def __init__(self, on_room: Callable[[], None] = lambda: None) -> None:
        """`on_room` is called before somebody asks a swarm that was full: there may be room."""
        self._on_room = on_room
        self._queue = TurnQueue[bytes]()
        self._turns: dict[bytes, asyncio.Event] = {}
        """By session, those that have entered and not left; set while they do not wait."""
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return self._queue.waiting

    async def enter(self, session: bytes, scope: bytes, patience_s: float, *, at_once: bool = False) -> None:
        """Waits for the turn of a generation, which has a place until it leaves.

        Args:
            session: as hops know it.
            scope: whose it is; turns are fair among scopes.
            patience_s: how long it waits while none of the client's generations begins or ends.
            at_once: a circuit is held for it, and it waits for nobody.

        Raises:
            SwarmUnavailable: too many wait, or this one has for too long (`busy`).
        """
        if not self._queue.enter(session, scope, at_once=at_once):
            raise SwarmUnavailable(
                f"{MOST_WAITING} generations of this client wait already for a swarm that is full",
                busy=True,
                retry_after_s=patience_s,
            )
        self._turns[session] = turn = asyncio.Event()
        if at_once:
            turn.set()
        self._look()
        await self._come(session, patience_s)

    def granted(self, session: bytes) -> None:
        """Its circuit is granted. No error if it was not its turn, or it has no place."""
        self._queue.granted(session, _now_s())
        self._look()

    async def wait_again(self, session: bytes, patience_s: float) -> float:
        """There was no room for it. Waits for its next turn; returns how long, in seconds.

        Raises:
            SwarmUnavailable: as for `enter`.
        """
        began_s = _now_s()
        self._turns[session].clear()
        self._queue.refused(session, began_s, random.random())
        self._look()
        await self._come(session, patience_s)
        return _now_s() - began_s

    def is_put_back(
        self,
        session: bytes,
        event: object,
        problems: Mapping[Problem, SwarmError],
        planned: PlannedRoute | None,
    ) -> bool:
        """Whether it has to wait for another turn after that event: all that lacks is room, and there is nobody else to
        ask. Else it looks elsewhere, or for news of the swarm, and nobody waits for it."""
        if session not in self._turns:
            return False
        if lacks_room(event, problems, planned):
            return True
        if not isinstance(event, ReservationRefused) or not event.refusal.busy:
            self._queue.set_aside(session)
            self._look()
        return False

    def leave(self, session: bytes) -> None:
        """It has ended. No error if it has no place."""
        if self._turns.pop(session, None) is not None:
            self._queue.leave(session, _now_s())
            self._look()

    async def _come(self, session: bytes, patience_s: float) -> None:
        turn, began_s = self._turns[session], _now_s()
        while not turn.is_set():
            until_s = max(began_s, self._queue.progressed_s) + patience_s
            until_s = min(until_s, began_s + MOST_QUEUED_S)
            if _now_s() >= until_s:
                raise SwarmUnavailable(
                    f"the swarm has no room for another generation of this client, and {self.waiting} wait",
                    busy=True,
                )
            try:
                async with asyncio.timeout_at(until_s):
                    await turn.wait()
            except TimeoutError:
                continue

    def _look(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        turns = self._queue.next_turns(_now_s())
        if turns and self._queue.is_full:
            self._on_room()
        for session in turns:
            self._turns[session].set()
        if (look_s := self._queue.look_s) < math.inf:
            self._alarm = asyncio.get_running_loop().call_at(look_s, self._look)


def lacks_room(event: object, problems: Mapping[Problem, SwarmError], planned: PlannedRoute | None) -> bool:
    """Whether a circuit is lacking for want of room alone, and there is no other to try."""
    if isinstance(event, ReservationRefused) and planned is not None:
        return event.refusal.busy and not event.refusal.left_out_s(len(planned.peers))
    lack = problems.get(Problem.NO_ROUTE)
    return isinstance(event, NoRoute) and isinstance(lack, SwarmUnavailable) and lack.busy


def _now_s() -> float:
    return asyncio.get_running_loop().time()
