"""How else messages could be sent: other programs' ways and the calibrations, as real sockets, for `link`.

Every way has two ends. A receiving end listens and hands each whole message on; a sending end takes messages of two
kinds at any time. None of them ciphers what it sends; the product's links do.
"""

import asyncio
import collections
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio
import zmq

HOST = "127.0.0.1"
METHOD = "/rival.Rival/Stream"
OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
DECODE, PREFILL = 1, 2
HEAD = struct.Struct("<BI")
"""Before the rest of every message: its kind and its number."""
CHUNK_HEAD = struct.Struct("<BIII")
"""Of the control sender: kind, number, size of the whole message, offset."""
CONTROL_CHUNK_BYTES = 32 * 1024

Deliver = Callable[[bytes | memoryview], None]
"""Takes a whole message. Called on any thread."""


class Receiving(Protocol):
    """An end that listens."""

    async def open(self, deliver: Deliver) -> list[dict[str, str | int]]:
        """Listens; for each of its ports what a sending end must know: `port` and more."""

    async def close(self) -> None: ...


class Sending(Protocol):
    """An end that has connected."""

    def post(self, kind: int, message: bytes) -> None:
        """Queues a whole message."""

    async def close(self) -> None: ...


class GrpcReceiving:
    """Whole messages, one in each gRPC message. `echo`: they are sent back, too."""

    def __init__(self, *, echo: bool = False, credentials: grpc.ServerCredentials | None = None) -> None:
        self._echo = echo
        self._credentials = credentials
        self._server = grpc.aio.server(options=OPTIONS)

    async def open(self, deliver: Deliver) -> list[dict[str, str | int]]:
        async def serve(_: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
            await context.send_initial_metadata(())
            while isinstance(message := await context.read(), bytes):
                answer = self._answer(message, deliver)
                if answer is not None:
                    await context.write(answer)

        service, name = METHOD.strip("/").split("/")
        handler = grpc.method_handlers_generic_handler(
            service, {name: grpc.stream_stream_rpc_method_handler(serve)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        if self._credentials is None:
            port = self._server.add_insecure_port(f"{HOST}:0")
        else:
            port = self._server.add_secure_port(f"{HOST}:0", self._credentials)
        await self._server.start()
        return [{"port": port}]

    def _answer(self, message: bytes, deliver: Deliver) -> bytes | None:
        if self._echo:
            return message
        deliver(message)
        return None

    async def close(self) -> None:
        await self._server.stop(None)


class ControlReceiving(GrpcReceiving):
    """Chunks of messages, each answered by the number of bytes that have arrived."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived_bytes = 0
        self._left: dict[tuple[int, int], int] = {}

    def _answer(self, message: bytes, deliver: Deliver) -> bytes | None:
        kind, number, size, _ = CHUNK_HEAD.unpack_from(message)
        got = len(message) - CHUNK_HEAD.size
        self._arrived_bytes += got
        left = self._left.pop((kind, number), size) - got
        if left:
            self._left[kind, number] = left
        else:
            deliver(HEAD.pack(kind, number))
        return struct.pack("<Q", self._arrived_bytes)


class GrpcSending:
    """One stream on a channel of its own; whole messages in the order in which they were posted: FIFO."""

    def __init__(
        self, address: str, credentials: grpc.ChannelCredentials | None = None, name: str = ""
    ) -> None:
        options = [*OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self.call = self._channel.stream_stream(METHOD)()
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> "GrpcSending":
        await self.call.initial_metadata()
        self._task = asyncio.create_task(self._write())
        return self

    def post(self, kind: int, message: bytes) -> None:
        self._queue.put_nowait(message)

    async def _write(self) -> None:
        while True:
            await self.call.write(await self._queue.get())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.call.cancel()
        await self._channel.close()


class ConcurrentSending:
    """A channel for each kind: both send at once, and TCP shares the line between them."""

    def __init__(self, addresses: dict[int, str]) -> None:
        self._streams = {kind: GrpcSending(address) for kind, address in addresses.items()}

    async def open(self) -> "ConcurrentSending":
        for stream in self._streams.values():
            await stream.open()
        return self

    def post(self, kind: int, message: bytes) -> None:
        self._streams[kind].post(kind, message)

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.close()


class ControlSending:
    """Told the right window: no more than that many bytes on their way, decode first, in chunks."""

    def __init__(self, address: str, window_bytes: int) -> None:
        self._stream = GrpcSending(address)
        self._window = window_bytes
        self._queues: dict[int, collections.deque[tuple[bytes, int]]] = {
            DECODE: collections.deque(),
            PREFILL: collections.deque(),
        }
        self._sent = self._arrived = 0
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> "ControlSending":
        await self._stream.call.initial_metadata()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._acknowledged())]
        return self

    def post(self, kind: int, message: bytes) -> None:
        self._queues[kind].append((message, 0))
        self._wake.set()

    async def _write(self) -> None:
        while True:
            kind = DECODE if self._queues[DECODE] else PREFILL
            queue = self._queues[kind]
            if not queue or (
                kind == PREFILL and self._sent - self._arrived + CONTROL_CHUNK_BYTES > self._window
            ):
                self._wake.clear()
                await self._wake.wait()
                continue
            message, offset = queue.popleft()
            part = message[offset : offset + CONTROL_CHUNK_BYTES]
            if offset + len(part) < len(message):
                queue.appendleft((message, offset + len(part)))
            self._sent += len(part)
            _, number = HEAD.unpack_from(message)
            await self._stream.call.write(CHUNK_HEAD.pack(kind, number, len(message), offset) + part)

    async def _acknowledged(self) -> None:
        while isinstance(answer := await self._stream.call.read(), bytes):
            (self._arrived,) = struct.unpack("<Q", answer)
            self._wake.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._stream.close()


class ZmqReceiving:
    """A PULL socket, read by a thread."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 100)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    async def open(self, deliver: Deliver) -> list[dict[str, str | int]]:
        def read() -> None:
            while not self._stopping.is_set():
                try:
                    deliver(self._socket.recv(copy=False).buffer)
                except zmq.Again:
                    continue

        port = self._socket.bind_to_random_port(f"tcp://{HOST}")
        self._thread = threading.Thread(target=read)
        self._thread.start()
        return [{"port": port}]

    async def close(self) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()
        self._socket.close(0)
        self._context.term()


class ZmqSending:
    """A PUSH socket for everything: what Helix's transport does between two machines."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(f"tcp://{address}")

    def post(self, kind: int, message: bytes) -> None:
        self._socket.send(message, zmq.NOBLOCK, copy=False)

    async def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class RawReceiving:
    """Bare TCP: a length, then the message. One connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self._thread: threading.Thread | None = None

    async def open(self, deliver: Deliver) -> list[dict[str, str | int]]:
        def read() -> None:
            connection, _ = self._listener.accept()
            with (
                contextlib.suppress(ConnectionResetError),
                connection,
                connection.makefile("rb", 1 << 20) as file,
            ):
                while len(head := file.read(4)) == 4:
                    message = bytearray(struct.unpack("<I", head)[0])
                    if file.readinto(message) == len(message):
                        deliver(message)

        self._thread = threading.Thread(target=read, daemon=True)
        self._thread.start()
        return [{"port": self._listener.getsockname()[1]}]

    async def close(self) -> None:
        assert self._thread is not None
        self._thread.join(5)
        self._listener.close()


class RawSending:
    """Bare TCP, written by a thread in the order of posting."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, kind: int, message: bytes) -> None:
        threading.Thread(
            target=self._socket.sendall, args=(struct.pack("<I", len(message)) + message,), daemon=True
        ).start()

    async def close(self) -> None:
        self._socket.close()
