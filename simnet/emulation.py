"""One run of an emulation: peers, their lines, a client, and what was measured."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from molink.client.connection import Connection
from molink.shards.spec import ModelSpec, Span
from molink.simnet.emulated_peer import PeerConfiguration, PeerCounters
from molink.simnet.known_peers import KnownPeers
from molink.simnet.peer_process import PeerProcess
from molink.simnet.request_driver import Outcome, RequestDriver
from molink.simnet.request_load import arrivals
from molink.simnet.room import Room
from molink.simnet.traces import TraceRequest

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """What differs between the runs of a command."""

    policy: str
    rate_rps: float


@dataclass(frozen=True, slots=True)
class Emulation:
    """What all runs of a command have in common."""

    spec: ModelSpec
    device: str | None
    """The profile of every peer; None: peers compute, on this machine's processor."""
    peers: int
    bandwidth_mbps: float
    delay_ms: float
    """From any peer to any other, one way."""
    trace: tuple[TraceRequest, ...]
    warm_up_s: float
    duration_s: float
    seed: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """As even as can be, the longer ones first."""
        return even_spans(self.spec.layers, self.peers)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the machines and this one did while requests were measured, as parts of that time."""

    engines: tuple[float, ...]
    """Of each peer in the order of the circuit: how long its engine computed."""
    processes: tuple[float, ...]
    """Of each peer: processor time, of one core."""
    driver: float
    """Of the process that is client and lines: processor time, of one core."""
    tokens_per_s: float
    """That all requests together got."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    cell: Cell
    outcomes: tuple[Outcome, ...]
    usage: Usage


def even_spans(layers: int, peers: int) -> tuple[Span, ...]:
    """The model's layers in as many spans as there are peers.

    Raises:
        ValueError: there are more peers than layers, or none.
    """
    if not 1 <= peers <= layers:
        raise ValueError(f"{layers} layers can be split among 1 to {layers} peers, not {peers}")
    base, longer = divmod(layers, peers)
    starts = [peer * base + min(peer, longer) for peer in range(peers + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))


async def emulate(emulation: Emulation, cell: Cell, report: Report) -> Run:
    """Starts everything, serves the requests, and ends everything.

    Raises:
        EmulationError: a peer does not start, or dies.
    """
    async with AsyncExitStack() as stack:
        report("starting peers")
        peers = await _start_peers(emulation, cell, stack)
        views = tuple(peer.view for peer in peers)
        connection = await stack.enter_async_context(Connection((), None, view=KnownPeers(views)))
        room = Room(
            min(
                view.state.free_kv_bytes // emulation.spec.kv_bytes(span, 1)
                for view, span in zip(views, emulation.spans, strict=True)
            ),
            min(peer.most_sessions for peer in peers),
        )
        driver = RequestDriver(connection, emulation.spec, room, emulation.peers, emulation.seed)
        return await _measure(emulation, cell, peers, driver, report)


async def _start_peers(emulation: Emulation, cell: Cell, stack: AsyncExitStack) -> list[PeerProcess]:
    peers = [
        PeerProcess(
            PeerConfiguration(
                name=f"{number}",
                model=emulation.spec.name,
                device=emulation.device,
                start=span.start,
                stop=span.stop,
                http_proxy=None,
                policy=cell.policy,
            )
        )
        for number, span in enumerate(emulation.spans, start=1)
    ]
    for started in await asyncio.gather(*map(stack.enter_async_context, peers), return_exceptions=True):
        if isinstance(started, BaseException):
            raise started
    return peers


async def _measure(
    emulation: Emulation, cell: Cell, peers: Sequence[PeerProcess], driver: RequestDriver, report: Report
) -> Run:
    window_s = (emulation.warm_up_s, emulation.warm_up_s + emulation.duration_s)
    clock = asyncio.get_running_loop().time
    start_s = clock()

    def tell() -> None:
        passed_s = clock() - start_s
        report(f"{passed_s:.0f} of {window_s[1]:.0f} s, {driver.running} requests in progress")

    using = asyncio.create_task(_usage(peers, driver, start_s, window_s, tell), name="usage")
    try:
        first = int(np.random.default_rng(emulation.seed).integers(len(emulation.trace)))
        requests = arrivals(emulation.trace, cell.rate_rps, window_s[1], first)
        outcomes = await driver.drive(requests, start_s, window_s, tell)
        usage = await using
    finally:
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)
    return Run(cell, tuple(outcomes), usage)


async def _usage(
    peers: Sequence[PeerProcess],
    driver: RequestDriver,
    start_s: float,
    window_s: tuple[float, float],
    tell: Callable[[], None],
) -> Usage:
    """Between the two ends of the window."""
    await _tell_until(start_s + window_s[0], tell)
    before, cpu_before_s, tokens_before = await _counters(peers), time.process_time(), driver.tokens
    await _tell_until(start_s + window_s[1], tell)
    after, cpu_after_s, tokens_after = await _counters(peers), time.process_time(), driver.tokens
    passed_s = [late.at_s - early.at_s for early, late in zip(before, after, strict=True)]
    pairs = list(zip(before, after, passed_s, strict=True))
    return Usage(
        engines=tuple((late.busy_s - early.busy_s) / seconds for early, late, seconds in pairs),
        processes=tuple((late.cpu_s - early.cpu_s) / seconds for early, late, seconds in pairs),
        driver=(cpu_after_s - cpu_before_s) / max(passed_s),
        tokens_per_s=(tokens_after - tokens_before) / max(passed_s),
    )


async def _counters(peers: Sequence[PeerProcess]) -> list[PeerCounters]:
    return list(await asyncio.gather(*(peer.counters() for peer in peers)))


async def _tell_until(at_s: float, tell: Callable[[], None]) -> None:
    clock = asyncio.get_running_loop().time
    while (left_s := at_s - clock()) > 0:
        tell()
        await asyncio.sleep(min(1.0, left_s))
