"""Real sockets through an emulated line."""

import contextlib
import hashlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.shaping import ShapedPort
from molink.simnet.lines.sockets import reset
from molink.simnet.lines.transit import Chunk

DEADLINE_S = 120.0
HOST = "127.0.0.1"


def dial(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), DEADLINE_S)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the other end ends its stream."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def send_and_end(sock: socket.socket, data: bytes) -> None:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """The work runs in a thread of its own and has ended at the end."""
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


@pytest.fixture
def shaper() -> Iterator[Shaper]:
    with Shaper() as shaper:
        yield shaper


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listening:
        listening.settimeout(DEADLINE_S)
        yield listening


@contextlib.contextmanager
def shaped(
    shaper: Shaper, target: socket.socket, up: Line[Chunk] | None = None, down: Line[Chunk] | None = None
) -> Iterator[ShapedPort]:
    with ShapedPort(shaper, target.getsockname(), up or Line(), down or Line()) as port:
        yield port


@contextlib.contextmanager
def connected(port: ShapedPort, target: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end and the target's end of one connection."""
    with dial(port.port) as client:
        server, _ = target.accept()
        server.settimeout(DEADLINE_S)
        with server:
            yield client, server


@pytest.mark.parametrize("rate_mbps", [80, float("inf")])
def test_bytes_arrive_complete_and_in_order_both_ways(
    shaper: Shaper, target: socket.socket, rate_mbps: float
) -> None:
    rng = random.Random(1)
    sent = [rng.randbytes(size) for size in (0, 1, 7, 1447, 8192, 8193, 70_001, 600_000)]
    with (
        shaped(shaper, target, Line(rate_mbps, 2, 1), Line(rate_mbps, 2)) as port,
        connected(port, target) as (client, server),
    ):
        for one, other in ((client, server), (server, client)):
            received = bytearray()
            with beside(lambda other=other, received=received: received.extend(read_all(other))):
                for data in sent:
                    one.sendall(data)
                one.shutdown(socket.SHUT_WR)
            assert hashlib.sha256(received).digest() == hashlib.sha256(b"".join(sent)).digest()
        assert client.recv(1) == server.recv(1) == b""


def test_one_direction_can_end_before_the_other(shaper: Shaper, target: socket.socket) -> None:
    with (
        shaped(shaper, target, Line(100, 2), Line(100, 2)) as port,
        connected(port, target) as (client, server),
    ):
        send_and_end(client, b"question")
        assert read_all(server) == b"question"
        send_and_end(server, b"answer")
        assert read_all(client) == b"answer"


def test_no_byte_is_earlier_than_the_delay_and_the_rate_allow(shaper: Shaper, target: socket.socket) -> None:
    size, rate_mbps, delay_ms = 300_000, 20, 30
    with (
        shaped(shaper, target, Line(rate_mbps, delay_ms), Line(rate_mbps, delay_ms)) as port,
        connected(port, target) as (client, server),
    ):
        begin_s = time.monotonic()
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        assert time.monotonic() - begin_s >= delay_ms / 1000
        begin_s = time.monotonic()
        with beside(lambda: send_and_end(client, bytes(size))):
            assert len(read_all(server)) == size
        assert time.monotonic() - begin_s >= delay_ms / 1000 + size * 8 / (rate_mbps * 1e6)


def test_two_connections_share_the_rate_of_one_line(shaper: Shaper, target: socket.socket) -> None:
    size, rate_mbps = 250_000, 20
    up: Line[Chunk] = Line(rate_mbps)
    with (
        shaped(shaper, target, up) as port,
        shaped(shaper, target, up) as other,
        connected(port, target) as (client, server),
        connected(other, target) as (client_2, server_2),
    ):
        begin_s = time.monotonic()
        with (
            beside(lambda: send_and_end(client, bytes(size))),
            beside(lambda: send_and_end(client_2, bytes(size))),
            beside(lambda: read_all(server_2)),
        ):
            assert len(read_all(server)) == size
        assert time.monotonic() - begin_s >= 2 * size * 8 / (rate_mbps * 1e6)
        counters = shaper.call(up.counters)
        assert counters.sent_bytes == 2 * size
        assert counters.busy_s == pytest.approx(2 * size * 8 / (rate_mbps * 1e6))


def test_a_connection_that_comes_to_a_full_line_gets_its_turn(shaper: Shaper, target: socket.socket) -> None:
    bulk_bytes, size = 160_000_000, 100_000
    up: Line[Chunk] = Line(rate_mbps=50)
    with (
        shaped(shaper, target, up) as port,
        connected(port, target) as (bulk, bulk_server),
        connected(port, target) as (client, server),
    ):
        swallow = threading.Thread(target=lambda: drain(bulk_server))
        feed = threading.Thread(target=lambda: pour(bulk, bulk_bytes))
        swallow.start()
        feed.start()
        while not shaper.call(lambda: up.full):
            threading.Event().wait(0.005)
        send_and_end(client, bytes(size))
        assert len(read_all(server)) == size
        assert shaper.call(up.counters).sent_bytes < bulk_bytes / 2
        port.cut()
        for thread in (swallow, feed):
            thread.join(DEADLINE_S)


def drain(sock: socket.socket) -> None:
    """Reads until the connection ends or breaks."""
    with contextlib.suppress(OSError):
        read_all(sock)


def pour(sock: socket.socket, size: int) -> None:
    """Sends so many bytes, or until the connection breaks."""
    with contextlib.suppress(OSError):
        sock.sendall(bytes(size))


def test_a_reader_that_stops_holds_the_sender_back_and_no_other(
    shaper: Shaper, target: socket.socket
) -> None:
    up: Line[Chunk] = Line(rate_mbps=1000)
    with (
        shaped(shaper, target, up) as port,
        connected(port, target) as (client, server),
        connected(port, target) as (other, other_server),
    ):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.setblocking(False)
        taken = fill(client, shaper, up)
        assert taken < 32 * 1024 * 1024
        with beside(lambda: send_and_end(other, bytes(1_000_000))):
            assert len(read_all(other_server)) == 1_000_000
        client.settimeout(DEADLINE_S)
        with beside(lambda: client.shutdown(socket.SHUT_WR)):
            assert len(read_all(server)) == taken


def fill(client: socket.socket, shaper: Shaper, line: Line[Chunk]) -> int:
    """Sends until neither the kernel nor the line has moved anything for a while. How many bytes were taken."""
    taken = quiet = 0
    seen = -1
    while quiet < 20:
        with contextlib.suppress(BlockingIOError):
            taken += client.send(bytes(1 << 16))
        sent = taken + shaper.call(line.counters).sent_bytes
        quiet = quiet + 1 if sent == seen else 0
        seen = sent
        threading.Event().wait(0.005)
    return taken


@pytest.mark.parametrize("whose", ["client", "server"])
def test_a_reset_reaches_the_other_end(shaper: Shaper, target: socket.socket, whose: str) -> None:
    with shaped(shaper, target) as port, connected(port, target) as (client, server):
        client.sendall(b"x")
        assert server.recv(1) == b"x"
        broken, other = (client, server) if whose == "client" else (server, client)
        reset(broken)
        with pytest.raises(ConnectionResetError):
            other.recv(1)


def test_a_cut_resets_both_ends_and_the_next_connection_works(shaper: Shaper, target: socket.socket) -> None:
    with shaped(shaper, target, Line(100, 5), Line(100, 5)) as port:
        with connected(port, target) as (client, server):
            client.sendall(b"x")
            assert server.recv(1) == b"x"
            assert port.connections == 1
            assert port.cut() == 1
            for end in (client, server):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
            assert port.connections == 0
        with connected(port, target) as (client, server):
            client.sendall(b"y")
            assert server.recv(1) == b"y"


def test_a_paused_port_moves_nothing_and_loses_nothing(shaper: Shaper, target: socket.socket) -> None:
    with shaped(shaper, target) as port, connected(port, target) as (client, server):
        client.sendall(b"1")
        assert server.recv(1) == b"1"
        port.pause()
        client.sendall(b"2")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.recv(1)
        server.settimeout(DEADLINE_S)
        port.resume()
        assert server.recv(1) == b"2"


def test_a_target_that_is_not_there_resets_its_client(shaper: Shaper, target: socket.socket) -> None:
    nobody = target.getsockname()
    target.close()
    with ShapedPort(shaper, nobody, Line(delay_ms=20), Line()) as port:
        with pytest.raises(ConnectionResetError), dial(port.port) as client:
            client.recv(1)
        assert port.connections == 0


def test_the_end_of_the_shaper_ends_ports_and_connections(target: socket.socket) -> None:
    shaper = Shaper()
    with shaper:
        port = ShapedPort(shaper, target.getsockname(), Line(), Line()).__enter__()
        client = dial(port.port)
        server, _ = target.accept()
    with client, server:
        for end in (client, server):
            with pytest.raises(ConnectionResetError):
                end.recv(1)
    with pytest.raises(ConnectionRefusedError):
        dial(port.port)


def test_the_command_shapes_what_passes_and_takes_orders(target: socket.socket) -> None:
    shaped = ["--target", f"{HOST}:{target.getsockname()[1]}"]
    command = [sys.executable, "-m", "molink.simnet.lines.shaping", *shaped, *shaped]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ports = [int(process.stdout.readline()) for _ in range(2)]
        with dial(ports[0]) as other, dial(ports[1]) as client:
            first, _ = target.accept()
            second, _ = target.accept()
            with first, second:
                for one in (client, other):
                    one.sendall(b"x" * 1000)
                for one in (first, second):
                    assert len(one.recv(1000, socket.MSG_WAITALL)) == 1000
                print("down 50\ncounters\nnonsense\nrate 0\ncut\nend", file=process.stdin, flush=True)
                answers = [json.loads(line) for line in process.stdout]
        assert process.wait(DEADLINE_S) == 0
    assert answers[0] == {"done": "down 50"}
    assert answers[1]["up"]["sent_bytes"] == 2000
    assert "nonsense" in answers[2]["error"]
    assert "above 0" in answers[3]["error"]
    assert answers[4] == {"cut": 2}


@pytest.mark.parametrize(
    "wrong", [["--target", "nowhere"], ["--target", "h:0"], ["--target", "h:1", "--rate-mbps", "0"], []]
)
def test_the_command_refuses_what_makes_no_sense(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "molink.simnet.lines.shaping", *wrong]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "error:" in done.stderr
