"""Ends of links that nobody can dial, and relays that they stay at."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Self

from support.links.data_plane import End, until

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.reach.moving import HolePuncher, PunchingHandler
from molink.peer.reach.relay import Relay
from molink.peer.reach.relay_limits import RelayLimits
from molink.peer.reach.stays import Stays
from molink.peer.wire.reach.relay_client import RelayUser


class RelayedEnd:
    """A peer's data plane on loopback that announces no address, but the relays at which it stays."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.end = End(host=host)
        self.punching = PunchingHandler(self.end.handler)
        self.end.links.handler = self.punching
        self.relays: dict[str, RelayAt] = {}
        """What it knows of others' relays."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.end)
        port = int(self.end.facts.grpc_addresses[0].rpartition(":")[2])
        user = RelayUser(self.end.identity, None)
        self.port = port
        self.stays = await self._stack.enter_async_context(Stays(user, ("127.0.0.1", port), self.relays.get))
        return self

    async def punch(self, *observers: RelayAt) -> None:
        """From now on its relayed links move to holes, and those of others that ask for it."""
        user = RelayUser(self.end.identity, None)
        puncher = HolePuncher(self.end.links, user, self.stays, lambda: observers)
        self.punching.puncher = await self._stack.enter_async_context(puncher)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def stay(self, *relays: RelayAt) -> PeerFacts:
        """Its facts, once it stays at these."""
        self.stays.keep(relays)
        await until(lambda: self.stays.relays == relays)
        return replace(self.end.facts, grpc_addresses=(), relays=relays)


class RelayEnd:
    """A relay on loopback."""

    def __init__(self, limits: RelayLimits | None = None) -> None:
        self.identity = Identity.generate()
        self.relay = Relay("127.0.0.1", 0, self.identity, None, limits)

    @property
    def at(self) -> RelayAt:
        return RelayAt(self.identity.peer_id, f"127.0.0.1:{self.relay.port}")

    async def __aenter__(self) -> Self:
        await self.relay.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.relay.__aexit__(None, None, None)
