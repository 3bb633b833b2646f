"""UPnP Internet gateway device (IGD), by miniupnpc: how a router at home is asked. Everything here blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from molink.peer.reach.port_mapping import GatewayError
from molink.shards.address_ranges import ALL_INTERFACES

SEARCH_MS = 1000
"""For each of the four kinds of device that are searched in turn: who hears nobody knows it after 4 s."""
_BY_HAND = "forward the peer's two ports by hand and name them (--announce HOST:CONTROL:DATA)"


class UpnpGateway:
    """The router that was found. What it says is passed on as it is."""

    def __init__(self, upnp: Any, inner_host: str) -> None:  # noqa: ANN401 - miniupnpc has no types
        self._upnp = upnp
        self._inner_host = inner_host

    def outer_host(self) -> str:
        with _asking("tell its outer address"):
            return str(self._upnp.externalipaddress())

    def map_port(self, outer_port: int, inner_port: int, lease_s: int) -> None:
        asked = (outer_port, "TCP", self._inner_host, inner_port, "MoLink", "", lease_s)
        with _asking(f"map port {inner_port}"):
            self._upnp.addportmapping(*asked)

    def unmap_port(self, outer_port: int) -> None:
        with _asking(f"end the mapping of port {outer_port}"):
            self._upnp.deleteportmapping(outer_port, "TCP", "")


def find_gateway(listen: str, described_at: str | None = None) -> UpnpGateway:
    """Searches the network of `listen`, where the peer listens. `described_at`: URL of the router's description, if it
    is known already.

    Raises:
        GatewayError: no router answers.
    """
    try:
        import miniupnpc
    except ImportError as error:
        raise GatewayError("miniupnpc is not installed", "pip install miniupnpc") from error
    from_there = {} if listen in ALL_INTERFACES else {"multicastif": listen}
    try:
        upnp = miniupnpc.UPnP(discoverdelay=SEARCH_MS, **from_there)
        if described_at is None:
            upnp.discover()
            upnp.selectigd()
        else:
            upnp.selectigd(described_at)
    except Exception as error:  # no other kind here either; it says "Success" where nobody answers
        why = "" if str(error) in ("", "Success") else f" ({error})"
        raise GatewayError(
            f"no router answers UPnP{why}", f"switch UPnP on in the router, or {_BY_HAND}"
        ) from error
    return UpnpGateway(upnp, upnp.lanaddr if listen in ALL_INTERFACES else listen)


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """A request to the router, whose refusal is a GatewayError."""
    try:
        yield
    except Exception as error:  # miniupnpc raises no other kind
        raise GatewayError(
            f"the router refuses to {what} ({error})", f"allow it UPnP for this machine, or {_BY_HAND}"
        ) from error
