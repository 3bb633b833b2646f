"""Admission of generations: as many at once as the gateway was told, fairly among its users."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from molink.client.gateway.shares import LOCAL, FairShares

WAITING_S: Final = 5.0
"""Longest wait of a request for its turn."""
_LOOKS_EVERY_S: Final = 0.5


class GatewayStopping(Exception):
    """The gateway is told to stop, and begins nothing any more or has no more time."""


class GatewayBusy(Exception):
    """Too much is under way: another time it may be otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    user: str
    generations: int
    turn: "asyncio.Future[None]"


class Slots:
    """So many generations run at once; as many requests wait, a quarter of them of one user.

    Whose turn it is: the one whose user has the fewest, and of those the first that came. Those behind it wait until
    it has its slots, if it wants no more of them than its user's quarter: else requests for one slot each would always
    take what is given back. One that wants more is passed over until it fits, or it would keep slots idle for itself.
    """

    def __init__(
        self,
        most: int,
        *,
        waiting_s: float = WAITING_S,
        on_change: Callable[[int, int], None] = lambda _, __: None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` hears how many run and how many wait; `make_room` is called now and then while one does."""
        self._shares = FairShares(most)
        self._waiting_s = waiting_s
        self._on_change = on_change
        self._make_room = make_room
        self._waiting: list[_WaitingRequest] = []
        self._stopping = False

    async def take(self, user: str, generations: int) -> int:
        """Waits for so many slots, or for all there are; returns how many, to be given back.

        Raises:
            GatewayBusy: too many wait, or it was not this one's turn in time.
            GatewayStopping: nothing new begins.
        """
        if self._stopping:
            raise GatewayStopping
        generations = min(generations, self._shares.most)
        if not self._waiting and self._shares.may_take(user, generations):
            self._take(user, generations)
            return generations
        if not self._may_wait(user):
            raise self._busy()
        waiting = _WaitingRequest(user, generations, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._changed()
        self._grant()
        try:
            async with asyncio.timeout(self._waiting_s):
                while not waiting.turn.done():
                    self._make_room()
                    await asyncio.wait((waiting.turn,), timeout=_LOOKS_EVERY_S)
                waiting.turn.result()
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._grant()  # others may have waited behind it
                self._changed()
            elif waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self.give(user, generations)
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise
        return generations

    def give(self, user: str, generations: int) -> None:
        """Gives slots back: their generations have ended."""
        self._shares.give(user, generations)
        self._grant()
        self._changed()

    def stop(self) -> None:
        """Begins nothing more: who waits and who comes is told so."""
        self._stopping = True
        for waiting in self._waiting:
            if not waiting.turn.done():
                waiting.turn.set_exception(GatewayStopping())
        self._waiting.clear()
        self._changed()

    def _may_wait(self, user: str) -> bool:
        most = self._shares.most
        own = sum(waiting.user == user for waiting in self._waiting)
        return len(self._waiting) < most and (user == LOCAL or own < max(1, most // 4))

    def _grant(self) -> None:
        while (chosen := self._next()) is not None:
            self._waiting.remove(chosen)
            if not chosen.turn.done():
                self._take(chosen.user, chosen.generations)
                chosen.turn.set_result(None)

    def _next(self) -> _WaitingRequest | None:
        for one in sorted(self._waiting, key=lambda waiting: self._shares.held(waiting.user)):
            if self._shares.may_take(one.user, one.generations):
                return one
            if self._shares.is_within_quarter(one.user, one.generations):
                return None
        return None

    def _take(self, user: str, generations: int) -> None:
        self._shares.take(user, generations)
        self._changed()

    def _changed(self) -> None:
        self._on_change(self._shares.total, len(self._waiting))

    def _busy(self) -> GatewayBusy:
        return GatewayBusy(
            f"{self._shares.total} generations are under way, and {self._shares.most} is the most at once. "
            "Try again in a moment."
        )
