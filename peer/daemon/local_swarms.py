"""Swarms of the local network: suggested to a peer that was told of none, which others of this network then find."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

import typer

from molink.dht.identity.addresses import PeerAddress
from molink.dht.node.local_neighbours import LocalNeighbours
from molink.dht.node.local_network import (
    LocalAdvertisement,
    LocalService,
    NearbyPeer,
    addresses_of,
    find_local_peers,
)
from molink.peer.daemon.settings import JoinSettings
from molink.peer.wire.link.links import Links
from molink.signals import run_loop


class LocalPresence:
    """Lets the local network know of a serving peer while the context is open.

    Where the peer has founded a swarm because nobody had told it of one, it says which others there are here: whoever
    starts it from a script has to name the one to join.
    """

    def __init__(
        self,
        settings: JoinSettings,
        peer_id: str,
        ports: tuple[int, int],
        links: Links,
        say: Callable[[str], None],
    ) -> None:
        """`ports`: where the peer's control and data plane listen. `links` are dialled at home, where the other end is
        in this network too. `say` takes one line for the owner."""
        self._settings = settings
        self._peer_id = peer_id
        self._ports = ports
        self._links = links
        self._say = say
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._settings.options.local_network == "off" or self._settings.announced_ports is not None:
            return self  # what maps its ports keeps it from the local network
        async with AsyncExitStack() as opening:
            private = self._settings.options.swarm_key is not None
            hosts = await asyncio.to_thread(addresses_of, self._settings.listen)
            control, data = self._ports
            service = LocalService(self._peer_id, hosts, control, private=private, data_port=data)
            await opening.enter_async_context(LocalAdvertisement(service))
            neighbours = await opening.enter_async_context(LocalNeighbours(hosts))
            self._links.dialler.ladder.local = neighbours.links_of
            if names_no_swarm(self._settings):
                search = asyncio.create_task(self._suggest(), name="swarms of the local network")
                opening.push_async_callback(_end, search)
            self._stack = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _suggest(self) -> None:
        others = [peer for peer in await _swarms(self._settings) if peer.peer_id != self._peer_id]
        if others:
            self._say(
                f"Note: on the local network there is {_described(others)}: its swarm is joined with "
                f"--initial-peers {others[0].addresses[0]}"
            )


def names_no_swarm(settings: JoinSettings) -> bool:
    """Whether the owner has said nothing of where to join, and swarms of the local network may be suggested."""
    return (
        not settings.initial_peers
        and not settings.options.new_swarm
        and settings.options.local_network == "on"
    )


def ask_where_to_join(settings: JoinSettings) -> dict[str, Any]:
    """What the owner at the terminal says of the swarms of the local network, as options that the command line gives:
    nothing if there are none, or if nobody is at the terminal."""
    if not sys.stdin.isatty():
        return {}
    found = run_loop(_swarms(settings))
    if not found:
        return {}
    if typer.confirm(
        f"No swarm is configured; on the local network there is {_described(found)}. Join?",
        default=True,
        err=True,
    ):
        return {"initial_peers": tuple(address for peer in found for address in peer.addresses)}
    return {"new_swarm": True}


async def _end(search: "asyncio.Task[None]") -> None:
    search.cancel()
    await asyncio.gather(search, return_exceptions=True)


async def _swarms(settings: JoinSettings) -> list[NearbyPeer]:
    """Peers whose swarm is as private as this peer: others would refuse it, or be refused."""
    private = settings.options.swarm_key is not None
    return [peer for peer in await find_local_peers() if peer.private == private]


def _described(found: Sequence[NearbyPeer]) -> str:
    """Where they are: hosts that were checked, so that a terminal may show them."""
    hosts = list(dict.fromkeys(PeerAddress.parse(peer.addresses[0]).host for peer in found))
    return f"a peer at {', '.join(hosts)}"
