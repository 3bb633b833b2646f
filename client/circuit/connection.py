"""A client's connection to a swarm: the verified view of it, links to peers, and who gets which frame.

The view is pulled from peers now and then, and at once when one of the connections over which it came is gone: that is
how a client hears a goodbye. If then nobody answers at all, and no link is open to anybody in it, all are gone.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Protocol, Self

from molink.client.circuit.scouting import ReachabilityProbes
from molink.client.errors import SwarmUnavailable
from molink.dht.host.bridge import ThreadStoppedError
from molink.dht.host.host import peer_id_in
from molink.dht.identity.dialable import ANYWHERE, Ranges, swarm_ranges
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.node.discovery import BootstrapUnreachable, Discovery
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError

REFRESH_EVERY_S = 10.0
LOOK_EVERY_S = 1.0
"""Between looks at whether a connection of the control plane is gone."""
FIRST_REFRESH_S = 3.0
"""What a second opinion may take while a client opens: the view is there already, from the first peer that answered."""


class FrameSink(Protocol):
    """A session that frames are for. It knows which peers may send it what, and ignores the others: a peer of a
    circuit that the session has left may be late without being at fault."""

    def on_tokens(self, sender: str, token: pb.Token) -> None: ...

    def on_failed(self, sender: str, failed: pb.Failed) -> None: ...

    def on_leaving(self, sender: str, leaving: pb.Leaving) -> None: ...

    def on_link_closed(self, peer_id: str, reason: str) -> None: ...


class SwarmView(Protocol):
    """View of the swarm's members, as Discovery finds them. Open between `__aenter__` and `__aexit__`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]: ...

    async def refresh(self) -> None: ...

    async def changed(self, timeout_s: float) -> bool: ...

    async def connections(self) -> int: ...


class SwarmConnection:
    """Open between `__aenter__` and `__aexit__`. It is also the LinkHandler of its links."""

    def __init__(
        self,
        initial_peers: Sequence[str],
        swarm_key: SwarmKey | None,
        http_proxy: str | None = None,
        *,
        view: SwarmView | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`view` takes the place of what is found out from `initial_peers`. `identity` is who this client is to peers,
        and no other process at the same time; None: somebody new."""
        identity = identity or Identity.generate()
        self.prefix_key = identity.derived_key(b"names of prompts' beginnings")
        """32 bytes, with which this client names the blocks of its prompts: peers tell from the names which of its
        prompts begin alike, as they do from activations, and cannot try whether a text that they guess is one of
        them."""
        self.links = Links(
            identity,
            self,
            swarm_key,
            is_client=True,
            http_proxy=http_proxy,
        )
        self.links.newest_facts = self._newest_facts
        self.links.dialler.is_member = lambda peer_id: self._newest_facts(peer_id) is not None
        self.probes = ReachabilityProbes(self.links)
        self.initial_peers = tuple(initial_peers)
        self.initial_peer_ids = frozenset(map(peer_id_in, initial_peers))
        """Those whom the user named."""
        self._discovery: SwarmView = (
            view
            if view is not None
            else Discovery(identity, initial_peers=initial_peers, swarm_key=swarm_key, listen=None)
        )
        self._sinks: dict[bytes, FrameSink] = {}
        self._stack = AsyncExitStack()
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = asyncio.Event()
        self._refreshed = asyncio.Event()
        self._unanswered = False
        """Whether at the last pull nobody answered."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._discovery)
            except BootstrapUnreachable as error:
                raise SwarmUnavailable(str(error)) from error
            await stack.enter_async_context(self.links)
            await stack.enter_async_context(self.probes)
            self.links.dial_in(await self._swarm_ranges())
            stack.push_async_callback(self._stop_refreshing)
            self._refresh_wanted.set()
            self._refreshing = asyncio.create_task(self._keep_fresh(), name="refresh the view")
            if self._others_to_ask():
                with suppress(TimeoutError):
                    async with asyncio.timeout(FIRST_REFRESH_S):
                        await self._refreshed.wait()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _others_to_ask(self) -> bool:
        """Returns whether there is a second opinion: somebody beside the one peer that has answered."""
        return len(self.initial_peer_ids) != 1 or any(
            view.peer_id not in self.initial_peer_ids for view in self.snapshot()
        )

    async def _stop_refreshing(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]:
        """The peers that are verified and alive now."""
        views = self._discovery.snapshot(model_hash)
        # while somebody of it can be talked to the swarm is there, and a late pull says nothing of who has no link yet:
        # who is asked for tables may be busy, and who has just come back is the one to take a lost peer's place
        if self._unanswered and not any(self.links.find(view.peer_id) for view in self._discovery.snapshot()):
            return ()
        return views

    def _newest_facts(self, peer_id: str) -> PeerFacts | None:
        views = self._discovery.snapshot()
        return next((view.facts for view in views if view.peer_id == peer_id), None)

    def measured_rtt_ms(self) -> Mapping[tuple[str, str], float]:
        """Round trips between peers that this client has measured itself: none, it is on no hop's path."""
        return {}

    async def refresh_soon(self, wait_s: float) -> None:
        """Pulls the peers' tables now, and waits `wait_s` at most for the view to change."""
        self.refresh_now()
        await self._discovery.changed(wait_s)

    def refresh_now(self) -> None:
        """Pulls the peers' tables, while the caller does something else."""
        self._refresh_wanted.set()

    @property
    def sinks(self) -> tuple[FrameSink, ...]:
        """The sessions that frames are for now."""
        return tuple(self._sinks.values())

    def register(self, session: bytes, sink: FrameSink) -> None:
        self._sinks[session] = sink

    def unregister(self, session: bytes) -> None:
        self._sinks.pop(session, None)

    def on_frame(self, link: Link, frame: Frame) -> None:
        header = frame.header
        if isinstance(header, pb.Tokens):
            for token in header.tokens:
                sink = self._sinks.get(token.session)
                if sink is not None:
                    sink.on_tokens(link.peer_id, token)
        elif isinstance(header, pb.Failed):
            sink = self._sinks.get(header.session)
            if sink is not None:
                sink.on_failed(link.peer_id, header)
        elif isinstance(header, pb.Leaving):
            sink = self._sinks.get(header.session)
            if sink is not None:
                sink.on_leaving(link.peer_id, header)
        else:
            raise ProtocolError(f"{link.peer_id} sent a client a {type(header).__name__}")

    async def on_request(self, _: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
        return pb.Response(refusal=pb.Refusal(code="request", detail="a client answers no requests")), b""

    def on_closed(self, link: Link, reason: str) -> None:
        for sink in tuple(self._sinks.values()):
            sink.on_link_closed(link.peer_id, reason)

    async def _swarm_ranges(self) -> Ranges:
        """Returns the networks that the swarm is in: where the user said that it is, and where the peers are that he
        named."""
        if not self.initial_peers:
            return ANYWHERE
        named = [view.facts for view in self.snapshot() if view.peer_id in self.initial_peer_ids]
        announced = [address for facts in named for address in facts.grpc_addresses]
        return await swarm_ranges((*self.initial_peers, *announced))

    async def _keep_fresh(self) -> None:
        while True:
            try:
                await self._until_refresh_is_due()
                self._refresh_wanted.clear()
                await self._discovery.refresh()
                self._unanswered = False
            except BootstrapUnreachable:
                self._unanswered = True  # until somebody answers the next time
            except (TimeoutError, ThreadStoppedError):
                await asyncio.sleep(LOOK_EVERY_S)  # whom it asked may only be slow
            self._refreshed.set()

    async def _until_refresh_is_due(self) -> None:
        """Until it is wanted, was long ago, or a connection over which the view came is gone."""
        clock = asyncio.get_running_loop().time
        due_s, connections = clock() + REFRESH_EVERY_S, 0
        while clock() < due_s and not self._refresh_wanted.is_set():
            open_now = await self._discovery.connections()
            if open_now < connections:
                return
            connections = open_now
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._refresh_wanted.wait()
