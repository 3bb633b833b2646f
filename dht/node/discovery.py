"""Discovery: the asyncio side of the control plane, for peers and clients."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from molink.dht.errors import BootstrapUnreachable, PortInUse
from molink.dht.gossip.sequences import DurableState
from molink.dht.host.bridge import ThreadStoppedError, TrioThread, ask_asyncio
from molink.dht.host.host import Listen, peer_id_in
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.membership.membership import Membership
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.node.joining import NO_FALLBACK, Fallback, NetworkSettings
from molink.dht.node.network import Network, open_network
from molink.dht.records.records import PeerFacts, PeerState, PeerView

__all__ = ["BootstrapUnreachable", "Discovery", "DiscoveryStats", "DiscoveryTiming", "PortInUse"]

LOOPBACK = Listen("127.0.0.1", 0)
_CALL_TIMEOUT_S = 5.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class DiscoveryStats:
    """Counts since the start. Bytes are those of frames, without what yamux, noise and TCP add."""

    messages_in: Mapping[str, int]
    """By kind: `gossip` (announcements and keepalives), `table` (pulls)."""
    messages_out: Mapping[str, int]
    bytes_in: Mapping[str, int]
    bytes_out: Mapping[str, int]
    refusals: Mapping[str, int]
    """Records not taken in, by reason. `stale` is what a flood's second copies are."""
    connections: int
    neighbours: int
    """Peers that announcements are exchanged with."""


class Discovery:
    """The verified, living peers of a swarm, and this peer's own word to them.

    `async with Discovery(...)` starts a thread of its own for the network and ends it. A peer that goes
    should `leave()` first: the end of the block says nothing, and others wait until its state expires.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: Listen | None = LOOPBACK,
        initial_peers: Sequence[str] = (),
        swarm_key: SwarmKey | None = None,
        timing: DiscoveryTiming | None = None,
        durable: DurableState | None = None,
        fallback: Fallback = NO_FALLBACK,
    ) -> None:
        """`listen` None: a client, which listens on no port, pulls tables and announces nothing.

        `durable`: where sequence numbers and acquaintances outlive this process. `fallback`: if no initial peer
        answers.

        Raises:
            ValueError: one of `initial_peers` is not a multiaddress that ends in /p2p/PEER_ID.
        """
        for address in initial_peers:
            peer_id_in(address)
        self.identity = identity
        self._timing = timing or DiscoveryTiming()
        self._serves = listen is not None
        own_peer_id = identity.peer_id if self._serves else None
        self.membership = Membership(own_peer_id, self._on_change, refute_s=self._timing.refute_s)
        """The verified records: quick to ask, from any thread."""
        settings = NetworkSettings(
            identity=identity,
            listen=listen,
            initial_peers=tuple(initial_peers),
            swarm_key=swarm_key,
            timing=self._timing,
            durable=durable if self._serves else None,
            fallback=fallback,
            over_relays=self._answers_over_relays,
        )
        self._thread: TrioThread[Network] = TrioThread(
            lambda: open_network(settings, self.membership), name="molink-discovery"
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes = asyncio.Event()
        self._seen = 0
        self.over_relays: Callable[[PeerFacts], Coroutine[object, object, bool]] | None = None
        """Asked on the event loop whether a peer answers over the relays that it announces, before it is called gone;
        None: nobody can ask."""

    async def __aenter__(self) -> "Discovery":
        """Raises:
        PortInUse: the port to listen on is taken.
        BootstrapUnreachable: initial peers are given and none has answered; names each and why.
        """
        self._loop = asyncio.get_running_loop()
        await self._thread.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._thread.__aexit__(kind, error, traceback)
        self._loop = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses with /p2p/PEER_ID at which others reach this peer; empty for a client."""
        return self._thread.service.host.addresses

    @property
    def port(self) -> int:
        """Where this peer listens; 0 for a client."""
        return self._thread.service.host.port

    async def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        """Announces what this peer is from now on: at once where it differs from before, and again and again.

        Changes go out in bursts of up to four, then at a rate that the swarm's size allows. Identity,
        sequence numbers, times to live and, where there are none, addresses are filled in here. `facts` are
        needed the first time and when they change.

        Raises:
            AnnouncementError: a value is out of the bounds that others check.
            ValueError: the first call has no facts, or this is a client.
            ThreadStoppedError: the network has stopped.
        """
        if not self._serves:
            raise ValueError("a client announces nothing")

        async def announce(network: Network) -> None:
            network.publisher.announce(facts, state)

        await self.in_network(announce)

    async def leave(self) -> None:
        """Tells everybody that this peer is gone, within about two seconds or not at all. Final."""

        async def leave(network: Network) -> None:
            await network.publisher.leave()
            await network.maintenance.remember()

        try:
            await self.in_network(leave, self._timing.leave_timeout_s)
        except (TimeoutError, ThreadStoppedError):
            return

    async def refresh(self) -> None:
        """Pulls what is new from two or three living peers; does nothing where nobody else is known.

        Raises:
            BootstrapUnreachable: there are others, and none of those asked has answered.
            ThreadStoppedError: the network has stopped.
        """
        await self.in_network(
            lambda network: network.maintenance.refresh(), 2 * self._timing.bootstrap_timeout_s
        )

    async def connections(self) -> int:
        """Connections of the control plane that are open now: where one goes, a neighbour may have left.

        Raises:
            TimeoutError: the network is too busy to say.
            ThreadStoppedError: the network has stopped.
        """

        async def count(network: Network) -> int:
            return network.host.connections

        return await self.in_network(count)

    async def in_network(
        self, work: Callable[[Network], Awaitable[Answer]], timeout_s: float = _CALL_TIMEOUT_S
    ) -> Answer:
        """Runs `work` (in trio) in the network's thread and returns what it does.

        Raises:
            TimeoutError: it takes longer than `timeout_s`.
            ThreadStoppedError: the network has stopped.
        """
        return await self._thread.call(lambda: work(self._thread.service), timeout_s=timeout_s)

    def snapshot(
        self, model_hash: str | None = None, *, other_versions: bool = False, silent: bool = False
    ) -> tuple[PeerView, ...]:
        """The peers that are verified and alive now, this one included once it has announced itself.

        `model_hash`: only those that serve it. `other_versions`: also those of another protocol version, `silent`: also
        those whose link to this peer broke and that it cannot reach any more, to be shown to people
        (`facts.protocol_version`, `answers` tell them apart) and never to be used.
        """
        self._seen = self.membership.version
        return self.membership.snapshot(model_hash, other_versions=other_versions, silent=silent)

    def knows(self, peer_id: str) -> bool:
        """Whether that peer has announced itself to the swarm, and is not forgotten. Quick."""
        return self.membership.knows(peer_id)

    def facts_of(self, peer_id: str) -> PeerFacts | None:
        """The newest verified facts of a living peer; None: it is not known."""
        return self.membership.facts_of(peer_id)

    @property
    def version(self) -> int:
        """Grows whenever a snapshot could have changed: to be given to `changed`, where several wait."""
        return self.membership.version

    async def changed(self, timeout_s: float, *, since: int | None = None) -> bool:
        """Waits until the view is another one than that of the last snapshot, or of version `since`.

        False: it is still the same after `timeout_s`.
        """
        seen = self._seen if since is None else since
        try:
            async with asyncio.timeout(timeout_s):
                while self.membership.version == seen:
                    self._changes.clear()
                    if self.membership.version != seen:
                        break
                    await self._changes.wait()
        except TimeoutError:
            return False
        return True

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the network, if one has."""
        return self._thread.failure

    @property
    def stats(self) -> DiscoveryStats:
        """Counts for metrics."""
        network = self._thread.service
        traffic = network.traffic
        return DiscoveryStats(
            messages_in=dict(traffic.messages_in),
            messages_out=dict(traffic.messages_out),
            bytes_in=dict(traffic.bytes_in),
            bytes_out=dict(traffic.bytes_out),
            refusals={str(reason): count for reason, count in self.membership.refusals.items()},
            connections=network.host.connections,
            neighbours=len(network.gossip.neighbours),
        )

    async def _answers_over_relays(self, facts: PeerFacts) -> bool:
        """In trio."""
        if self._loop is None or self.over_relays is None:
            return False
        return bool(await ask_asyncio(self._loop, self.over_relays(facts), timeout_s=_CALL_TIMEOUT_S))

    def _on_change(self) -> None:
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._changes.set)
            except RuntimeError:  # the loop is closing: nobody waits any more
                return
