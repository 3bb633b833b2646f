"""Peers of the local network that are there now, by mDNS: where a link to each is dialled without leaving home.

Two homes of one network have one outer address, at which few routers pass them on to each other. What the network says
is a claim: whoever dials pins the certificate of the peer's own signed facts.
"""

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Self

from molink.dht.identity.dialable import own_ranges
from molink.dht.node.local_network import (
    MOST_ASKED,
    SERVICE,
    WITHIN_S,
    NearbyPeer,
    ask_local_peer,
    close_zeroconf,
    open_zeroconf,
    peer_id_named,
)
from molink.shards.address_ranges import AddressRange

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

MOST_NEIGHBOURS = 64


class LocalNeighbours:
    """Knows the peers of the local network between `__aenter__` and `__aexit__`; nobody, where there is none."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        """`addresses`: those of this machine to ask from."""
        self._addresses = addresses
        self._ranges = own_ranges(addresses) - {AddressRange.PUBLIC}
        self._known: dict[str, NearbyPeer] = {}
        """By the name of the service."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """By that name; what is answered for an older state of it is not heard."""
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None

    async def __aenter__(self) -> Self:
        self._zeroconf = open_zeroconf(self._addresses)
        if self._zeroconf is not None:
            from zeroconf.asyncio import AsyncServiceBrowser

            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._browser is not None:
            await self._browser.async_cancel()
        asking = tuple(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        if self._zeroconf is not None:
            await close_zeroconf(self._zeroconf)

    def links_of(self, peer_id: str) -> tuple[str, ...]:
        """Where the network says that links to a peer are dialled, as host:port."""
        return next((peer.links for peer in self._known.values() if peer.peer_id == peer_id), ())

    def _changed(self, name: str, state_change: "ServiceStateChange", **_: object) -> None:
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            self._known.pop(name, None)
            self._ask_no_more(name)
        elif peer_id_named(name) is None:
            return
        elif (name in self._asking or len(self._asking) < MOST_ASKED) and self._has_room(name):
            self._ask_no_more(name)
            self._asking[name] = task = asyncio.create_task(self._ask(name), name="ask a local peer")
            task.add_done_callback(lambda ended: self._asked(name, ended))

    def _has_room(self, name: str) -> bool:
        return name in self._known or len(self._known) < MOST_NEIGHBOURS

    def _ask_no_more(self, name: str) -> None:
        if (task := self._asking.pop(name, None)) is not None:
            task.cancel()

    def _asked(self, name: str, ended: "asyncio.Task[None]") -> None:
        if self._asking.get(name) is ended:
            del self._asking[name]

    async def _ask(self, name: str) -> None:
        assert self._zeroconf is not None  # noqa: S101 - its browser has called
        peer = await ask_local_peer(self._zeroconf, name, self._ranges, WITHIN_S)
        if peer is not None and self._has_room(name):
            self._known[name] = peer
