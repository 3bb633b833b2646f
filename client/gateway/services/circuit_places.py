"""Places for generations on a service's circuits, as far as this gateway has leased them from the database."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from molink.client.circuit.reserving import Report
from molink.client.errors import SwarmUnavailable
from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.services.circuit_store import CIRCUITS_LAPSE_AFTER_S, CircuitGrant
from molink.client.gateway.services.service import CircuitDemand

RENEWS_EVERY_S: Final = 1.0
"""What other gateways need is heard of within so long."""
ASKS_AGAIN_AFTER_S: Final = 0.2
"""While generations wait here, or circuits are to be given back."""
TRUSTED_S: Final = CIRCUITS_LAPSE_AFTER_S - 2.0
"""What was granted counts for so long after it was asked for; when it lapses others take it."""
_log = logging.getLogger(__name__)


class LeasesCircuits(Protocol):
    """What places are leased from: `CircuitStore`."""

    async def exchange(self, service: str, maximum: int, demand: CircuitDemand) -> CircuitGrant: ...


class HoldsCircuits(Protocol):
    """Circuits that are held, as `HeldCircuits` are."""

    changed: asyncio.Event

    @property
    def count(self) -> int: ...

    async def add(self, tokens: int, timeout_s: float, report: Report = ...) -> None: ...

    def keep_at_most(self, count: int) -> None: ...

    def describe(self) -> list[dict[str, Any]]: ...


class PlaceTerms(NamedTuple):
    """Terms on which a service has places."""

    service: str
    maximum: int
    """Circuits of all gateways together."""
    waits_s: float
    """Longest wait of a generation for its place, while none of its request is under way."""


@dataclass(slots=True)
class RequestPlaces:
    """Places of one request's generations. Those that have one give it back, so the others wait for as long as that
    takes: a request whose generations were refused when some of them are under way would lose what these have done."""

    generations: int = 0
    """That it asks for."""
    in_use: int = 0
    given_back_s: float = float("-inf")
    """When one of them was over last; monotonic."""


@dataclass(slots=True)
class _Leased:
    """What the database answered last, and when it was asked; monotonic."""

    grant: CircuitGrant = field(default_factory=lambda: CircuitGrant(0))
    asked_s: float = float("-inf")
    fails: bool = False


class CircuitPlaces:
    """Places of one service in this gateway, and owner of the right to hold circuits for it."""

    def __init__(self, terms: PlaceTerms, store: LeasesCircuits, held: HoldsCircuits) -> None:
        self.in_use = 0
        """Generations under way."""
        self.changed = asyncio.Event()
        """Set when generations or places have become more or fewer; whoever watches clears it."""
        self._terms = terms
        self._store = store
        self._held = held
        self._leased = _Leased()
        self._queue: deque[asyncio.Future[None]] = deque()
        self._beginning = 0
        """Generations of which nothing has come yet: each may be about to take a circuit that is held."""
        self._forming: asyncio.Task[None] | None = None
        """A further circuit to be held."""
        self._spare = 0
        self._due = asyncio.Event()
        """The database is to be asked now."""

    @property
    def waiting(self) -> int:
        """Generations that wait for a place."""
        return len(self._queue)

    @property
    def everywhere(self) -> tuple[int, int]:
        """Generations under way, and those that wait, at all gateways, as the database last said."""
        elsewhere = self._leased.grant
        return self.in_use + elsewhere.in_use_elsewhere, self.waiting + elsewhere.waiting_elsewhere

    @property
    def free(self) -> int:
        """Circuits that may be held beside those in use."""
        return max(0, self._allowed - self.in_use)

    @property
    def maximum(self) -> int:
        """Generations that the service can have under way at once."""
        return self._terms.maximum

    @asynccontextmanager
    async def place(self, request: RequestPlaces) -> AsyncIterator[Callable[[], None]]:
        """Holds a place for one generation of a request, which says by a call when something of it has come.

        Raises:
            SwarmUnavailable: all are in use, here and elsewhere.
            AccountsUnavailable: no place is free here, and the database does not answer.
        """
        await self._take(request)
        request.in_use += 1
        self._beginning += 1
        begins = [True]

        def has_begun() -> None:
            self._beginning -= len(begins)
            begins.clear()

        try:
            yield has_begun
        finally:
            has_begun()
            request.in_use -= 1
            request.given_back_s = asyncio.get_running_loop().time()
            self._give_back()

    def want_spare(self, circuits: int) -> None:
        """So many circuits are wanted beside those in use and waited for."""
        if circuits != self._spare:
            self._spare = circuits
            self._due.set()

    async def form(self, adding: Coroutine[Any, Any, None]) -> None:
        """Has one more circuit formed and held, unless a generation needs its place meanwhile. Raises as it does."""
        forming = self._forming = asyncio.create_task(adding, name="form a circuit to hold")
        try:
            await asyncio.wait((forming,))
        finally:
            self._forming = None
            forming.cancel()
            await asyncio.gather(forming, return_exceptions=True)
        if not forming.cancelled():
            forming.result()

    def trim(self, most: int) -> None:
        """Lets go of circuits that are held beyond `most`, or beyond what may be."""
        self._held.keep_at_most(min(most, self.free) + self._beginning)

    async def keep_leased(self) -> None:
        """Asks the database for what is needed, and gives back what is not, until cancelled."""
        while True:
            self._due.clear()
            told = self._demand()
            if not told.is_nothing or self._leased.grant.circuits:
                await self._exchange(told)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(told)):
                    await self._due.wait()

    def _pause_s(self, told: CircuitDemand) -> float | None:
        """Time until the database is asked again; None: until something is needed. `told` is what it has heard."""
        demand, allowed = self._demand(), self._allowed
        if demand.occupied < told.occupied and told.occupied > allowed:
            return 0.0  # others wait for what has been given back
        if demand.waiting or demand.occupied > allowed:
            return ASKS_AGAIN_AFTER_S
        return None if demand.is_nothing and not self._leased.grant.circuits else RENEWS_EVERY_S

    @property
    def _allowed(self) -> int:
        """Circuits that this gateway may have now."""
        is_trusted = asyncio.get_running_loop().time() - self._leased.asked_s < TRUSTED_S
        return self._leased.grant.circuits if is_trusted else 0

    def _demand(self) -> CircuitDemand:
        idle = self._held.count + (self._forming is not None)
        return CircuitDemand(self.in_use, self.waiting, idle, self._spare)

    async def _exchange(self, demand: CircuitDemand) -> None:
        leased, asked_s = self._leased, asyncio.get_running_loop().time()
        try:
            leased.grant = await self._store.exchange(self._terms.service, self._terms.maximum, demand)
        except AccountsUnavailable as error:
            if not leased.fails:
                _log.warning("circuits of %s cannot be leased (%s)", self._terms.service, error)
            leased.fails = True
            return
        leased.asked_s, leased.fails = asked_s, False
        self.trim(self._held.count)
        self._admit()
        self.changed.set()

    async def _take(self, request: RequestPlaces) -> None:
        if not self._queue and self.in_use < self._allowed:
            self._begin()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._due.set()
        self.changed.set()
        try:
            await self._wait(turn, request)
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._give_back()  # it came when nobody waited for it any more
            else:
                with suppress(ValueError):
                    self._queue.remove(turn)
                self.changed.set()
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    async def _wait(self, turn: "asyncio.Future[None]", request: RequestPlaces) -> None:
        """Raises `TimeoutError` once it has waited its time since it came, or since one of its request was over; not
        while one is under way."""
        clock = asyncio.get_running_loop().time
        came_s = clock()
        while not turn.done():
            since_s = clock() if request.in_use else max(came_s, request.given_back_s)
            left_s = since_s + self._terms.waits_s - clock()
            if left_s <= 0 and not request.in_use:
                raise TimeoutError
            await asyncio.wait((turn,), timeout=left_s)

    def _refusal(self) -> Exception:
        if self._leased.fails:
            return AccountsUnavailable("circuits of the service cannot be leased")
        terms = self._terms
        return SwarmUnavailable(
            f"all {terms.maximum} circuits of the service {terms.service} are in use", busy=True
        )

    def _begin(self) -> None:
        self.in_use += 1
        left = max(0, self._held.count - self._beginning - 1)
        if self._forming is not None and self.in_use + left >= self._allowed:
            self._forming.cancel()
        self.changed.set()

    def _give_back(self) -> None:
        self.in_use -= 1
        if self.in_use >= self._allowed:
            self._due.set()  # others wait for it
        self._admit()
        self.changed.set()

    def _admit(self) -> None:
        for turn in tuple(self._queue):
            if self.in_use >= self._allowed:
                return
            self._queue.remove(turn)
            if not turn.done():
                self._begin()
                turn.set_result(None)
