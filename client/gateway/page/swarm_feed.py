"""Feed of the swarm's state: one look for all who listen, changes to each, and nobody waits for who reads slowly."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from molink.client.errors import SwarmError
from molink.client.gateway.apis.answer import ServerSentEvent
from molink.client.gateway.models.swarm_protocol import WatchedSwarm
from molink.client.gateway.page.swarm_state import Json, changes, page_state
from molink.client.gateway.shares import LOCAL
from molink.client.gateway.slots import GatewayBusy, GatewayStopping

LOOKS_EVERY_S: Final = 0.25
"""So often circuits are looked at while somebody listens: at most four changes a second are told."""
PEERS_EVERY_S: Final = 1.0
"""So often the peers, or more seldom where that is work."""
MOST_OF_THE_TIME: Final = 0.05
"""That may go into looking at peers."""
HEARTBEAT_S: Final = 15.0
MOST_LISTENERS: Final = 128
MOST_OF_ONE_ADDRESS: Final = 8
"""This machine's own may be all of them: a proxy in front of the gateway is one address."""
QUEUED_EVENTS: Final = 16
"""A listener that lets so many wait has its stream ended, and begins anew with the whole state."""
_HEARTBEAT: Final = b": still here\n\n"
_log = logging.getLogger(__name__)


class SwarmFeed:
    """Feed of one swarm. Looks only while somebody listens."""

    def __init__(self, swarm: WatchedSwarm, invites: Sequence[str] = ()) -> None:
        """`invites` are addresses of peers that everybody may see."""
        self._swarm = swarm
        self._invites = tuple(invites)
        self._listeners: dict[asyncio.Queue[bytes | None], str] = {}
        """The events that wait for each, and whose each is. None: the stream ends."""
        self._looking = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._snapshot: dict[str, Any] = {}
        self._looked_s: float | None = None
        """When the snapshot was taken."""
        self._look_took_s = 0.0
        self._state: Json | None = None
        self._stopping = False

    async def snapshot(self) -> dict[str, Any]:
        """The swarm as `/v1/swarm` tells it, at most PEERS_EVERY_S old.

        Raises:
            SwarmError: the swarm cannot say.
        """
        async with self._looking:
            await self._look_at_peers()
            return self._snapshot

    def admit(self, user: str) -> None:
        """Raises GatewayBusy if nobody, or nobody of this user's, may listen beside those that do, and GatewayStopping
        if the gateway is about to stop."""
        if self._stopping:
            raise GatewayStopping
        own = sum(whose == user for whose in self._listeners.values())
        if len(self._listeners) >= MOST_LISTENERS or (user != LOCAL and own >= MOST_OF_ONE_ADDRESS):
            raise GatewayBusy(
                f"{own} of your address and {len(self._listeners)} in all watch the swarm here, and "
                f"{MOST_OF_ONE_ADDRESS} and {MOST_LISTENERS} may. Close a page, or try again later."
            )

    async def events(self, user: str) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `state` with everything, then `change` with what differs, and comments when nothing
        does. Ends if they are not taken, and when the gateway stops.

        Raises:
            GatewayBusy, GatewayStopping: as `admit`.
            SwarmError: the swarm cannot say how it is.
        """
        self.admit(user)
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_EVENTS)
        self._listeners[waiting] = user
        try:
            self._swarm.time_hops(wanted=True)
            async with self._looking:
                await self._look()
                first = ServerSentEvent(self._state or {}, "state").encoded()
                while not waiting.empty():  # changes that the state has in it
                    waiting.get_nowait()
            if self._stopping:
                return
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch(), name="watch the swarm")
            yield first
            while (told := await _next(waiting)) is not None:
                yield told
        finally:
            self._listeners.pop(waiting, None)
            if not self._listeners:
                self._rest()

    def stop(self) -> None:
        """Ends all streams."""
        self._stopping = True
        for waiting in self._listeners:
            _end(waiting)

    def _rest(self) -> None:
        """Nobody listens any more."""
        self._swarm.time_hops(wanted=False)
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOKS_EVERY_S)
            try:
                async with self._looking:
                    await self._look()
            except SwarmError as error:
                _log.info("the swarm cannot be watched now: %s", error)

    async def _look(self) -> None:
        """Looks at the swarm and tells all listeners what has changed."""
        await self._look_at_peers()
        before, self._state = self._state, page_state(self._snapshot, self._swarm.circuits(), self._invites)
        changed = {} if before is None else changes(before, self._state)
        if not changed:
            return
        told = ServerSentEvent(changed, "change").encoded()
        for waiting in self._listeners:
            if waiting.full():
                _end(waiting)
            else:
                waiting.put_nowait(told)

    async def _look_at_peers(self) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        again_s = max(PEERS_EVERY_S, self._look_took_s / MOST_OF_THE_TIME)
        if self._looked_s is not None and began_s - self._looked_s < again_s:
            return
        self._snapshot = await self._swarm.snapshot()
        self._looked_s = clock()
        self._look_took_s = self._looked_s - began_s


async def _next(waiting: "asyncio.Queue[bytes | None]") -> bytes | None:
    """The next event, or a comment if there is none for HEARTBEAT_S."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await waiting.get()
    except TimeoutError:
        return _HEARTBEAT


def _end(waiting: "asyncio.Queue[bytes | None]") -> None:
    """Whatever waits, nothing comes but the end."""
    while not waiting.empty():
        waiting.get_nowait()
    waiting.put_nowait(None)
