"""Stays of a peer that nobody can dial: conversations with a few relays, over which it hears who asks for it.

Nothing but relays is dialled, and those only at addresses that they have signed. There who is asked for meets the asker
(`relayed_guests.py`).
"""

import asyncio
import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Self

from molink.dht.records.records import RelayAt
from molink.peer.reach.relayed_guests import RelayedGuests, RelayOf
from molink.peer.wire.reach.packets import (
    Invite,
    RelayError,
    RelayPing,
    RelayPong,
    Stay,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_client import PING_EVERY_S, RelaySession, RelayUser, open_session

MOST_STAYS = 3
SILENT_S = PING_EVERY_S + 5.0
"""A relay that has not answered a ping for so long is stayed at anew."""
DOUBTS_EVERY_S = 5.0
"""Whoever falls silent on purpose has this peer dial its relays no more often."""
RETRY_S = (0.25, 1.0, 2.0, 5.0, 10.0, 30.0)
READ_PAUSE_S = 0.02
"""After each packet of a relay: one that floods is read at this rate, and does not keep this process from anything."""
LASTING_S = 30.0
"""After a stay that lasted so long the next attempt is a first one again."""
_log = logging.getLogger(__name__)


class Stays:
    """Keeps stays at the relays of `keep`, between `__aenter__` and `__aexit__`."""

    def __init__(
        self,
        user: RelayUser,
        grpc_at: tuple[str, int],
        relay_of: RelayOf,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`grpc_at`: where this peer's own gRPC port is dialled from this machine. `changed` is called when a stay
        begins or ends."""
        self.guests = RelayedGuests(user, grpc_at, relay_of)
        """Who came over the relays."""
        self._user = user
        self._changed = changed
        self._keeping: dict[RelayAt, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Told to end, and waited for at the end of all."""
        self._staying: set[RelayAt] = set()
        self._doubted = asyncio.Event()
        """Replaced by another one when it is set."""
        self._doubted_s = -math.inf

    async def __aenter__(self) -> Self:
        await self.guests.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep(())
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.guests.__aexit__(kind, error, trace)

    @property
    def relays(self) -> tuple[RelayAt, ...]:
        """Where this peer can be asked for now, in a fixed order."""
        return tuple(relay for relay in self._keeping if relay in self._staying)

    def keep(self, relays: tuple[RelayAt, ...]) -> None:
        """From now on stays at these, at most MOST_STAYS, and at no others."""
        wanted = relays[:MOST_STAYS]
        for relay in tuple(self._keeping):
            if relay not in wanted:
                task = self._keeping.pop(relay)
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        for relay in wanted:
            if relay not in self._keeping:
                self._keeping[relay] = asyncio.create_task(self._keep(relay), name=f"stay {relay.peer_id}")

    def doubt(self) -> None:
        """Stays anew at each relay, beside the stay that there is, at most every DOUBTS_EVERY_S: links have fallen
        silent, and so may the relays have, if the NAT has forgotten them or the outer address is another one."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._doubted_s >= DOUBTS_EVERY_S:
            self._doubted_s = now_s
            doubted, self._doubted = self._doubted, asyncio.Event()
            doubted.set()

    async def _keep(self, relay: RelayAt) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            began_s = clock()
            try:
                session = await self._begin(relay)
                await self._stay_on(relay, session)
            except (OSError, TimeoutError) as error:
                _log.debug("the stay at %s ended: %s", relay.peer_id, error)
            finally:
                self._gone(relay)
            if clock() - began_s >= LASTING_S:
                failures = 0
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    async def _begin(self, relay: RelayAt) -> RelaySession:
        """A conversation that stays, in place of any other with that relay. Raises OSError."""
        session = await open_session(relay, self._user)
        self.guests.record_proof(relay)
        try:
            await write_relay(session.connection, Stay())
        except BaseException:
            session.close()
            raise
        return session

    async def _stay_on(self, relay: RelayAt, session: RelaySession) -> None:
        """Until it ends, over another connection each time that it was doubted. Raises what ends it."""
        while True:
            session = await self._stay_until_doubted(relay, session)

    async def _stay_until_doubted(self, relay: RelayAt, session: RelaySession) -> RelaySession:
        """Another conversation, made before the old one is let go of. Raises what ends the stay before."""
        fresh: RelaySession | None = None
        doubted = asyncio.ensure_future(self._doubted.wait())
        staying = asyncio.create_task(self._stay(relay, session), name=f"stay at {relay.peer_id}")
        # However it ends: cancelled before it began, or once more while it ends.
        staying.add_done_callback(lambda _: session.close())
        try:
            await asyncio.wait({doubted, staying}, return_when=asyncio.FIRST_COMPLETED)
            if staying.done():
                staying.result()
            fresh = await self._begin(relay)
            return fresh
        finally:
            for task in (doubted, staying):
                task.cancel()
            try:
                await asyncio.gather(doubted, staying, return_exceptions=True)
            except asyncio.CancelledError:
                if fresh is not None:
                    fresh.close()
                raise

    def _gone(self, relay: RelayAt) -> None:
        if relay in self._staying:
            self._staying.discard(relay)
            self._changed()

    async def _stay(self, relay: RelayAt, session: RelaySession) -> None:
        """Until it ends, which always raises."""
        pinging: asyncio.Task[None] | None = None
        try:
            pinging = asyncio.create_task(_ping(session), name=f"ping {relay.peer_id}")
            while True:
                async with asyncio.timeout(SILENT_S):
                    packet = await read_relay(session.connection)
                if isinstance(packet, Invite):
                    self.guests.invite(relay, packet)
                elif not isinstance(packet, RelayPong):
                    raise RelayError(f"the relay sent a {type(packet).__name__}")
                if relay not in self._staying:
                    self._staying.add(relay)
                    self._changed()
                await asyncio.sleep(READ_PAUSE_S)
        finally:
            if pinging is not None:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)


async def _ping(session: RelaySession) -> None:
    while True:
        await write_relay(session.connection, RelayPing())
        await asyncio.sleep(PING_EVERY_S)
