"""A client's connection to a swarm: the verified view of it, links to peers, and who gets which frame."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Protocol, Self

from molink.client.errors import SwarmUnavailable
from molink.dht.discovery import BootstrapUnreachable, Discovery
from molink.dht.identity import Identity
from molink.dht.records import PeerView
from molink.dht.swarm_key import SwarmKey
from molink.peer.link.link import Link
from molink.peer.link.links import Links
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import Frame, ProtocolError

REFRESH_EVERY_S = 10.0


class FrameSink(Protocol):
    """A session that frames are for. It knows which peers may send it what, and ignores the others: a peer of a
    circuit that the session has left may be late without being at fault."""

    def on_tokens(self, sender: str, token: pb.Token) -> None: ...

    def on_failed(self, sender: str, failed: pb.Failed) -> None: ...

    def on_link_closed(self, peer_id: str, reason: str) -> None: ...


class SwarmView(Protocol):
    """Who is in the swarm, as Discovery finds out. Open between `__aenter__` and `__aexit__`."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]: ...

    async def refresh(self) -> None: ...

    async def changed(self, timeout_s: float) -> bool: ...


class Connection:
    """Open between `__aenter__` and `__aexit__`. It is also the LinkHandler of its links."""

    def __init__(
        self,
        initial_peers: Sequence[str],
        swarm_key: SwarmKey | None,
        http_proxy: str | None = None,
        *,
        view: SwarmView | None = None,
    ) -> None:
        """`view` takes the place of what is found out from `initial_peers`."""
        identity = Identity.generate()
        self.links = Links(identity, self, swarm_key, is_client=True, http_proxy=http_proxy)
        self._discovery: SwarmView = (
            view
            if view is not None
            else Discovery(identity, initial_peers=initial_peers, swarm_key=swarm_key, serves=False)
        )
        self._sinks: dict[bytes, FrameSink] = {}
        self._stack = AsyncExitStack()
        self._refreshing: asyncio.Task[None] | None = None
        self._refresh_wanted = asyncio.Event()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._discovery)
            except BootstrapUnreachable as error:
                raise SwarmUnavailable(str(error)) from error
            await stack.enter_async_context(self.links)
            await self._discovery.refresh()
            self._refreshing = asyncio.create_task(self._keep_fresh(), name="refresh the view")
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)
        await self._stack.aclose()

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]:
        """The peers that are verified and alive now."""
        return self._discovery.snapshot(model_hash)

    def measured_rtt_ms(self) -> Mapping[tuple[str, str], float]:
        """Round trips between peers that this client has measured itself: none, it is on no hop's path."""
        return {}

    async def refresh_soon(self, wait_s: float) -> None:
        """Pulls the peers' tables now, and waits `wait_s` at most for the view to change."""
        self._refresh_wanted.set()
        await self._discovery.changed(wait_s)

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
        else:
            raise ProtocolError(f"{link.peer_id} sent a client a {type(header).__name__}")

    async def on_request(self, _: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
        return pb.Response(refusal=pb.Refusal(code="request", detail="a client answers no requests")), b""

    def on_closed(self, link: Link, reason: str) -> None:
        for sink in tuple(self._sinks.values()):
            sink.on_link_closed(link.peer_id, reason)

    async def _keep_fresh(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REFRESH_EVERY_S):
                    await self._refresh_wanted.wait()
            except TimeoutError:
                pass
            self._refresh_wanted.clear()
            with suppress(BootstrapUnreachable, TimeoutError):  # somebody may answer the next time
                await self._discovery.refresh()
