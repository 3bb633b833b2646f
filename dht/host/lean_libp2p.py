"""Libp2p without what neither peers nor clients use of it: less than half of the time that importing all of it takes.

For a process of this product alone, as `molink.shards.loading.lean_transformers` is. Connections here are noise and
yamux over TCP to addresses, with Ed25519 keys (`host.py`). Everything else that libp2p can do is a placeholder.
"""

import importlib
import sys
from typing import Final

from molink.dht.host.placeholders import placeholders

_UNUSED: Final = (
    "aioquic",  # QUIC and WebTransport
    "trio_websocket",
    "libp2p.transport.websocket",
    "libp2p.security.secio",
    "libp2p.security.tls",
    "requests",
    "httpx",
    "Crypto",  # keys of other kinds; the cipher of private swarms is brought in when one is joined
    "coincurve",
    "fastecdsa",
    "dns",  # `host.py` looks names up before
    "zeroconf",  # finding peers
    "miniupnpc",
    "libp2p.discovery.mdns",
    "libp2p.discovery.upnp",
    "libp2p.kad_dht",
    "libp2p.records",
    "libp2p.relay",
    "libp2p.bitswap",
    "libp2p.peer.persistent",
    "prometheus_client",
)


def load_lean_libp2p() -> None:
    """Imports libp2p; does nothing where it is loaded already."""
    if "libp2p" in sys.modules:
        return
    with placeholders(_UNUSED):
        importlib.import_module("libp2p")


def bring_in_swarm_cipher() -> None:
    """Gives libp2p the cipher by which connections of a private swarm are encrypted, if it was loaded without."""
    connections = importlib.import_module("libp2p.security.pnet.psk_conn")
    connections.__dict__["Salsa20"] = importlib.import_module("Crypto.Cipher.Salsa20")
