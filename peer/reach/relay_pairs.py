"""Pairs of connections that a relay has joined: whose they are, how many there may be, and how fast each may be."""

import asyncio
import socket
from collections.abc import Callable

from molink.dht.membership.door import network_of
from molink.peer.reach.relay_limits import RelayLimits, pair_pace
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.splice import Splice, Splices

PAIR_IDLE_S = 60.0
"""A pair over which nothing goes for so long is ended: links give signs of life each 4 s."""


class Guest:
    """A connection, from when it came."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection = connection
        self.host = host
        """Where it came from."""
        self.peer_id = ""
        """Once it is proven."""
        self.task: asyncio.Task[None] | None = None
        self.writing = asyncio.Lock()
        """A stay is written to by whoever asks for it."""


class RelayPairs:
    """The pairs of one relay. Enter `splices` before the first is joined; run `end_idle` meanwhile."""

    def __init__(self, limits: Callable[[], RelayLimits]) -> None:
        self.splices = Splices()
        self._limits = limits
        self._pairs: dict[Splice, tuple[Guest, Guest]] = {}
        """And whose they are, who asked first."""

    def __len__(self) -> int:
        return len(self._pairs)

    def require_room(self, asker: Guest, wanted: str) -> None:
        """Raises RelayError where there are as many pairs as may be."""
        limits, network, pairs = self._limits(), network_of(asker.host), self._pairs.values()
        for peer_id in (asker.peer_id, wanted):
            if sum(peer_id in (one.peer_id, two.peer_id) for one, two in pairs) >= limits.pairs_of_identity:
                raise RelayError("one of the two has as many pairs here as it may")
        if sum(network_of(one.host) == network for one, _ in pairs) >= limits.pairs_of_network:
            raise RelayError("that network has as many pairs here as it may")
        if len(pairs) >= limits.pairs:
            raise RelayError("this relay joins as many pairs as it takes")

    async def join(self, asker: Guest, other: Guest) -> None:
        """Splices both connections. Raises OSError."""
        pace = pair_pace(self._bytes_per_s, asyncio.get_running_loop().time)
        splice = await self.splices.splice(asker.connection, other.connection, pace)
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

    def _bytes_per_s(self) -> float:
        """What each pair may pass on, in both directions together."""
        return self._limits().mbps * 1e6 / 8 / max(1, len(self._pairs))
