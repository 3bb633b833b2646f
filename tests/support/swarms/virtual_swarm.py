"""Control planes of many peers in virtual time: the product's own network, over hosts that are joined in memory.

What is not there is libp2p: a connection stands after a moment, unless who is dialled cannot be; streams carry what is
written after `DELAY_S`, and count it with what yamux, noise and TCP would add.
"""

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import trio
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.host.framing import FrameStream
from molink.dht.host.host import DialError, Listen, StreamHandler
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.membership.send_pace import CONNECTION_BYTES, WIRE_BYTES
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.node.joining import NetworkSettings
from molink.dht.node.network import Network, open_network
from molink.dht.records.records import PeerFacts, PeerState, RelayAt
from molink.peer.wire.link.certificate import new_certificate

DELAY_S = 0.03
CONNECTING_S = 0.15
EPOCH_S = 1.7e9


class Direction:
    """One direction of a stream: what is written arrives after DELAY_S."""

    def __init__(self) -> None:
        self.entry, self._exit = trio.open_memory_channel[tuple[float, bytes]](math.inf)

    def put(self, data: bytes, after_s: float = DELAY_S) -> None:
        self.entry.send_nowait((trio.current_time() + after_s, data))

    async def take(self) -> bytes:
        at_s, data = await self._exit.receive()
        await trio.sleep_until(at_s)
        return data


class MemoryStream:
    """One end of a stream; `ended` is set for both when either resets it."""

    def __init__(
        self, inward: Direction, outward: Direction, ended: trio.Event, sent: Callable[[int], None]
    ) -> None:
        self._inward, self._outward = inward, outward
        self._ended = ended
        self._sent = sent

    async def read(self, _: int | None = None) -> bytes:
        self._require_open()
        return await self._inward.take()

    async def write(self, data: bytes) -> None:
        self._require_open()
        await trio.lowlevel.checkpoint()
        self._sent(len(data) + WIRE_BYTES)
        self._outward.put(data)

    async def close(self) -> None:
        self._outward.put(b"")

    async def reset(self) -> None:
        self.break_off()

    def break_off(self) -> None:
        """Both ends are told."""
        if not self._ended.is_set():
            self._ended.set()
            for direction in (self._inward, self._outward):
                direction.put(b"", after_s=0.0)

    def _require_open(self) -> None:
        if self._ended.is_set():
            raise ConnectionError("the stream was reset")


def stream_pair(
    one: Callable[[int], None], other: Callable[[int], None]
) -> tuple[MemoryStream, MemoryStream]:
    """Both ends of a stream; each counts what it sends."""
    there, back, ended = Direction(), Direction(), trio.Event()
    return MemoryStream(back, there, ended, one), MemoryStream(there, back, ended, other)


class VirtualHost:
    """What the control plane uses of a libp2p host."""

    def __init__(self, swarm: "VirtualSwarm", identity: Identity, ip: str, nursery: trio.Nursery) -> None:
        self.peer_id = identity.peer_id
        self.ip = ip
        self.port = 4001
        self.addresses = (f"/ip4/{ip}/tcp/4001/p2p/{self.peer_id}",)
        self.nursery = nursery
        self.handlers: dict[str, StreamHandler] = {}
        self.connected: dict[str, list[MemoryStream]] = {}
        """By peer, the streams to it."""
        self.opened_at: dict[str, float] = {}
        """By peer, when the latest connection to it was opened."""
        self._swarm = swarm

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        self.handlers[protocol] = handler

    async def dial(self, address: str, *, timeout_s: float) -> str:  # noqa: ARG002 - nothing takes long
        peer_id = address.rpartition("/")[2]
        await trio.sleep(CONNECTING_S)
        other = self._swarm.hosts.get(peer_id)
        if other is None or peer_id not in self._swarm.dialable:
            raise DialError("nobody answers there")
        for end, far in ((self, other), (other, self)):
            self._swarm.sent(end.peer_id, CONNECTION_BYTES)
            end.opened_at[far.peer_id] = trio.current_time()
        self.connected.setdefault(peer_id, [])
        other.connected.setdefault(self.peer_id, [])
        return peer_id

    async def open_stream(self, peer_id: str, protocol: str, *, timeout_s: float) -> FrameStream:  # noqa: ARG002
        await trio.sleep(2 * DELAY_S)
        other = self._swarm.hosts.get(peer_id)
        if other is None or peer_id not in self.connected:
            raise DialError(f"not connected to {peer_id}")
        near, far = stream_pair(self._swarm.counter(self.peer_id), self._swarm.counter(peer_id))
        self.connected[peer_id].append(near)
        other.connected.setdefault(self.peer_id, []).append(far)
        other.nursery.start_soon(other.serve, protocol, FrameStream(far, self.peer_id))
        return FrameStream(near, peer_id)

    async def serve(self, protocol: str, stream: FrameStream) -> None:
        """Whatever the handler raises ends its stream only."""
        try:
            await self.handlers[protocol](stream)
        except Exception:  # noqa: BLE001 - as libp2p has it
            await stream.reset()

    def is_connected(self, peer_id: str) -> bool:
        return peer_id in self.connected

    def host_of(self, peer_id: str) -> str:
        return self._swarm.hosts[peer_id].ip if peer_id in self._swarm.hosts else ""

    @property
    def connections(self) -> int:
        return len(self.connected)

    async def hang_up(self, peer_id: str, *, opened_by: float = math.inf) -> None:
        if self.opened_at.get(peer_id, -math.inf) <= opened_by:
            self.part(peer_id)

    def part(self, peer_id: str) -> None:
        """The connection to a peer breaks, and all its streams."""
        for stream in self.connected.pop(peer_id, []):
            stream.break_off()
        other = self._swarm.hosts.get(peer_id)
        if other is not None:
            other.connected.pop(self.peer_id, None)


@dataclass(eq=False)
class VirtualPeer:
    """A peer of the swarm, from when it began."""

    identity: Identity
    membership: Membership
    since_s: float
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    network: Network | None = None

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    def sees(self) -> set[str]:
        return {view.peer_id for view in self.membership.snapshot()}

    def announce(self, state: PeerState) -> None:
        """Has something new to say."""
        if self.network is not None:
            self.network.publisher.announce(None, state)

    async def leave(self) -> None:
        """Tells its neighbours that it goes."""
        if self.network is not None:
            await self.network.publisher.leave()
            await trio.sleep(2 * DELAY_S)  # a process that ends has its sockets send what they hold


class VirtualSwarm:
    """All peers. To be used in trio under a MockClock; `opens` stands in for the product's `open_host`."""

    def __init__(self, timing: DiscoveryTiming | None = None) -> None:
        self.hosts: dict[str, VirtualHost] = {}
        self.dialable: set[str] = set()
        self.peers: dict[str, VirtualPeer] = {}
        self.minutes: dict[str, Counter[int]] = {}
        """Bytes that each peer has sent, by minute."""
        self._timing = timing or DiscoveryTiming()
        self._numbers = itertools.count(1)

    def sent(self, peer_id: str, count: int) -> None:
        self.minutes.setdefault(peer_id, Counter())[int(trio.current_time() // 60)] += count

    def counter(self, peer_id: str) -> Callable[[int], None]:
        return lambda count: self.sent(peer_id, count)

    @asynccontextmanager
    async def opens(self, identity: Identity, *_: object) -> AsyncIterator[VirtualHost]:
        number = next(self._numbers)
        async with trio.open_nursery() as nursery:
            host = VirtualHost(self, identity, f"20.{number // 250}.{number % 250}.1", nursery)
            self.hosts[host.peer_id] = host
            try:
                yield host
            finally:
                for peer_id in tuple(host.connected):
                    host.part(peer_id)
                del self.hosts[host.peer_id]
                nursery.cancel_scope.cancel()

    def addresses(self) -> tuple[str, ...]:
        """Of those that can be dialled and are there."""
        return tuple(self.hosts[one].addresses[0] for one in sorted(self.dialable & self.hosts.keys()))

    async def live(self, *, dialable: bool, task_status: trio.TaskStatus[VirtualPeer]) -> None:
        """A peer begins, and lives until its scope is cancelled: then it is gone without a word."""
        identity = Identity.generate()
        membership = Membership(
            identity.peer_id, lambda: None, clock=trio.current_time, wall_clock=wall_clock
        )
        peer = VirtualPeer(identity, membership, trio.current_time())
        initial = self.addresses()[:3]
        if dialable:
            self.dialable.add(peer.peer_id)
        settings = NetworkSettings(
            identity, Listen("127.0.0.1", 0), initial, None, self._timing, over_relays=self._answers
        )
        with peer.scope:
            async with open_network(settings, membership) as network:
                network.publisher.wall_clock = wall_clock
                peer.network = network
                network.publisher.announce(self._facts(identity, dialable=dialable), state_of(identity))
                self.peers[peer.peer_id] = peer
                task_status.started(peer)
                await trio.sleep_forever()
        self.peers.pop(peer.peer_id, None)
        self.dialable.discard(peer.peer_id)

    def _facts(self, identity: Identity, *, dialable: bool) -> PeerFacts:
        facts = replace(facts_of(identity), addresses=(), certificate=new_certificate(identity.peer_id).der)
        if dialable:
            return replace(facts, relay_address="192.0.2.7:4003")
        relays = tuple(
            RelayAt(one, f"{self.hosts[one].ip}:4003") for one in sorted(self.dialable & self.hosts.keys())
        )
        return replace(facts, grpc_addresses=(), relays=relays[:3])

    async def _answers(self, facts: PeerFacts) -> bool:
        """Over its relays, whether a peer is there."""
        await trio.sleep(4 * DELAY_S)
        return facts.peer_id in self.hosts

    def kbit_s(self, peer_id: str, minute: int) -> float:
        return self.minutes.get(peer_id, Counter())[minute] * 8 / 60 / 1000


def wall_clock() -> float:
    return EPOCH_S + trio.current_time()


async def at_once(work: Callable[..., object], *args: object, **_: object) -> object:
    """In the place of a thread: the clock would run on while one works."""
    await trio.lowlevel.checkpoint()
    return work(*args)
