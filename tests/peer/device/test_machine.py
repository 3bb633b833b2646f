"""Ports that a peer remembers from its last start."""

import socket

from molink.peer.device.machine import free_port, unused_port

HOST = "127.0.0.1"


def listening() -> socket.socket:
    """On any free port, as peers do."""
    return socket.create_server((HOST, 0))


def test_a_peer_that_was_killed_finds_its_port_free_while_its_connections_are_ending() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((HOST, port)):
            listener.accept()[0].close()  # who closes first keeps the address for a while
            listener.close()
            assert free_port(HOST, port) == port
            assert unused_port(HOST, port) == port


def test_a_port_that_somebody_listens_on_is_not_free() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
        assert free_port(HOST, port) == 0
        assert unused_port(HOST, port) != port


def test_a_peer_that_remembers_none_takes_any() -> None:
    assert free_port(HOST, None) == 0
