"""Hole punching with TCP: both ends dial each other's outer address at once, from fresh ports that relays have seen.

A NAT lets in what looks like an answer. If it shows one port to every destination (RFC 4787, endpoint-independent
mapping), the other end knows where to dial; if both give each destination another port, neither does. A NAT that
answers strangers with a reset wants both to begin within some 15 ms of each other, and a fresh port for each attempt.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from molink.dht.records.records import RelayAt
from molink.peer.wire.reach.packets import RelayError
from molink.peer.wire.reach.relay_client import (
    RelaySession,
    RelayUser,
    accept,
    endpoint,
    open_session,
    shared_port_socket,
)

PUNCH_TIMEOUT_S = 3.0
TRY_TIMEOUT_S = 0.7
"""One connection attempt: the kernel repeats its SYN after a second, this sooner."""
TRY_AGAIN_S = 0.03
OBSERVERS = 2


@dataclass(frozen=True, slots=True)
class PunchAttempt:
    """When an attempt begins, and by how much its start is shifted against what the round trip says."""

    after_s: float
    shift_s: float


ATTEMPTS = (PunchAttempt(0.0, 0.0), PunchAttempt(2.0, 0.02), PunchAttempt(10.0, -0.02))
"""Counted from when the link was relayed."""
AGAIN_S = 600.0
"""After those, from one attempt to the next."""


def attempt_after(number: int) -> PunchAttempt:
    """The attempt of that number, from 0."""
    if number < len(ATTEMPTS):
        return ATTEMPTS[number]
    return PunchAttempt(ATTEMPTS[-1].after_s + (number - len(ATTEMPTS) + 1) * AGAIN_S, 0.0)


class ObservedPort:
    """A fresh local port and where relays see it. The conversations stay open, so that the NAT keeps the port."""

    def __init__(self, port: int, sessions: Sequence[RelaySession]) -> None:
        self.port = port
        self.address = sessions[0].observed
        """host:port, as the first relay sees it."""
        self.hard = len({session.observed for session in sessions}) > 1
        """Each destination sees another port."""
        self.family = sessions[0].connection.family
        self._sessions = sessions

    def close(self) -> None:
        for session in self._sessions:
            session.close()


async def observe_port(relays: Sequence[RelayAt], user: RelayUser) -> ObservedPort:
    """Has up to OBSERVERS relays look at one fresh port.

    Raises:
        RelayError: none of them answers.
    """
    ipv6 = [relay for relay in relays if ":" in endpoint(relay.address)[0]]
    asked = ([relay for relay in relays if relay not in ipv6] or ipv6)[:OBSERVERS]
    if not asked:
        raise RelayError("no relay is known that could look")
    port = _fresh_port(socket.AF_INET6 if asked == ipv6[:OBSERVERS] else socket.AF_INET)
    opening = [
        asyncio.create_task(open_session(relay, user, local_port=port), name="look") for relay in asked
    ]
    try:
        await asyncio.gather(*opening, return_exceptions=True)
    except asyncio.CancelledError:
        for session in _opened(opening):
            session.close()
        raise
    sessions = _opened(opening)
    if not sessions:
        raise RelayError("no relay answers")
    return ObservedPort(port, sessions)


def _opened(ended: Sequence[asyncio.Task[RelaySession]]) -> list[RelaySession]:
    return [one.result() for one in ended if not one.cancelled() and one.exception() is None]


async def punch(port: int, target: str, timeout_s: float = PUNCH_TIMEOUT_S) -> socket.socket:
    """A connection between a local port and `target`, dialled or accepted there, whichever comes first.

    Raises:
        RelayError: there is none in time.
        OSError: the port cannot be used.
    """
    address = endpoint(target)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = shared_port_socket(family, port)
    tasks: set[asyncio.Task[socket.socket]] = set()
    try:
        listener.listen(4)
        async with asyncio.timeout(timeout_s):
            tasks = {
                asyncio.create_task(_dial(family, port, address), name="punch: dial"),
                asyncio.create_task(_accept(listener, address[0]), name="punch: accept"),
            }
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            won = done.pop()
            tasks.discard(won)
            return won.result()
    except TimeoutError:
        raise RelayError(f"no connection to {target} within {timeout_s:g} s") from None
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, socket.socket):
                ended.close()


async def _dial(family: socket.AddressFamily, port: int, address: tuple[str, int]) -> socket.socket:
    """Until it succeeds."""
    loop = asyncio.get_running_loop()
    while True:
        connection = shared_port_socket(family, port)
        try:
            async with asyncio.timeout(TRY_TIMEOUT_S):
                await loop.sock_connect(connection, address)
        except (OSError, TimeoutError):
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            return connection
        await asyncio.sleep(TRY_AGAIN_S)


async def _accept(listener: socket.socket, host: str) -> socket.socket:
    """The next connection that comes from that host, whatever its port: a NAT that is hard chooses another."""
    while True:
        connection, origin, _ = await accept(listener)
        if origin == host:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection.close()


def _fresh_port(family: socket.AddressFamily) -> int:
    """A port that no socket of this machine uses."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104
        return int(probe.getsockname()[1])
