"""Pairs of connections that a relay has joined: whose they are, how many there may be, and how fast each may be."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from molink.dht.membership.door import network_of
from molink.peer.reach.relay_limits import PairPaces, RelayLimits
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.splice import Splice, Splices

PAIR_IDLE_S = 20.0
"""A pair over which nothing goes for so long is ended: links give signs of life each 4 s."""


class Guest:
    """A connection, from when it came."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection = connection
        self.host = host
        """Where it came from."""
        self.peer_id = ""
        """Once it is proven."""
        self.task: asyncio.Task[bool] | None = None
        self.writing = asyncio.Lock()
        """A stay is written to by whoever asks for it."""


class RelayPairs:
    """The pairs of one relay. Enter `splices` before the first is joined; run `end_idle` meanwhile."""

    def __init__(self, limits: Callable[[], RelayLimits]) -> None:
        self.splices = Splices()
        self._limits = limits
        self._pairs: dict[Splice, tuple[Guest, Guest]] = {}
        """And whose they are, who asked first."""
        self._awaited: list[tuple[Guest, str]] = []
        """Pairs of which the second end has yet to come: who asked, and for whom."""
        self._paces = PairPaces(self._rate, lambda: asyncio.get_running_loop().time())

    def __len__(self) -> int:
        return len(self._pairs)

    @contextmanager
    def room(self, asker: Guest, wanted: str) -> Iterator[None]:
        """Room for a pair while it is made. Raises RelayError where there are as many as may be."""
        limits, network = self._limits(), network_of(asker.host)
        pairs = [(one.peer_id, two.peer_id, one.host) for one, two in self._pairs.values()]
        pairs += [(one.peer_id, peer_id, one.host) for one, peer_id in self._awaited]
        for peer_id in (asker.peer_id, wanted):
            if sum(peer_id in (one, two) for one, two, _ in pairs) >= limits.pairs_of_identity:
                raise RelayError("one of the two has as many pairs here as it may")
        if sum(network_of(host) == network for *_, host in pairs) >= limits.pairs_of_network:
            raise RelayError("that network has as many pairs here as it may")
        if len(pairs) >= limits.pairs:
            raise RelayError("this relay joins as many pairs as it takes")
        awaited = asker, wanted
        self._awaited.append(awaited)
        try:
            yield
        finally:
            self._awaited.remove(awaited)

    async def join(self, asker: Guest, other: Guest) -> None:
        """Splices both connections. Raises OSError."""
        splice = await self.splices.splice(asker.connection, other.connection, self._paces.pace())
        self._pairs[splice] = asker, other
        splice.gone.add_done_callback(lambda _: self._pairs.pop(splice, None))

    async def end_idle(self) -> None:
        """Ends pairs over which nothing goes, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(PAIR_IDLE_S / 4)
            for splice in tuple(self._pairs):
                if clock() - splice.moved_s > PAIR_IDLE_S:
                    splice.close()

    def _rate(self) -> tuple[float, int]:
        """Bytes a second of all pairs, in both directions together, and how many pairs there are."""
        return self._limits().mbps * 1e6 / 8, max(1, len(self._pairs))
