"""One run of an emulation: peers, their lines, a client, and what was measured."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np

from molink.client.circuit.connection import SwarmConnection
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.matrices import Latencies
from molink.simnet.core.request_load import RequestOutcome, arrivals
from molink.simnet.core.room import Room, fitting_tokens
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import even_spans
from molink.simnet.emulate.driver import KnownPeers, RequestDriver
from molink.simnet.emulate.processes.child_process import (
    LinesConfiguration,
    LinesCounters,
    LinesProcess,
    PeerProcess,
)
from molink.simnet.emulate.processes.peer import PeerConfiguration, PeerCounters
from molink.simnet.serve.served_as import ServedAs

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EmulationCell:
    """What differs between the runs of a command."""

    policy: str
    rate_rps: float
    served_as: ServedAs


@dataclass(frozen=True, slots=True)
class Emulation:
    """What all runs of a command have in common."""

    spec: ModelSpec
    device: str | None
    """The profile of every peer; None: peers compute, on this machine's processor."""
    tensors_per_boundary: int
    """That every policy's peers send to the next one for each row."""
    peers: int
    bandwidth_mbps: float
    delay_ms: float
    """From any peer to any other, one way; where they are not equally far, the mean of the circuit's links."""
    trace: tuple[TraceRequest, ...]
    warm_up_s: float
    duration_s: float
    seed: int
    latency_ms: Latencies | None = None
    """Between peers; None: everywhere `delay_ms`."""

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
    """Of this process, the client: processor time, of one core."""
    lines: float
    """Of the process that moves bytes along the lines: processor time, of one core."""
    uplinks: tuple[float, ...]
    """Of each peer: the part of the time in which bytes left its uplink."""
    tokens_per_s: float
    """That all requests together got."""


@dataclass(frozen=True, slots=True)
class EmulationRun:
    """A finished run."""

    cell: EmulationCell
    outcomes: tuple[RequestOutcome, ...]
    usage: Usage


async def emulate(emulation: Emulation, cell: EmulationCell, report: Report) -> EmulationRun:
    """Starts everything, serves the requests, and ends everything.

    Raises:
        EmulationError: a peer does not start, or dies.
    """
    async with AsyncExitStack() as stack:
        report("starting peers")
        lines = await stack.enter_async_context(
            LinesProcess(
                LinesConfiguration(
                    emulation.peers, emulation.bandwidth_mbps, emulation.delay_ms, emulation.latency_ms
                )
            )
        )
        peers = await _start_peers(emulation, cell, lines, stack)
        views = tuple(peer.view for peer in peers)
        await lines.settle([view.facts.grpc_addresses for view in views])
        connection = await stack.enter_async_context(SwarmConnection((), None, view=KnownPeers(views)))
        room = Room(
            min(
                fitting_tokens(emulation.spec, span, view.state.free_kv_bytes)
                for view, span in zip(views, emulation.spans, strict=True)
            ),
            min(peer.most_sessions for peer in peers),
        )
        driver = RequestDriver(connection, emulation.spec, room, emulation.peers, emulation.seed)
        return await _measure(emulation, cell, _Measured(peers, lines, driver), report)


async def _start_peers(
    emulation: Emulation, cell: EmulationCell, lines: LinesProcess, stack: AsyncExitStack
) -> list[PeerProcess]:
    peers = [
        PeerProcess(
            PeerConfiguration(
                name=f"{number + 1}",
                model=emulation.spec.name,
                tensors_per_boundary=emulation.tensors_per_boundary,
                device=emulation.device,
                start=span.start,
                stop=span.stop,
                http_proxy=lines.proxies[number],
                uplink_mbps=emulation.bandwidth_mbps,
                delay_ms=_mean_delay_ms(emulation, number),
                policy=cell.policy,
                micro_batches=cell.served_as.micro_batches,
                prefill_chunk_tokens=cell.served_as.prefill_chunk_tokens,
                speculation=cell.served_as.speculation,
            )
        )
        for number, span in enumerate(emulation.spans)
    ]
    for started in await asyncio.gather(*map(stack.enter_async_context, peers), return_exceptions=True):
        if isinstance(started, BaseException):
            raise started
    return peers


def _mean_delay_ms(emulation: Emulation, number: int) -> float:
    """How far a peer is from the others on average: its coordinate says no more, and others predict links by it."""
    if emulation.latency_ms is None or emulation.peers == 1:
        return emulation.delay_ms
    return sum(emulation.latency_ms[number]) / (emulation.peers - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """Whatever uses processors or lines."""

    peers: Sequence[PeerProcess]
    lines: LinesProcess
    driver: RequestDriver


@dataclass(frozen=True, slots=True)
class _CounterReading:
    """All counters at one moment."""

    peers: tuple[PeerCounters, ...]
    lines: LinesCounters
    driver_cpu_s: float
    tokens: int


async def _measure(
    emulation: Emulation, cell: EmulationCell, measured: _Measured, report: Report
) -> EmulationRun:
    window_s = (emulation.warm_up_s, emulation.warm_up_s + emulation.duration_s)
    clock = asyncio.get_running_loop().time
    start_s = clock()

    def tell() -> None:
        driver = measured.driver
        report(progress_line(clock() - start_s, window_s[1], driver.running, driver.awaited))

    using = asyncio.create_task(_usage(measured, start_s, window_s, tell), name="usage")
    try:
        first = int(np.random.default_rng(emulation.seed).integers(len(emulation.trace)))
        requests = arrivals(emulation.trace, cell.rate_rps, window_s[1], first)
        outcomes = await measured.driver.drive(requests, start_s, window_s, tell)
        usage = await using
    finally:
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)
    return EmulationRun(cell, tuple(outcomes), usage)


def progress_line(passed_s: float, window_s: float, running: int, awaited: int) -> str:
    """Says how far a run is. After the window requests go on to come, and only those that came within it are
    awaited."""
    if passed_s < window_s:
        return f"{passed_s:.0f} of {window_s:.0f} s, {running} in progress; then those are awaited that have not ended"
    return f"{passed_s:.0f} s: {awaited} of the measured requests have not ended, {running} in progress"


async def _usage(
    measured: _Measured, start_s: float, window_s: tuple[float, float], tell: Callable[[], None]
) -> Usage:
    """Between the two ends of the window."""
    await _tell_until(start_s + window_s[0], tell)
    early = await _read(measured)
    await _tell_until(start_s + window_s[1], tell)
    late = await _read(measured)
    passed_s = late.lines.at_s - early.lines.at_s
    pairs = list(zip(early.peers, late.peers, strict=True))
    return Usage(
        engines=tuple((after.busy_s - before.busy_s) / passed_s for before, after in pairs),
        processes=tuple((after.cpu_s - before.cpu_s) / passed_s for before, after in pairs),
        driver=(late.driver_cpu_s - early.driver_cpu_s) / passed_s,
        lines=(late.lines.cpu_s - early.lines.cpu_s) / passed_s,
        uplinks=tuple(
            (after - before) / passed_s
            for before, after in zip(early.lines.busy_s, late.lines.busy_s, strict=True)
        ),
        tokens_per_s=(late.tokens - early.tokens) / passed_s,
    )


async def _read(measured: _Measured) -> _CounterReading:
    peers, lines = await asyncio.gather(
        asyncio.gather(*(peer.counters() for peer in measured.peers)), measured.lines.counters()
    )
    return _CounterReading(tuple(peers), lines, time.process_time(), measured.driver.tokens)


async def _tell_until(at_s: float, tell: Callable[[], None]) -> None:
    clock = asyncio.get_running_loop().time
    while (left_s := at_s - clock()) > 0:
        tell()
        await asyncio.sleep(min(1.0, left_s))
