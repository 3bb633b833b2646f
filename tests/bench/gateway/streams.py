"""What the gateway itself costs where the circuit costs nothing: `python tests/bench/gateway/streams.py`.

The gateway runs in a process of its own over a swarm that makes tokens out of nothing; another process reads as clients
do, over HTTP on loopback. A token's text says which stream it is of, which one in it, and when it was made, so that
what is lost, mixed up or late is seen. Both processes share the machine's cores.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from bench.tables import Table
from bench.this_machine import processor
from support.swarms.fake_swarm import MODEL, FakeSwarm, gateway

from molink.client.api.generation import TextPiece
from molink.client.text.tool_calls import ToolCallStream
from molink.shards.spec import SamplingParams

PACED: Final = 100
PACED_RATE: Final = 20.0
"""Tokens a second of each stream whose delay is measured: people read no faster."""
MANY: Final = 1000
EVERY_S: Final = 1.0


@dataclass(slots=True)
class StubbedSwarm(FakeSwarm):
    """Every generation yields `max_tokens` tokens, `rate` a second (0: as fast as they are taken)."""

    numbers: list[int] = field(default_factory=list)

    async def _pieces(
        self, asked: object, params: SamplingParams, timeout_s: float, calls: ToolCallStream | None = None
    ) -> AsyncIterator[TextPiece]:
        del timeout_s, calls
        name, rate = str(asked).split("/")
        count, interval_s = params.max_new_tokens, 1 / float(rate) if float(rate) else 0.0
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        for at in range(count):
            if interval_s:
                await asyncio.sleep(max(0.0, begin_s + (at + 1) * interval_s - clock()))
            elif at % 16 == 15:
                await asyncio.sleep(0)
            is_last = at == count - 1
            text = f"{name} {at} {time.monotonic_ns()} "
            yield TextPiece(
                text=text,
                token_ids=(at,),
                finish_reason="length" if is_last else None,
                generation=self._generation("", (), ()) if is_last else None,
            )


def serve(ready: Connection) -> None:
    """The gateway, until the other end closes."""
    with gateway(StubbedSwarm(), max_requests=2 * MANY, waiting_s=30.0) as url:
        ready.send(url)
        try:
            ready.recv()
        except EOFError:
            return


@dataclass(slots=True)
class Read:
    """What one client has read."""

    tokens: int = 0
    is_whole: bool = False
    delays_ms: list[float] = field(default_factory=list)


async def read_stream(port: int, name: str, rate: float, count: int, after_s: float) -> Read:
    """Reads one stream to its end. Raises ValueError: a token is missing, or of another stream."""
    await asyncio.sleep(after_s)
    asked = {"model": MODEL, "prompt": f"{name}/{rate}", "max_tokens": count, "stream": True}
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    read = Read()
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                read.is_whole = read.is_whole or line.startswith(b"data: [DONE]")
                continue
            now_ns = time.monotonic_ns()
            begin = line.index(b'"text": "') + 9
            whose, at, made_ns = line[begin : line.index(b'"', begin)].split()[:3]
            if whose != name.encode() or int(at) != read.tokens:
                raise ValueError(f"stream {name} got token {at!r} of {whose!r} as its {read.tokens}th")
            read.tokens += 1
            read.delays_ms.append((now_ns - int(made_ns)) / 1e6)
    finally:
        writer.close()
    return read


async def read_all(port: int, streams: int, rate: float, count: int) -> tuple[list[Read], float]:
    """Returns what so many clients read at once, and the seconds that it took. Paced streams begin spread over two
    seconds: what one machine makes in one instant for all of them would wait for itself."""
    began_s = time.perf_counter()
    spread_s = 2.0 / streams if rate else 0.0
    reads = await asyncio.gather(
        *(read_stream(port, f"s{one}", rate, count, one * spread_s) for one in range(streams))
    )
    return list(reads), time.perf_counter() - began_s


async def most_bytes(process: psutil.Process, ends: asyncio.Event) -> int:
    """Returns the most memory that the gateway has taken until then."""
    most = 0
    while not ends.is_set():
        most = max(most, process.memory_info().rss)
        try:
            async with asyncio.timeout(EVERY_S):
                await ends.wait()
        except TimeoutError:
            continue
    return most


async def measure(port: int, pid: int, table: Table, seconds: float) -> None:
    """All rows, one after the other."""
    process = psutil.Process(pid)
    await read_all(port, 8, 0.0, 500)  # what is made on first use is there
    reads, _ = await read_all(port, PACED, PACED_RATE, round(PACED_RATE * seconds))
    delays_ms = sorted(one for read in reads for one in read.delays_ms)
    name = f"{PACED} streams of {PACED_RATE:.0f} tokens a second: added per token"
    table.judge(f"{name}, p50", statistics.median(delays_ms), "ms", 0.5)
    table.judge(f"{name}, p99", delays_ms[round(0.99 * len(delays_ms)) - 1], "ms", 5.0)
    reads, took_s = await read_all(port, 64, 0.0, 2000)
    tokens = sum(read.tokens for read in reads)
    table.judge("64 streams as fast as they go: tokens a second", tokens / took_s, "", 20_000.0, least=True)
    before = process.memory_info().rss
    ends = asyncio.Event()
    watched = asyncio.create_task(most_bytes(process, ends))
    reads, took_s = await read_all(port, MANY, 2.0, round(2 * seconds))
    ends.set()
    whole = sum(read.is_whole and read.tokens == round(2 * seconds) for read in reads)
    table.judge(f"{MANY} streams at once: whole, in order, none mixed", whole, "", float(MANY), least=True)
    delays_ms = sorted(one for read in reads for one in read.delays_ms)
    table.note(
        "  added per token, p50, p99",
        f"{statistics.median(delays_ms):.2f}, {delays_ms[round(0.99 * len(delays_ms)) - 1]:.1f} ms",
    )
    table.note(
        "  memory of the gateway, before and at most",
        f"{before / 2**20:.0f}, {await watched / 2**20:.0f} MiB",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    print(f"{processor()}: {' '.join(sys.argv)}", flush=True)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    try:
        port = int(str(ours.recv()).rpartition(":")[2])
        asyncio.run(measure(port, server.pid or 0, Table(), options.seconds))
    finally:
        ours.send("end")
        server.join(30)


if __name__ == "__main__":
    main()
