"""Faults on a swarm of real peers while it generates: each span has two holders, and one of them at most is struck at a
time. What is struck, and when, depends on a seed alone; the victim is a peer that sessions are using."""

import asyncio
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from support.links.cutting_proxy import CuttingProxy
from support.swarms.forked_peers import ForkedSwarm, fork_peer
from support.swarms.live_swarms import BUNDLED, free_ports

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest
from molink.client.local.local_swarm import LocalPeer
from molink.shards.spec import ModelSpec

HOLDERS = 2
STANDS_S = 3.0
"""A peer stands still, or nothing comes through its line, for so long."""
FULL_S = 5.0
PAUSE_S = (1.0, 3.0)
"""From one fault to the next."""
TIMEOUT_S = 60.0
ENDING = frozenset({"kill", "restart", "stop", "partition", "stall"})
"""Faults for which a session has to do without their victim. Those of a cut link or a full disk it is to outlive on it:
the link is dialled again, and nothing that is served needs the disk."""
KINDS = ENDING | {"cut", "full disk"}


class StallableSwarm(ForkedSwarm):
    """A swarm of peers whose engines can be made to stand still."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        program = Path(__file__).with_name("stallable_peer.py")
        return await fork_peer(arguments, self.environment, log, program)  # type: ignore[return-value]


@dataclass(slots=True)
class Served:
    """What became of the requests."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    generations: int = 0
    circuits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """By kind; the victim of each was in use."""
    noticed: Counter[str] = field(default_factory=Counter)
    """By kind: sessions that were using the victim then and went on without it."""
    recoveries_s: list[float] = field(default_factory=list)
    """From each loss to the next token."""


class Chaos:
    """Owner of the peers, of a line in front of each, and of a client behind another line."""

    def __init__(self, spec: ModelSpec, spans: Sequence[tuple[int, int]], seed: int) -> None:
        self.served = Served()
        self._spec, self._spans = spec, spans
        self._draw = random.Random(seed)
        self._stack = AsyncExitStack()
        self._swarm = StallableSwarm()
        self._ports = free_ports(HOLDERS * len(spans))
        self._proxies = [CuttingProxy() for _ in (*self._ports, "client")]
        self._connection: SwarmConnection | None = None
        self._running: dict[ClientSession, list[tuple[str, str]]] = {}
        """With the faults that have befallen hops of theirs: which, and whose."""
        self._ailing: set[int] = set()
        """Peers that have been struck and are not what they were."""

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        for proxy in self._proxies:
            await self._stack.enter_async_context(proxy)
        await self._stack.enter_async_context(self._swarm)
        for number in range(len(self._ports)):
            await self._join(number)
        self._connection = await self._stack.enter_async_context(
            SwarmConnection(self._swarm.addresses, None, http_proxy=self._proxies[-1].url)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def generate(self, request: SessionRequest) -> tuple[int, ...]:
        """The tokens of one generation."""
        assert self._connection is not None
        session = ClientSession(CircuitBuilder(self._connection, self._spec), request)
        befallen: list[tuple[str, str]] = []
        self._running[session] = befallen
        try:
            tokens = [token async for token in session.tokens(TIMEOUT_S)]
        finally:
            del self._running[session]
        assert [token.position for token in tokens] == list(
            range(len(request.prompt), len(request.prompt) + len(tokens))
        )
        self.served.generations += 1
        self.served.circuits += session.log.epochs
        self.served.recoveries_s += [one.seconds for one in session.log.recoveries]
        assert session.log.route is not None
        left = {loss.peer_id for loss in session.log.losses}
        for kind, peer_id in befallen:
            self.served.noticed[kind] += peer_id in left or peer_id not in session.log.route.peer_ids
        return tuple(token.token_id for token in tokens)

    async def serve_and_strike(
        self, requests: Sequence[SessionRequest], together: int, for_s: float
    ) -> Served:
        """Serves each request undisturbed, then all of them again and again, so many together, among faults."""
        for number, request in enumerate(requests):
            self.served.tokens[number] = await self.generate(request)
        self.served = Served(self.served.tokens)
        clock = asyncio.get_running_loop().time
        until_s, turns = clock() + for_s, iter(range(10**9))

        async def serve() -> None:
            while clock() < until_s:
                number = next(turns) % len(requests)
                began_s = clock()
                found, wanted = await self.generate(requests[number]), self.served.tokens[number]
                if found != wanted:
                    at = next(
                        at for at, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]
                    )
                    told = f"request {number}, {until_s - began_s:.0f} s before the end, differs from token {at} on"
                    self.served.wrong.append(f"{told}: {found[at : at + 4]}, not {wanted[at : at + 4]}")

        async with asyncio.TaskGroup() as group:
            for _ in range(together):
                group.create_task(serve())
            healing = set()
            while clock() < until_s:
                await asyncio.sleep(self._draw.uniform(*PAUSE_S))
                if (struck := self._strike()) is not None:
                    healing.add(group.create_task(struck))
        return self.served

    def _strike(self) -> Awaitable[None] | None:
        """The next fault, if a peer is in use whose span has another holder."""
        routes = {one: one.log.route for one in self._running if one.log.route is not None}
        used = {hop.peer_id for route in routes.values() for hop in route.hops}
        peers = {int(peer.name.removeprefix("peer-")): peer for peer in self._swarm.peers}
        able = [
            number
            for number, peer in sorted(peers.items())
            if peer.peer_id in used and not {number, number ^ 1} & self._ailing and (number ^ 1) in peers
        ]
        kinds: dict[str, Callable[[int, LocalPeer], Awaitable[None]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "cut": self._cut,
            "partition": self._part,
            "stall": self._stall,
            "full disk": self._fill,
            "restart": self._restart,
        }
        assert kinds.keys() == KINDS
        kind = self._draw.choice(sorted(kinds))
        if not able:
            return None
        number = self._draw.choice(able)
        self._ailing.add(number)
        self.served.faults[kind] += 1
        for session, route in routes.items():
            if peers[number].peer_id in route.peer_ids:
                self._running[session].append((kind, peers[number].peer_id))
        return self._suffer(number, kinds[kind](number, peers[number]))

    async def _suffer(self, number: int, fault: Awaitable[None]) -> None:
        await fault
        await asyncio.sleep(1.0)  # others hear of it
        self._ailing.discard(number)

    async def _kill(self, number: int, peer: LocalPeer) -> None:
        await self._swarm.kill(peer)
        await self._join(number)

    async def _restart(self, number: int, peer: LocalPeer) -> None:
        await self._swarm.stop(peer)
        await self._join(number)

    async def _stop(self, _: int, peer: LocalPeer) -> None:
        process = psutil.Process(peer.process.pid)
        process.suspend()
        try:
            await asyncio.sleep(STANDS_S)
        finally:
            process.resume()

    async def _cut(self, number: int, _: LocalPeer) -> None:
        self._proxies[number].cut()
        for proxy in self._proxies:
            proxy.cut(f"127.0.0.1:{self._ports[number]}")

    async def _part(self, number: int, _: LocalPeer) -> None:
        """Nothing comes through its line any more, in neither direction, and nobody is told."""
        own, target = self._proxies[number], f"127.0.0.1:{self._ports[number]}"
        own.mute()
        own.refuses = True
        for proxy in self._proxies:
            proxy.mute(target)
            proxy.refused.add(target)
        try:
            await asyncio.sleep(STANDS_S)
        finally:
            own.refuses = False
            for proxy in self._proxies:
                proxy.refused.discard(target)

    async def _stall(self, _: int, peer: LocalPeer) -> None:
        assert peer.process.pid is not None
        os.kill(peer.process.pid, signal.SIGUSR1)
        try:
            await asyncio.sleep(2 * STANDS_S)
        finally:
            peer.process.send_signal(signal.SIGUSR2)

    async def _fill(self, _: int, peer: LocalPeer) -> None:
        """No file of the peer's grows any more, as on a disk that is full."""
        assert peer.process.pid is not None
        before = resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            await asyncio.sleep(FULL_S)
        finally:
            if psutil.pid_exists(peer.process.pid):
                resource.prlimit(peer.process.pid, resource.RLIMIT_FSIZE, before)

    async def _join(self, number: int) -> None:
        start, stop = self._spans[number // HOLDERS]
        await self._swarm.join(
            f"peer-{number}", "--model", BUNDLED, "--layers", f"{start}:{stop}",
            "--grpc-port", str(self._ports[number]), "--http-proxy", self._proxies[number].url,
        )  # fmt: skip
