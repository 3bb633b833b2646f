"""Guests of a peer that nobody can dial: who asks for it at a relay is met there, and served over that connection.

The peer dials the relay, proves itself, and splices that connection to its own gRPC port: there the asker proves itself
as any dialler does.
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
from molink.peer.wire.reach.packets import Invite, JoinRequest
from molink.peer.wire.reach.relay_client import RelaySession, RelayUser, open_session
from molink.peer.wire.reach.splice import Splices
from molink.peer.wire.reach.ways import splice_to_port

MOST_HOSTS = 256
RelayOf = Callable[[str], RelayAt | None]
"""Where a peer says in its signed facts that it relays."""
_log = logging.getLogger(__name__)


class RelayedGuests:
    """Whoever is served over relays and holes, between `__aenter__` and `__aexit__`."""

    def __init__(self, user: RelayUser, grpc_at: tuple[str, int], relay_of: RelayOf) -> None:
        """`grpc_at`: where this peer's own gRPC port is dialled from this machine."""
        self._user = user
        self._grpc_at = grpc_at
        self._relay_of = relay_of
        self._splices = Splices()
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
        for task in self._coming:
            task.cancel()
        await asyncio.gather(*self._coming, return_exceptions=True)
        await self._splices.__aexit__(kind, error, trace)

    def host_of(self, peer_id: str) -> str | None:
        """Where a relay saw a peer that came over it; None: it never did."""
        return self._hosts.get(peer_id)

    def record_proof(self, relay: RelayAt) -> None:
        """Records that a relay has proven itself where it says that it is."""
        self._limiter.record_proof(relay.address)

    def invite(self, relay: RelayAt, invite: Invite) -> None:
        """Follows what a relay has said, unless it says so too often."""
        with suppress(ValueError):
            asker = peer_id_of(invite.public_key)
            now_s = asyncio.get_running_loop().time()
            if (why_not := self._limiter.admit(relay.peer_id, asker, now_s)) is not None:
                _log.debug("an invitation of %s by %s: %s", asker, relay.peer_id, why_not)
                return
            where = self._relay_of(asker) if invite.direct else relay
            if where is None:
                return
            invitation = Invitation(relay.peer_id, where.address)
            if (why_not := self._limiter.follow(invitation, now_s)) is not None:
                _log.debug("an invitation of %s by %s: %s", asker, relay.peer_id, why_not)
                return
            coming = self._come(where, asker, invite.token, seen=not invite.direct)
            task = asyncio.create_task(coming, name=f"come to {asker}")
            self._coming.add(task)
            task.add_done_callback(self._coming.discard)
            task.add_done_callback(lambda _: self._limiter.end(invitation))

    async def _come(self, relay: RelayAt, asker: str, token: bytes, *, seen: bool) -> None:
        """Dials the relay, and serves who asked over that connection. `seen`: the relay says where it sees the asker,
        which the asker's own relay cannot."""
        session: RelaySession | None = None
        try:
            session = await open_session(relay, self._user, JoinRequest(token))
            self.record_proof(relay)
            joined = await session.joined()
            if seen:
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
