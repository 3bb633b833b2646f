"""Port mapping (UPnP IGD): has the router pass a peer's ports on for an hour at a time, while the peer serves.

What the router says is a claim. Relays dial the mapped port back before others are told of it (`reach.py`), as they
would one that its owner has forwarded. A router that does not answer, or refuses, costs a sentence and never the start.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from molink.peer.device.machine import LASTING_PORTS
from molink.shards.address_ranges import AddressRange, range_of

LEASE_S = 3600
"""What a peer that ends without a word leaves open."""
RENEW_EVERY_S = LEASE_S / 2
AGAIN_S = 300.0
"""After a renewal that failed."""
ANSWER_WITHIN_S = 15.0
"""The router, with all that it is asked at once."""
UNMAP_WITHIN_S = 2.0
"""When the peer leaves."""
MOST_TRIED = 3
"""Outer ports for one of the peer's: another household member's may have the first."""
_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Wait = Callable[[float], Awaitable[None]]


class GatewayError(Exception):
    """The router does not do what it was asked."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(found)
        self.found = found
        """What was tried and what came of it, as a clause."""
        self.remedy = remedy


class PortMapper(Protocol):
    """A router. Its methods block, and raise GatewayError."""

    def outer_host(self) -> str:
        """Its address on the other side, as it says."""
        ...

    def map_port(self, outer_port: int, inner_port: int, lease_s: int) -> None:
        """Passes TCP connections to `outer_port` on to this machine, for so long from now."""
        ...

    def unmap_port(self, outer_port: int) -> None: ...


@dataclass(frozen=True, slots=True)
class InnerPorts:
    """Ports of a peer on its own machine."""

    control: int
    data: int
    relay: int | None = None
    """None: it has no relay."""

    def all(self) -> tuple[int, ...]:
        """Those that there are, in the order of the fields."""
        return tuple(port for port in (self.control, self.data, self.relay) if port is not None)


@dataclass(frozen=True, slots=True)
class MappedPorts:
    """Where a router says that a peer can be dialled."""

    host: str
    control: int
    data: int
    relay: int | None = None
    """None: that of its relay is not mapped, so that it relays for nobody."""


def public_host(gateway: PortMapper) -> str:
    """The router's outer address. Raises GatewayError: nobody on the Internet can dial it."""
    host = gateway.outer_host()
    if range_of(host) is not AddressRange.PUBLIC or ":" in host:
        raise GatewayError(
            f"the router's outer address is {host if range_of(host) else 'none'}, which the Internet cannot dial: "
            "another router, or the provider's, translates before it",
            "ask the provider for a public address, or have the router before it forward the ports too",
        )
    return host


def map_ports(gateway: PortMapper, inner: InnerPorts, draw: random.Random) -> MappedPorts:
    """Maps each port to the same outside, or to another if that is taken. A relay's port is one that a peer can do
    without.

    Raises:
        GatewayError: nothing is mapped then.
    """
    host = public_host(gateway)
    mapped: list[int] = []
    try:
        for port in (inner.control, inner.data):
            mapped.append(_map(gateway, port, frozenset((*inner.all(), *mapped)), draw))
    except GatewayError:
        for port in mapped:
            with suppress(GatewayError):
                gateway.unmap_port(port)
        raise
    relay = None
    if inner.relay is not None:
        with suppress(GatewayError):
            relay = _map(gateway, inner.relay, frozenset((*inner.all(), *mapped)), draw)
    return MappedPorts(host, mapped[0], mapped[1], relay)


def _map(gateway: PortMapper, inner_port: int, taken: frozenset[int], draw: random.Random) -> int:
    drawn = draw.sample([port for port in LASTING_PORTS if port not in taken], MOST_TRIED - 1)
    for outer_port in (inner_port, *drawn[:-1]):
        with suppress(GatewayError):
            gateway.map_port(outer_port, inner_port, LEASE_S)
            return outer_port
    gateway.map_port(drawn[-1], inner_port, LEASE_S)
    return drawn[-1]


def refused_sentence(error: GatewayError, took_s: float) -> str:
    """For the owner, at the start."""
    return (
        f"--port-mapping on: {error.found} (asked for {took_s:.1f} s), so the peer does without, and where nobody can "
        f"dial it, others reach it over relays. To change that, {error.remedy}, and start it again"
    )


def lost_sentence(error: GatewayError) -> str:
    """For the owner, when the router has stopped doing it."""
    return (
        f"--port-mapping on: {error.found}, so the ports may close within {LEASE_S // 120} minutes: it is asked again "
        f"every {AGAIN_S / 60:.0f}, and others reach this peer over relays once nobody can dial it. To change that, "
        f"{error.remedy}"
    )


async def in_thread(work: Callable[[], Answer], within_s: float) -> Answer:
    """What blocking `work` returns, in a thread that no end of the process waits for. Raises what `work` does, and
    GatewayError if it takes longer."""
    answer: Future[Answer] = Future()
    answer.set_running_or_notify_cancel()  # so that whoever gives up waiting does not cancel it under the thread

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - a thread's boundary: it is raised where the answer is awaited
            answer.set_exception(error)

    try:
        threading.Thread(target=run, name="port mapping", daemon=True).start()
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(answer)
    except TimeoutError as error:
        raise GatewayError(
            f"the router did not answer UPnP within {within_s:g} s",
            "start the router again, or forward the ports by hand (--announce HOST:CONTROL:DATA)",
        ) from error
    except RuntimeError as error:
        raise GatewayError(f"the router was not asked ({error})", "close other programs") from error


class PortMapping:
    """Has a router map one peer's ports: `open` it once, `keep` it while the peer serves, `close` it in any case."""

    def __init__(
        self,
        find: Callable[[], PortMapper],
        inner: InnerPorts,
        say: Callable[[str], None],
        wait: Wait = asyncio.sleep,
    ) -> None:
        """`find` blocks, and raises GatewayError."""
        self._find = find
        self._inner = inner
        self._say = say
        self._wait = wait
        self._turn = threading.Lock()
        """What is asked late is asked before what comes after it: nothing is mapped once it was closed."""
        self._held: tuple[PortMapper, MappedPorts] | None = None

    async def open(self) -> MappedPorts | None:
        """None: the router does not map them, and the owner knows why."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            return await in_thread(self._map, ANSWER_WITHIN_S)
        except GatewayError as error:
            self._say(refused_sentence(error, clock() - began_s))
            return None

    async def keep(self) -> None:
        """Renews the lease at half of it, until cancelled. The router is looked for anew each time: it may be another
        one by then."""
        failed = False
        while True:
            await self._wait(AGAIN_S if failed else RENEW_EVERY_S)
            try:
                await in_thread(self._renew, ANSWER_WITHIN_S)
                failed = False
            except GatewayError as error:
                if not failed:
                    self._say(lost_sentence(error))
                failed = True

    async def close(self) -> None:
        """Ends what is mapped, a late answer's too; what the router keeps nevertheless ends with its lease."""
        try:
            await in_thread(self._unmap, UNMAP_WITHIN_S)
        except GatewayError as error:
            _log.info("mapped ports close within the hour: %s", error)

    def _map(self) -> MappedPorts:
        with self._turn:
            gateway = self._find()
            mapped = map_ports(gateway, self._inner, random.Random())
            self._held = gateway, mapped
            return mapped

    def _renew(self) -> None:
        with self._turn:
            if self._held is None:
                return
            mapped, gateway = self._held[1], self._find()
            public_host(gateway)
            gateway.map_port(mapped.control, self._inner.control, LEASE_S)
            gateway.map_port(mapped.data, self._inner.data, LEASE_S)
            if mapped.relay is not None and self._inner.relay is not None:
                gateway.map_port(mapped.relay, self._inner.relay, LEASE_S)
            self._held = gateway, mapped

    def _unmap(self) -> None:
        with self._turn:
            if self._held is not None:
                gateway, mapped = self._held
                self._held = None
                for port in (mapped.control, mapped.data, mapped.relay):
                    if port is None:
                        continue
                    try:
                        gateway.unmap_port(port)
                    except GatewayError as error:
                        _log.info("port %d closes within the hour: %s", port, error)
