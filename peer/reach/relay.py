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
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Self

from molink.dht.errors import PortInUse
from molink.dht.identity.identity import Identity, peer_id_of, public_key_of
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.door import ConnectionLimiter, network_of
from molink.dht.refusals import RefusalLog
from molink.peer.reach.relay_limits import DIAL_BACKS, REACHES, RelayLimits, pair_pace
from molink.peer.serving.budgets import Budget
from molink.peer.wire.reach.packets import (
    TOKEN_BYTES,
    DialBack,
    DialledBack,
    Invite,
    Invited,
    Join,
    Joined,
    Reach,
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
from molink.peer.wire.reach.relay_client import PING_EVERY_S, expect_relay, host_and_port_of
from molink.peer.wire.reach.relay_proof import check_user, new_challenge, prove_relay
from molink.peer.wire.reach.splice import Splice, Splices

PROOF_TIMEOUT_S = 5.0
QUESTION_TIMEOUT_S = 20.0
"""From the welcome to the question: a socket that is kept for its outer port asks nothing meanwhile."""
COME_TIMEOUT_S = 2.5
"""An invited peer has so long to come."""
DIAL_BACK_TIMEOUT_S = 2.0
STAY_SILENT_S = 3 * PING_EVERY_S
"""Who stays and says nothing for so long is gone."""
WRITE_TIMEOUT_S = 2.0
PAIR_IDLE_S = 60.0
"""A pair over which nothing goes for so long is ended: links give signs of life each 4 s."""
ACCEPT_RETRY_S = 0.1
_log = logging.getLogger(__name__)


class _Guest:
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


class _Waiting:
    """Somebody waits for an invited peer."""

    def __init__(self, peer_id: str, host: str) -> None:
        self.peer_id = peer_id
        """Who is to come."""
        self.host = host
        """Of who asked, where this relay sees it; empty: this relay's own process asks."""
        self.came: asyncio.Future[_Guest] = asyncio.get_running_loop().create_future()
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
        self.port = port
        self.limits = limits or RelayLimits()
        """Of guests, and the rate of all pairs; its rate may be changed at any time."""
        self._host = host
        self._identity = identity
        self._swarm_key = swarm_key
        self._splices = Splices()
        self._limiter = ConnectionLimiter(self.limits.connections(), is_member)
        self._reaches, self._dial_backs = Budget(REACHES), Budget(DIAL_BACKS)
        self._guests: dict[int, _Guest] = {}
        self._stays: dict[str, _Guest] = {}
        """By peer id: who is told when somebody asks for it."""
        self._waiting: dict[bytes, _Waiting] = {}
        """By token: who is to come."""
        self._pairs: dict[Splice, tuple[_Guest, _Guest]] = {}
        """And whose they are, who asked first."""
        self._refusals = RefusalLog(_log)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self.port), family=family, backlog=128)
        except OSError as error:
            raise PortInUse(
                f"the relay cannot listen on {self._host} port {self.port}: the port is in use or the address is not "
                "this machine's. Choose another with --relay-port, or 0 for any free one."
            ) from error
        listener.setblocking(False)
        self._listener, self.port = listener, listener.getsockname()[1]
        await self._splices.__aenter__()
        self._spawn(self._accept(listener))
        self._spawn(self._end_idle_pairs())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self._splices.__aexit__(kind, error, trace)

    @property
    def stays(self) -> frozenset[str]:
        """Peer ids of those that can be reached through here now."""
        return frozenset(self._stays)

    @property
    def pairs(self) -> int:
        """How many pairs of connections are joined now."""
        return len(self._pairs)

    async def expect(self, peer_id: str, token: bytes, timeout_s: float) -> tuple[socket.socket, str]:
        """Waits for a peer that was invited to come here itself: its socket, and the host that it came from.

        Raises:
            RelayError: it does not come in time.
        """
        waiting = _Waiting(peer_id, "")
        self._waiting[token] = waiting
        try:
            async with asyncio.timeout(timeout_s):
                guest = await asyncio.shield(waiting.came)
                await write_relay(guest.connection, Joined(""))
        except (TimeoutError, OSError) as error:
            if waiting.came.done():
                waiting.came.result().connection.close()
            raise RelayError(f"{peer_id} did not come: {error}") from error
        finally:
            del self._waiting[token]
            waiting.joined.set()
        return guest.connection, guest.host

    # -- connections

    def _spawn(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work, name="relay")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError:  # no descriptors are left, or who came has gone
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            connection.setblocking(False)
            entry = self._limiter.admit(loop.time(), network_of(str(address[0])))
            self._send_away(entry.sent_away)
            assert entry.guest is not None  # noqa: S101 - nobody is refused before he has proven who he is
            observed = host_and_port_of(str(address[0]), int(address[1]))
            guest = self._guests[entry.guest] = _Guest(connection, observed.rpartition(":")[0].strip("[]"))
            guest.task = self._spawn(self._serve(entry.guest, guest, observed))

    def _send_away(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            guest = self._guests.pop(number, None)
            if guest is not None and guest.task is not None:
                self._refusals.refused("relay connections beyond what may be", guest.host)
                guest.task.cancel()

    async def _serve(self, number: int, guest: _Guest, observed: str) -> None:
        """One conversation. Whatever goes wrong in it ends it alone."""
        try:
            kept = await self._converse(number, guest, observed)
            if not kept:
                guest.connection.close()
        except RelayHungUp:
            guest.connection.close()
        except RelayError as error:
            self._refusals.refused("relay conversations", guest.host)
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await write_relay(guest.connection, RelayRefusal(_printable(str(error))))
            guest.connection.close()
        except (OSError, TimeoutError):
            guest.connection.close()
        except asyncio.CancelledError:
            guest.connection.close()
            raise
        finally:
            self._limiter.remove_guest(number)
            self._guests.pop(number, None)

    async def _converse(self, number: int, guest: _Guest, observed: str) -> bool:
        """Proof, one question, its answer. True: the connection is somebody else's now."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PROOF_TIMEOUT_S):
            challenge = new_challenge()
            await write_relay(guest.connection, challenge)
            proof = expect_relay(await read_relay(guest.connection), RelayProof)
            guest.peer_id = check_user(proof, challenge, self._identity.peer_id, self._swarm_key)
            entry = self._limiter.prove(number, loop.time(), guest.peer_id)
            self._send_away(entry.sent_away)
            if entry.guest is None:
                raise RelayError("this relay has as many connections as it takes")
            welcome = prove_relay(challenge, proof, observed, self._identity, self._swarm_key)
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
        if isinstance(question, Join):
            return await self._join(guest, question.token)
        if isinstance(question, Reach):
            self._limiter.mark_busy(number)
            return await self._reach(guest, question)
        raise RelayError(f"a {type(question).__name__} is out of place here")

    # -- questions

    async def _stay(self, guest: _Guest) -> None:
        """Until it hangs up or falls silent, or comes again."""
        if guest.peer_id not in self._stays and len(self._stays) >= self.limits.stays:
            raise RelayError("this relay has as many stays as it takes")
        former = self._stays.get(guest.peer_id)
        self._stays[guest.peer_id] = guest
        if former is not None and former.task is not None:
            former.task.cancel()
        try:
            while True:
                async with asyncio.timeout(STAY_SILENT_S):
                    expect_relay(await read_relay(guest.connection), RelayPing)
                await self._tell(guest, RelayPong())
        finally:
            if self._stays.get(guest.peer_id) is guest:
                del self._stays[guest.peer_id]

    async def _tell(self, guest: _Guest, packet: RelayPong | Invite) -> None:
        async with guest.writing, asyncio.timeout(WRITE_TIMEOUT_S):
            await write_relay(guest.connection, packet)

    async def _reach(self, guest: _Guest, question: Reach) -> bool:
        try:
            wanted = peer_id_of(question.public_key)
        except ValueError as error:
            raise RelayError(str(error)) from error
        self._require_budget(self._reaches, guest)
        stay = self._stays.get(wanted)
        if stay is None:
            raise RelayError("that peer does not stay here")
        invite = Invite(public_key_of(guest.peer_id), question.token, question.direct)
        if question.direct:
            await self._tell(stay, invite)
            await write_relay(guest.connection, Invited())
            return False
        if question.token in self._waiting or len(question.token) != TOKEN_BYTES:
            raise RelayError("that token is in use")
        self._require_pair(guest, wanted)
        waiting = _Waiting(wanted, guest.host)
        self._waiting[question.token] = waiting
        other: _Guest | None = None
        try:
            await self._tell(stay, invite)
            try:
                async with asyncio.timeout(COME_TIMEOUT_S):
                    other = await asyncio.shield(waiting.came)
            except TimeoutError:
                raise RelayError("the peer did not come in time") from None
            await write_relay(other.connection, Joined(guest.host))
            await write_relay(guest.connection, Joined(other.host))
            await self._splice(guest, other)
        except BaseException:
            if waiting.came.done() and not waiting.came.cancelled():
                waiting.came.result().connection.close()
            raise
        finally:
            del self._waiting[question.token]
            waiting.joined.set()
        return True

    async def _join(self, guest: _Guest, token: bytes) -> bool:
        """The connection goes over to who asked."""
        waiting = self._waiting.get(token)
        if waiting is None or waiting.peer_id != guest.peer_id or waiting.came.done():
            raise RelayError("nobody waits for this")
        waiting.came.set_result(guest)
        await waiting.joined.wait()
        return True

    async def _splice(self, guest: _Guest, other: _Guest) -> None:
        pace = pair_pace(self._pair_bytes_per_s, asyncio.get_running_loop().time)
        splice = await self._splices.splice(guest.connection, other.connection, pace)
        self._pairs[splice] = guest, other
        splice.gone.add_done_callback(lambda _: self._pairs.pop(splice, None))

    def _pair_bytes_per_s(self) -> float:
        """What each pair may pass on, in both directions together."""
        return self.limits.mbps * 1e6 / 8 / max(1, len(self._pairs))

    def _require_pair(self, asker: _Guest, wanted: str) -> None:
        """Raises RelayError where there are as many pairs as may be."""
        network, pairs = network_of(asker.host), self._pairs.values()
        for peer_id in (asker.peer_id, wanted):
            if (
                sum(peer_id in (one.peer_id, two.peer_id) for one, two in pairs)
                >= self.limits.pairs_of_identity
            ):
                raise RelayError("one of the two has as many pairs here as it may")
        if sum(network_of(one.host) == network for one, _ in pairs) >= self.limits.pairs_of_network:
            raise RelayError("that network has as many pairs here as it may")
        if len(pairs) >= self.limits.pairs:
            raise RelayError("this relay joins as many pairs as it takes")

    def _require_budget(self, budget: Budget, guest: _Guest) -> None:
        if budget.spend(guest.peer_id, network_of(guest.host), asyncio.get_running_loop().time()):
            raise RelayError("this is asked more often than may be")

    async def _dial_back(self, guest: _Guest, question: DialBack) -> None:
        """Dials the host that the question came from, and nobody else."""
        self._require_budget(self._dial_backs, guest)
        found = False
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(DIAL_BACK_TIMEOUT_S):
                found = await _certificate_hash_at(guest.host, question.port) == question.certificate_hash
        await write_relay(guest.connection, DialledBack(found))

    async def _end_idle_pairs(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(PAIR_IDLE_S / 4)
            for splice in tuple(self._pairs):
                if clock() - splice.moved_s > PAIR_IDLE_S:
                    splice.close()


async def _certificate_hash_at(host: str, port: int) -> bytes:
    """SHA-256 of the certificate of who answers there; nothing else of it is believed. Raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        session: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return hashlib.sha256(session.getpeercert(binary_form=True) or b"").digest()
    finally:
        writer.transport.abort()


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:200]
