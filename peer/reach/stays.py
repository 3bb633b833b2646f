"""Stays of a peer that nobody can dial: conversations with a few relays, over which it hears who asks for it.

Who is asked for dials the relay, proves itself, and splices that connection to its own gRPC port: there the asker
proves itself as any dialler does. Nothing but relays is dialled, and those only at addresses that they have signed.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from molink.dht.identity.identity import peer_id_of
from molink.dht.records.records import RelayAt
from molink.peer.reach.invitations import Invitation, InvitationLimiter
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
from molink.peer.wire.reach.splice import Splices
from molink.peer.wire.reach.ways import splice_to_port

MOST_STAYS = 3
SILENT_S = 45.0
RETRY_S = (0.25, 1.0, 2.0, 5.0, 10.0, 30.0)
READ_PAUSE_S = 0.02
"""After each packet of a relay: one that floods is read at this rate, and does not keep this process from anything."""
LASTING_S = 30.0
"""After a stay that lasted so long the next attempt is a first one again."""
MOST_HOSTS = 256
RelayOf = Callable[[str], RelayAt | None]
"""Where a peer says in its signed facts that it relays."""
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
        self._user = user
        self._grpc_at = grpc_at
        self._relay_of = relay_of
        self._changed = changed
        self._splices = Splices()
        self._keeping: dict[RelayAt, asyncio.Task[None]] = {}
        self._staying: set[RelayAt] = set()
        self._coming: set[asyncio.Task[None]] = set()
        self._limiter = InvitationLimiter()
        self._hosts: OrderedDict[str, str] = OrderedDict()
        self._served: dict[str, int] = {}
        """How many connections of each peer go over relays now."""

    async def __aenter__(self) -> Self:
        await self._splices.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = (*self._keeping.values(), *self._coming)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._splices.__aexit__(kind, error, trace)

    @property
    def relays(self) -> tuple[RelayAt, ...]:
        """Where this peer can be asked for now, in a fixed order."""
        return tuple(relay for relay in self._keeping if relay in self._staying)

    def host_of(self, peer_id: str) -> str | None:
        """Where a relay saw a peer that came over it; None: it never did."""
        return self._hosts.get(peer_id)

    def keep(self, relays: tuple[RelayAt, ...]) -> None:
        """From now on stays at these, at most MOST_STAYS, and at no others."""
        wanted = relays[:MOST_STAYS]
        for relay in tuple(self._keeping):
            if relay not in wanted:
                self._keeping.pop(relay).cancel()
        for relay in wanted:
            if relay not in self._keeping:
                self._keeping[relay] = asyncio.create_task(self._keep(relay), name=f"stay {relay.peer_id}")

    async def _keep(self, relay: RelayAt) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            began_s = clock()
            try:
                session = await open_session(relay, self._user)
                self._limiter.record_proof(relay.address)
                await self._stay(relay, session)
            except (OSError, TimeoutError) as error:
                _log.debug("the stay at %s ended: %s", relay.peer_id, error)
            if clock() - began_s >= LASTING_S:
                failures = 0
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    async def _stay(self, relay: RelayAt, session: RelaySession) -> None:
        pinging: asyncio.Task[None] | None = None
        try:
            await write_relay(session.connection, Stay())
            pinging = asyncio.create_task(_ping(session), name=f"ping {relay.peer_id}")
            while True:
                async with asyncio.timeout(SILENT_S):
                    packet = await read_relay(session.connection)
                if isinstance(packet, Invite):
                    self._invited(relay, packet)
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
            session.close()
            if relay in self._staying:
                self._staying.discard(relay)
                self._changed()

    def _invited(self, relay: RelayAt, invite: Invite) -> None:
        with suppress(ValueError):
            asker = peer_id_of(invite.public_key)
            where = self._relay_of(asker) if invite.direct else relay
            if where is None:
                return
            invitation = Invitation(relay.peer_id, where.address)
            why_not = self._limiter.follow(invitation, asker, asyncio.get_running_loop().time())
            if why_not is not None:
                _log.debug("an invitation of %s by %s: %s", asker, relay.peer_id, why_not)
                return
            task = asyncio.create_task(self._come(where, asker, invite.token), name=f"come to {asker}")
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
            task.add_done_callback(lambda _: self._limiter.end(invitation))

    async def _come(self, relay: RelayAt, asker: str, token: bytes) -> None:
        """Dials the relay, and serves who asked over that connection."""
        session: RelaySession | None = None
        try:
            session = await open_session(relay, self._user)
            self._limiter.record_proof(relay.address)
            joined = await session.join(token)
            self._hosts[asker] = joined.host
            self._hosts.move_to_end(asker)
            if len(self._hosts) > MOST_HOSTS:
                self._hosts.popitem(last=False)
            splice = await splice_to_port(self._splices, session.connection, self._grpc_at)
            self._served[asker] = self._served.get(asker, 0) + 1
            splice.gone.add_done_callback(lambda _: self._ended(asker))
        except (OSError, TimeoutError) as error:
            _log.debug("coming to %s over %s failed: %s", asker, relay.peer_id, error)
            if session is not None:
                session.close()
        except asyncio.CancelledError:
            if session is not None:
                session.close()
            raise

    def serves(self, peer_id: str) -> bool:
        """Whether a connection of that peer comes over a relay now."""
        return peer_id in self._served

    def _ended(self, peer_id: str) -> None:
        left = self._served.pop(peer_id) - 1
        if left:
            self._served[peer_id] = left

    async def serve(self, connection: socket.socket) -> None:
        """Serves who is at the other end of a connected socket, as if it had come over a relay. Raises OSError."""
        await splice_to_port(self._splices, connection, self._grpc_at)


async def _ping(session: RelaySession) -> None:
    while True:
        await write_relay(session.connection, RelayPing())
        await asyncio.sleep(PING_EVERY_S)
