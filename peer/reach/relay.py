"""Relay: joins two connections that came to it, where one of the two peers cannot be dialled. It dials nobody for
anybody, but the very host that asks whether it can be dialled.

Who comes proves its identity before anything else (`relay_proof.py`). A peer that cannot be dialled stays: when
somebody asks for it, it is told so, dials the relay, and both connections are spliced. TLS between the two ends is
theirs, so a relay can delay and drop, and neither read nor forge.
"""

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from molink.dht.errors import PortInUse
from molink.dht.identity.identity import Identity, peer_id_of, public_key_of
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.door import ConnectionLimiter, network_of
from molink.dht.refusals import RefusalLog
from molink.peer.reach.relay_limits import DIAL_BACKS, REACHES, RelayLimits
from molink.peer.reach.relay_pairs import Guest, RelayPairs
from molink.peer.serving.budgets import Budget
from molink.peer.wire.link.ladder import certificate_at
from molink.peer.wire.reach.packets import (
    DialBack,
    DialledBack,
    Invite,
    Invited,
    Joined,
    JoinRequest,
    ReachRequest,
    RelayError,
    RelayHungUp,
    RelayPing,
    RelayPong,
    RelayProof,
    RelayRefusal,
    Stay,
    read_relay,
    write_relay,
)
from molink.peer.wire.reach.relay_client import (
    PING_EVERY_S,
    RelayUser,
    accept,
    expect_relay,
    host_and_port_of,
)
from molink.peer.wire.reach.relay_proof import check_user, new_challenge, prove_relay

PROOF_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 20.0
"""From the welcome to the question: a socket that is kept for its outer port asks nothing meanwhile."""
COME_TIMEOUT_S = 2.5
"""An invited peer has so long to come."""
DIAL_BACK_TIMEOUT_S = 2.0
STAY_SILENT_S = 3 * PING_EVERY_S
"""Who stays and says nothing for so long is gone."""
PING_PAUSE_S = 1.0
"""After each ping: who floods is read at this rate, and does not keep this process from anything."""
WRITE_TIMEOUT_S = 2.0
ACCEPT_RETRY_S = 0.1
_log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT", None, bool)


class _WaitingEnd:
    """Somebody waits for an invited peer."""

    def __init__(self, peer_id: str, host: str, invite: Invite | None = None) -> None:
        self.peer_id = peer_id
        """Who is to come."""
        self.host = host
        """Of who asked, where this relay sees it; empty: this relay's own process asks."""
        self.invite = invite
        """What it is told; None: another relay tells it."""
        self.came: asyncio.Future[Guest] = asyncio.get_running_loop().create_future()
        self.joined = asyncio.Event()
        """Set when the connection of who came is not its own task's any more."""


class Relay:
    """The relay of one peer, listening between `__aenter__` and `__aexit__`."""

    def __init__(
        self,
        host: str,
        port: int,
        identity: Identity,
        swarm_key: SwarmKey | None,
        limits: RelayLimits | None = None,
        is_member: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_member`: whether an identity is known to belong to the swarm; strangers never take the last tenth."""
        self.limits = limits or RelayLimits()
        """Of guests, and the rate of all pairs; its rate may be changed at any time."""
        self._address = host, port
        self._user = RelayUser(identity, swarm_key)
        self._limiter = ConnectionLimiter(self.limits.connections(), is_member)
        self._budgets = {ReachRequest: Budget(REACHES), DialBack: Budget(DIAL_BACKS)}
        self._guests: dict[int, Guest] = {}
        self._stays: dict[str, Guest] = {}
        """By peer id: who is told when somebody asks for it."""
        self._waiting: dict[bytes, _WaitingEnd] = {}
        """By token: who is to come."""
        self._pairs = RelayPairs(lambda: self.limits)
        self._refusals = RefusalLog(_log)
        self._tasks: set[asyncio.Task[None] | asyncio.Task[bool]] = set()
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise PortInUse(
                f"the relay cannot listen on {host} port {port}: the port is in use or the address is not "
                "this machine's. Choose another with --relay-port, or 0 for any free one."
            ) from error
        listener.setblocking(False)
        self._listener, self._address = listener, (host, listener.getsockname()[1])
        await self._pairs.splices.__aenter__()
        self._spawn(self._accept(listener))
        self._spawn(self._pairs.end_idle())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._pairs.splices.__aexit__(kind, error, trace)

    @property
    def port(self) -> int:
        """Where it listens; 0 before it does, if any port will do."""
        return self._address[1]

    @property
    def stays(self) -> frozenset[str]:
        """Peer ids of those that can be reached through here now."""
        return frozenset(self._stays)

    @property
    def pairs(self) -> int:
        """How many pairs of connections are joined now."""
        return len(self._pairs)

    async def expect(
        self, peer_id: str, token: bytes, timeout_s: float, invite: Invite | None = None
    ) -> tuple[socket.socket, str]:
        """Waits for a peer that was invited to come here itself: its socket, and the host that it came from. `invite`:
        by which it was, if it stays here.

        Raises:
            RelayError: it does not come in time.
        """
        waiting = _WaitingEnd(peer_id, "", invite)
        self._waiting[token] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                guest = await asyncio.shield(waiting.came)
                await write_relay(guest.connection, Joined(""))
        except BaseException as error:
            if waiting.came.done():
                waiting.came.result().connection.close()
            if isinstance(error, TimeoutError | OSError):
                raise RelayError(f"{waiting.peer_id} did not come: {error}") from error
            raise
        finally:
            del self._waiting[token]
            waiting.joined.set()
        return guest.connection, guest.host

    async def call(self, peer_id: str, token: bytes, timeout_s: float) -> tuple[socket.socket, str]:
        """As `expect`, of a peer that stays here, which is told to come first."""
        stay = self._stays.get(peer_id)
        if stay is None:
            raise RelayError("that peer does not stay here")
        invite = Invite(public_key_of(self._user.identity.peer_id), token, direct=False)
        try:
            await _tell(stay, invite)
        except (TimeoutError, OSError) as error:
            raise RelayError(f"{peer_id} could not be told: {error}") from error
        return await self.expect(peer_id, token, timeout_s, invite)

    # -- connections

    def _spawn(self, work: Coroutine[object, object, ResultT]) -> "asyncio.Task[ResultT]":
        task = asyncio.create_task(work, name="relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, host, port = await accept(listener)
            except OSError:  # no descriptors are left, or who came has gone
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            entry = self._limiter.admit(loop.time(), network_of(host))
            self._send_away(entry.sent_away)
            assert entry.guest is not None  # noqa: S101 - nobody is refused before he has proven who he is
            observed = host_and_port_of(host, port)
            guest = self._guests[entry.guest] = Guest(connection, observed.rpartition(":")[0].strip("[]"))
            guest.task = self._spawn(self._serve(entry.guest, guest, observed))
            guest.task.add_done_callback(partial(self._leave, entry.guest, guest))

    def _leave(self, number: int, guest: Guest, task: "asyncio.Task[bool]") -> None:
        """A conversation has ended, perhaps before it began."""
        self._limiter.remove_guest(number)
        self._guests.pop(number, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a conversation with the relay failed", exc_info=error)
        if error is not None or task.cancelled() or not task.result():
            guest.connection.close()

    def _send_away(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            guest = self._guests.pop(number, None)
            if guest is not None and guest.task is not None:
                self._refusals.refused("relay connections beyond what may be", guest.host)
                guest.task.cancel()

    async def _serve(self, number: int, guest: Guest, observed: str) -> bool:
        """One conversation: whether its connection is somebody else's then. Whatever goes wrong ends it alone."""
        try:
            return await self._converse(number, guest, observed)
        except RelayHungUp:
            return False
        except RelayError as error:
            self._refusals.refused("relay conversations", guest.host)
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await write_relay(guest.connection, RelayRefusal(_printable(str(error))))
            return False
        except (OSError, TimeoutError):
            return False

    async def _converse(self, number: int, guest: Guest, observed: str) -> bool:
        """Proof, one question, its answer. True: the connection is somebody else's now."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PROOF_TIMEOUT_S):
            challenge = new_challenge()
            await write_relay(guest.connection, challenge)
            proof = expect_relay(await read_relay(guest.connection), RelayProof)
            guest.peer_id = check_user(proof, challenge, self._user.identity.peer_id, self._user.swarm_key)
            entry = self._limiter.prove(number, loop.time(), guest.peer_id)
            self._send_away(entry.sent_away)
            if entry.guest is None:
                raise RelayError("this relay has as many connections as it takes")
            welcome = prove_relay(challenge, proof, observed, self._user.identity, self._user.swarm_key)
            await write_relay(guest.connection, welcome)
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            question = await read_relay(guest.connection)
        if isinstance(question, Stay):
            self._limiter.mark_busy(number)
            await self._stay(guest)
            return False
        if isinstance(question, DialBack):
            await self._dial_back(guest, question)
            return False
        if isinstance(question, JoinRequest):
            self._limiter.mark_busy(number)
            return await self._join(guest, question.token)
        if isinstance(question, ReachRequest):
            self._limiter.mark_busy(number)
            return await self._reach(guest, question)
        raise RelayError(f"a {type(question).__name__} is out of place here")

    # -- questions

    async def _stay(self, guest: Guest) -> None:
        """Until it hangs up or falls silent, or comes again."""
        if guest.peer_id not in self._stays and len(self._stays) >= self.limits.stays:
            raise RelayError("this relay has as many stays as it takes")
        former = self._stays.get(guest.peer_id)
        self._stays[guest.peer_id] = guest
        if former is not None and former.task is not None:
            former.task.cancel()
        try:
            for end in tuple(self._waiting.values()):  # the former may be gone without a word
                if end.peer_id == guest.peer_id and end.invite is not None and not end.came.done():
                    await _invite(guest, end.invite)
            while True:
                async with asyncio.timeout(STAY_SILENT_S):
                    expect_relay(await read_relay(guest.connection), RelayPing)
                if not await _tell(guest, RelayPong()):
                    raise RelayError("what is said to this end does not arrive")
                await asyncio.sleep(PING_PAUSE_S)
        finally:
            if self._stays.get(guest.peer_id) is guest:
                del self._stays[guest.peer_id]

    async def _reach(self, guest: Guest, question: ReachRequest) -> bool:
        try:
            wanted = peer_id_of(question.public_key)
        except ValueError as error:
            raise RelayError(str(error)) from error
        self._require_budget(ReachRequest, guest)
        stay = self._stays.get(wanted)
        if stay is None:
            raise RelayError("that peer does not stay here")
        invite = Invite(public_key_of(guest.peer_id), question.token, question.direct)
        if question.direct:
            await _invite(stay, invite)
            await write_relay(guest.connection, Invited())
            return False
        if question.token in self._waiting:
            raise RelayError("that token is in use")
        with self._pairs.room(guest, wanted):
            await self._join_both(guest, wanted, stay, invite)
        return True

    async def _join_both(self, guest: Guest, wanted: str, stay: Guest, invite: Invite) -> None:
        """Has who stays come, and joins its new connection to that of who asked."""
        waiting = self._waiting[invite.token] = _WaitingEnd(wanted, guest.host, invite)
        try:
            await _invite(stay, invite)
            try:
                async with asyncio.timeout(COME_TIMEOUT_S):
                    other = await asyncio.shield(waiting.came)
            except TimeoutError:
                raise RelayError("the peer did not come in time") from None
            await write_relay(other.connection, Joined(guest.host))
            await write_relay(guest.connection, Joined(other.host))
            await self._pairs.join(guest, other)
        except BaseException:
            if waiting.came.done():
                waiting.came.result().connection.close()
            raise
        finally:
            del self._waiting[invite.token]
            waiting.joined.set()

    async def _join(self, guest: Guest, token: bytes) -> bool:
        """The connection goes over to who asked."""
        waiting = self._waiting.get(token)
        if waiting is None or waiting.peer_id != guest.peer_id or waiting.came.done():
            raise RelayError("nobody waits for this")
        waiting.came.set_result(guest)
        await waiting.joined.wait()
        return True

    def _require_budget(self, question: type[ReachRequest] | type[DialBack], guest: Guest) -> None:
        if self._budgets[question].spend(
            guest.peer_id, network_of(guest.host), asyncio.get_running_loop().time()
        ):
            raise RelayError("this is asked more often than may be")

    async def _dial_back(self, guest: Guest, question: DialBack) -> None:
        """Dials the host that the question came from, and nobody else."""
        self._require_budget(DialBack, guest)
        certificate = await certificate_at(host_and_port_of(guest.host, question.port), DIAL_BACK_TIMEOUT_S)
        found = hashlib.sha256(certificate or b"").digest() == question.certificate_hash
        await write_relay(guest.connection, DialledBack(found))


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:200]


async def _tell(guest: Guest, packet: RelayPong | Invite) -> bool:
    """Whether who stays was told. If not, a packet may have been cut off, and the stay ends."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S), guest.writing:
            await write_relay(guest.connection, packet)
    except (OSError, TimeoutError):
        if guest.task is not None and guest.task is not asyncio.current_task():
            guest.task.cancel()
        return False
    return True


async def _invite(stay: Guest, invite: Invite) -> None:
    if not await _tell(stay, invite):
        raise RelayError("that peer does not hear this relay any more")
