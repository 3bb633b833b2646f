"""GET /metrics of a peer."""

import asyncio
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from support.deadline import DEADLINE_S
from support.links.data_plane import asynchronous

from molink.dht.errors import PortInUse
from molink.peer.daemon.local_listener import HOST
from molink.peer.daemon.metrics_server import MetricsServer
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.wire.transport.line_quality import LineQuality, LinkQuality


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=DEADLINE_S) as answer:
        return answer.read().decode()


@asynchronous
async def test_what_the_line_carries_is_told_as_it_is_at_that_moment() -> None:
    metrics = PeerMetrics()
    line = LineQuality(12.5e6, (LinkQuality("peer-abcdefgh", 1e6, 0.03, 0.002),))
    metrics.watch(lambda: line)
    async with MetricsServer(metrics.registry, 0) as server:
        before = await asyncio.to_thread(scrape, server.port)
        line = LineQuality(25e6)
        after = await asyncio.to_thread(scrape, server.port)
    assert "molink_uplink_bytes_per_second 1.25e+07" in before
    assert 'molink_link_round_trip_seconds{peer="abcdefgh"} 0.03' in before
    assert "molink_uplink_bytes_per_second 2.5e+07" in after
    assert "abcdefgh" not in after


@asynchronous
async def test_a_port_in_use_is_told_in_a_sentence_and_a_closed_server_frees_its_own() -> None:
    async with MetricsServer(CollectorRegistry(), 0) as server:
        with pytest.raises(PortInUse, match="Choose another with --metrics-port"):
            await MetricsServer(CollectorRegistry(), server.port).__aenter__()
    async with MetricsServer(CollectorRegistry(), server.port) as again:
        assert again.port == server.port


@asynchronous
async def test_silent_connections_keep_nobody_from_the_metrics() -> None:
    async with MetricsServer(CollectorRegistry(), 0) as server:
        silent = [await asyncio.open_connection(HOST, server.port) for _ in range(100)]
        assert await asyncio.to_thread(scrape, server.port) == ""
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in silent), return_exceptions=True)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /else HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("HEAD /metrics HTTP/1.1", 200),
        ("x", 404),
    ],
)
def test_nothing_but_the_metrics_is_told(request_line: str, status: int) -> None:
    @asynchronous
    async def ask() -> None:
        async with MetricsServer(CollectorRegistry(), 0) as server:
            reader, writer = await asyncio.open_connection(HOST, server.port)
            writer.write(f"{request_line}\r\nHost: {HOST}\r\n\r\n".encode())
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.readline()).split()[1] == str(status).encode()
            writer.close()

    ask()
