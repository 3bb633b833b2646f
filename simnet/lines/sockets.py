"""Sockets of an emulated line: small buffers, so that little queue hides in them and the sender feels the line."""

import contextlib
import selectors
import socket
import struct
import sys
from collections.abc import Callable

from molink.simnet.lines.shaper import Shaper

SOCKET_BUFFER_BYTES = 64 * 1024
SEGMENT_BYTES = 1448
"""As on a real link. With the segments of loopback, 64 KB, the kernel of a sender hides megabytes of queue."""
ABORT = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
"""SO_LINGER for no time: closing resets."""

CONNECT_TIMEOUT_S = 10.0


def address(text: str) -> tuple[str, int]:
    """HOST:PORT. ValueError if it is not."""
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"not HOST:PORT: {text}")
    return host.strip("[]"), int(port)


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def small_buffers(sock: socket.socket) -> None:
    """Before the socket listens or connects: the window that the other end is offered follows from it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    if hasattr(socket, "TCP_MAXSEG"):
        with contextlib.suppress(OSError):  # Where it may not be set, only more hides in the kernel.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)


def reset(sock: socket.socket) -> None:
    """Closes so that the other end sees a connection reset."""
    with contextlib.suppress(OSError):  # It is reset already.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    sock.close()


class Listening:
    """A listening socket whose connections have small buffers; each is given to `arrive`."""

    def __init__(self, shaper: Shaper, host: str, arrive: Callable[[socket.socket], None]) -> None:
        self._shaper = shaper
        self._arrive = arrive
        self._host = host
        self._sock = socket.socket(family(host))

    def begin(self, port: int) -> int:
        """Listens, and tells the port. OSError if it is taken."""
        if not hasattr(
            socket, "SO_EXCLUSIVEADDRUSE"
        ):  # On Windows the reuse of an address is something else.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        small_buffers(self._sock)
        self._sock.bind((self._host, port))
        self._sock.listen(128)
        self._sock.setblocking(False)
        self._shaper.watch(self._sock, selectors.EVENT_READ, self._accept)
        self._shaper.at_exit(self.end)
        return int(self._sock.getsockname()[1])

    def end(self) -> None:
        self._shaper.forget_exit(self.end)
        self._shaper.watch(self._sock, 0, self._accept)
        self._sock.close()

    def _accept(self, _: int) -> None:
        with contextlib.suppress(OSError):  # It went away again.
            client, _address = self._sock.accept()
            client.setblocking(False)
            self._arrive(client)


class Dialling:
    """Connects a socket without blocking: `connected` with it, or `failed` with why, once."""

    def __init__(
        self,
        shaper: Shaper,
        address: tuple[str, int],
        connected: Callable[[socket.socket], None],
        failed: Callable[[str], None],
    ) -> None:
        self._shaper = shaper
        self._address = address
        self._connected = connected
        self._failed = failed
        self._sock = socket.socket(family(address[0]))
        self._over = False

    def begin(self) -> None:
        self._sock.setblocking(False)
        self._shaper.at_exit(self.abandon)
        try:
            small_buffers(self._sock)
            self._sock.connect(self._address)
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(str(error))
            return
        self._shaper.watch(self._sock, selectors.EVENT_WRITE, self._ready)
        self._shaper.after(CONNECT_TIMEOUT_S, lambda: self._fail(f"no answer within {CONNECT_TIMEOUT_S:g} s"))

    def abandon(self) -> None:
        self._fail("abandoned")

    def _ready(self, _: int) -> None:
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(f"error {error}")
        elif self._end():
            self._connected(self._sock)

    def _fail(self, reason: str) -> None:
        if self._end():
            self._sock.close()
            self._failed(reason)

    def _end(self) -> bool:
        if self._over:
            return False
        self._over = True
        self._shaper.forget_exit(self.abandon)
        self._shaper.watch(self._sock, 0, self._ready)
        return True
