"""Deadline of a whole exchange over an HTTP client's connections, whose own timeouts begin anew with every byte."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ssl import SSLContext

import httpcore
import httpx


class ReadDeadline:
    """Deadline of what a thread reads and writes, for each thread that has set one. Threads may share it."""

    def __init__(self) -> None:
        self._threads = threading.local()

    @contextmanager
    def until(self, deadline_s: float) -> Iterator[None]:
        """Within, this thread's reads and writes end at this moment of `time.monotonic()`, with a timeout of httpx."""
        self._threads.deadline_s = deadline_s
        try:
            yield
        finally:
            self._threads.deadline_s = None

    def guard(self, client: httpx.Client) -> None:
        """Holds all of the client's connections to it, those to proxies too."""
        # httpx has no public way to say what its connections are made of
        for transport in (client._transport, *client._mounts.values()):  # noqa: SLF001
            if isinstance(transport, httpx.HTTPTransport):
                pool = transport._pool  # noqa: SLF001
                pool._network_backend = _TimedBackend(pool._network_backend, self)  # noqa: SLF001

    def shortened(self, timeout_s: float | None, timed_out: type[Exception]) -> float | None:
        """The timeout, or what is left until the deadline if that is less. Raises `timed_out` if nothing is left."""
        deadline_s: float | None = getattr(self._threads, "deadline_s", None)
        if deadline_s is None:
            return timeout_s
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise timed_out("it comes too slowly")
        return left_s if timeout_s is None else min(left_s, timeout_s)


class _TimedBackend(httpcore.NetworkBackend):
    """Another backend, whose streams keep a deadline."""

    def __init__(self, inner: httpcore.NetworkBackend, deadline: ReadDeadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self._deadline.shortened(timeout, httpcore.ConnectTimeout)
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _TimedStream(stream, self._deadline)

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        timeout = self._deadline.shortened(timeout, httpcore.ConnectTimeout)
        return _TimedStream(self._inner.connect_unix_socket(path, timeout, socket_options), self._deadline)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class _TimedStream(httpcore.NetworkStream):
    """Another stream, which keeps a deadline."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: ReadDeadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.shortened(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.shortened(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        timeout = self._deadline.shortened(timeout, httpcore.ConnectTimeout)
        return _TimedStream(self._inner.start_tls(ssl_context, server_hostname, timeout), self._deadline)

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)
