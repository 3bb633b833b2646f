"""What the loss of a peer costs: `python tests/bench/failover.py [--losses 12] [--mbps 100 --delay-ms 30]`.

Three spans, each held by two real peers that compute the bundled model; a client generates, and one peer of its circuit
is killed, stopped or asked to leave in the middle: head, middle and tail in turn. Printed is the longest wait for a
token from then on, over the usual one. With `--mbps` each peer and the client are behind an uplink of their own.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.tables import Table
from bench.this_machine import processor
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, free_ports

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SPECULATES, SessionRequest, Speculation
from molink.client.local.local_swarm import LocalPeer
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.devices.model_shapes import even_spans
from molink.simnet.emulate.processes.child_process import LinesProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration
from molink.simnet.emulate.serving import spec_of

SPANS, HOLDERS = 3, 2
PROMPT_TOKENS, NEW_TOKENS, STRUCK_AFTER = 32, 96, 24
TIMEOUT_S = 60.0
BARS_S = {"kill": (0.3, 1.0), "stop": (1.5, 2.5)}
"""Median and 99th percentile over loopback."""
LINE_BARS_S = {"kill": (0.6, 1.5), "stop": (1.5, 2.5)}

Strike = Callable[[LocalPeer], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss as the client saw it."""

    usual_s: float
    """Median time between tokens before it."""
    longest_s: float
    """Longest time between tokens since."""
    circuits: int
    moves: int
    """Circuits that were left without a pause."""
    place: int
    moving_s: float
    """Time between the last token of the circuit that was left without a pause and the next one; 0 without a move."""
    undisturbed_s: float
    """Longest time between as many tokens of a generation that nothing befalls."""

    @property
    def pause_s(self) -> float:
        return max(0.0, self.longest_s - self.usual_s)


class Pairs:
    """Owner of the peers, two for each span, and of a client that is connected to them."""

    def __init__(self, spec: ModelSpec, mbps: float | None, delay_ms: float) -> None:
        self.spec = spec
        self._mbps, self._delay_ms = mbps, delay_ms
        self._stack = AsyncExitStack()
        self._swarm = ForkedSwarm()
        self._ports = free_ports(SPANS * HOLDERS)
        self._proxies: Sequence[str] = ()
        self._connection: SwarmConnection | None = None

    async def __aenter__(self) -> "Pairs":
        await self._stack.__aenter__()
        homes = len(self._ports) + 1
        if self._mbps is not None:
            lines = await self._stack.enter_async_context(
                LinesProcess(LinesConfiguration(homes, self._mbps, self._delay_ms))
            )
            self._proxies = lines.proxies
            await lines.settle([*([f"127.0.0.1:{port}"] for port in self._ports), ()])
        await self._stack.enter_async_context(self._swarm)
        for number in range(len(self._ports)):
            await self._join(number)
        self._connection = await self._stack.enter_async_context(
            SwarmConnection(
                self._swarm.addresses, None, http_proxy=self._proxies[-1] if self._proxies else None
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def lose(self, place: int, strike: Strike, turn: int) -> Loss:
        """Generates, strikes the circuit's peer at `place` in the middle, and has its span held by two again."""
        prompt = self.prompt(turn)
        session = self.session(prompt, NEW_TOKENS)
        came_s, moved_at = await self.struck(session, place, strike)
        gaps_s = [after - before for before, after in pairwise(came_s)]
        undisturbed = self.session(prompt, NEW_TOKENS)
        calm_s = [time.perf_counter() async for _ in undisturbed.tokens(TIMEOUT_S)]
        calm_gaps_s = [after - before for before, after in pairwise(calm_s)]
        return Loss(
            statistics.median(gaps_s[: STRUCK_AFTER - 1]),
            max(gaps_s[STRUCK_AFTER - 1 :]),
            session.log.epochs,
            session.log.moves,
            place,
            gaps_s[moved_at - 1] if moved_at else 0.0,
            max(calm_gaps_s[STRUCK_AFTER - 1 :]),
        )

    def processors_s(self) -> dict[str, float]:
        """Processor time that each peer has taken so far, by its id, and this process as `client`."""
        taken = {peer.peer_id: psutil.Process(peer.process.pid).cpu_times() for peer in self._swarm.peers}
        taken["client"] = psutil.Process().cpu_times()
        return {name: one.user + one.system for name, one in taken.items()}

    def prompt(self, turn: int, tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
        """Another one for each turn: none is in anybody's cache."""
        vocabulary = self.spec.vocabulary_size - 2
        return tuple(2 + (31 * turn + 7 * at) % vocabulary for at in range(tokens))

    def session(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        partners: bool = True,
        speculation: Speculation = SPECULATES,
    ) -> ClientSession:
        """A generation of the client."""
        assert self._connection is not None
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        asked = SessionRequest(prompt, params, partners=partners, speculation=speculation)
        return ClientSession(CircuitBuilder(self._connection, self.spec), asked)

    async def struck(
        self, session: ClientSession, place: int, strike: Strike
    ) -> tuple[Sequence[float], int | None]:
        """Generates, strikes in the middle, and has the span held by two again; when each token came, and the number
        of the first one behind a move."""
        assert self._connection is not None
        came_s: list[float] = []
        struck: asyncio.Future[None] | None = None
        victim: LocalPeer | None = None
        moved_at: int | None = None
        async for _ in session.tokens(TIMEOUT_S):
            if session.log.moves and moved_at is None:
                moved_at = len(came_s)
            came_s.append(time.perf_counter())
            if len(came_s) == STRUCK_AFTER and session.log.route is not None:
                peer_id = session.log.route.hops[place].peer_id
                victim = next(peer for peer in self._swarm.peers if peer.peer_id == peer_id)
                struck = asyncio.ensure_future(strike(victim))
        assert victim is not None
        assert struck is not None
        await struck
        await self._return(victim, self._connection)
        return came_s, moved_at

    async def kill(self, victim: LocalPeer) -> None:
        await self._swarm.kill(victim)

    async def stop(self, victim: LocalPeer) -> None:
        """It stands still, and its connections stay open."""
        psutil.Process(victim.process.pid).suspend()

    async def leave(self, victim: LocalPeer) -> None:
        await self._swarm.stop(victim)

    async def _return(self, victim: LocalPeer, connection: SwarmConnection) -> None:
        """It comes back as who it was, and the client hears of it."""
        if victim in self._swarm.peers:
            await self._swarm.kill(victim)
        before = self._sequence(victim, connection)
        await self._join(int(victim.name.removeprefix("peer-")))
        async with asyncio.timeout(TIMEOUT_S):
            while self._sequence(victim, connection) in (0, before):
                await connection.refresh_soon(0.2)

    def _sequence(self, peer: LocalPeer, connection: SwarmConnection) -> int:
        """Of its newest facts that the client knows; 0: none."""
        views = connection.snapshot(self.spec.model_hash)
        return next((view.facts.sequence for view in views if view.peer_id == peer.peer_id), 0)

    async def _join(self, number: int) -> None:
        span = even_spans(self.spec.layers, SPANS)[number // HOLDERS]
        options = ["--model", BUNDLED, "--layers", f"{span.start}:{span.stop}"]
        options += ["--grpc-port", str(self._ports[number])]
        if self._proxies:
            options += ["--http-proxy", self._proxies[number]]
        await self._swarm.join(f"peer-{number}", *options)


async def measure(table: Table, spec: ModelSpec, options: argparse.Namespace) -> None:
    """A row for each kind of loss."""
    bars_s = BARS_S if options.mbps is None else LINE_BARS_S
    async with Pairs(spec, options.mbps, options.delay_ms) as pairs:
        for kind in options.only:
            strike = {"kill": pairs.kill, "stop": pairs.stop, "leave": pairs.leave}[kind]
            losses = [await pairs.lose(turn % SPANS, strike, turn) for turn in range(options.losses)]
            pauses_s = [loss.pause_s for loss in losses]
            usual_s = statistics.median(loss.usual_s for loss in losses)
            circuits = statistics.fmean(loss.circuits for loss in losses)
            moves = statistics.fmean(loss.moves for loss in losses)
            calm = statistics.median(loss.undisturbed_s / loss.usual_s for loss in losses)
            more = {"usual_s": usual_s, "circuits": circuits, "moves": moves, "undisturbed": calm}
            more["pauses_s"] = pauses_s
            if kind == "leave":
                longest = statistics.median(loss.longest_s / loss.usual_s for loss in losses)
                table.judge("leave: longest gap over the usual, median", longest, "", 2.0, **more)
                for place, name in enumerate(("head", "middle", "tail")):
                    of_place = [loss for loss in losses if loss.place == place]
                    if of_place:
                        table.note(f"leave, {name}: at the move; longest", _gaps(of_place))
                continue
            median_s, worst_s = bars_s[kind]
            table.judge(f"{kind}: pause, median", statistics.median(pauses_s), "s", median_s, **more)
            late_s = sorted(pauses_s)[min(len(pauses_s) - 1, int(0.99 * len(pauses_s)))]
            table.judge(f"{kind}: pause, 99th of 100", late_s, "s", worst_s, **more)


def _gaps(losses: Sequence[Loss]) -> str:
    """Gaps over the usual ones, as medians and one by one."""
    found = (
        [loss.moving_s / loss.usual_s for loss in losses],
        [loss.longest_s / loss.usual_s for loss in losses],
    )
    return "; ".join(
        f"{statistics.median(one):.2f} ({' '.join(f'{ratio:.2f}' for ratio in one)})" for one in found
    )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--losses", type=int, default=12, help="of each kind (12)")
    parser.add_argument(
        "--only", nargs="+", default=["kill", "stop", "leave"], choices=["kill", "stop", "leave"]
    )
    parser.add_argument("--mbps", type=float, help="of each home's uplink (none: loopback)")
    parser.add_argument(
        "--delay-ms", type=float, default=30.0, help="from home to home, one way, with --mbps (30)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/failover.py {' '.join(sys.argv[1:])}", flush=True)
    table = Table()
    asyncio.run(measure(table, spec_of("real", None, "", 1), options))
    if options.json:
        print(json.dumps(table.rows))


if __name__ == "__main__":
    main()
