"""Control planes that lie: records that honest software would not sign, links that say nothing, tables of the dead."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import trio
from support.swarms.swarm_examples import MODEL, QUICK, facts_of, state_of

from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.host.bridge import TrioThread
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import StreamEndedError
from molink.dht.host.host import DialError, open_host
from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.node.joining import Fallback
from molink.dht.node.network import Network
from molink.dht.records.announcement import sign_state
from molink.dht.records.facts_codec import facts_to_message
from molink.dht.records.records import ServedModel

DOMAIN, FACTS = b"molink-announcement-1\0", b"\xf1"
"""As docs/PROTOCOL.md has them: `sign_facts` would refuse what these sign."""

PATIENCE_S = 120.0
PATIENT = Fallback(wait_s=PATIENCE_S)
"""On a busy machine the first attempt to join may take longer than it has."""


def now_ms() -> int:
    return int(1000 * time.time())


def records_with_addresses(
    identity: Identity, addresses: Sequence[str], model: ServedModel = MODEL
) -> tuple[bytes, bytes]:
    """Facts and state of a peer that says it is at `addresses`, whatever these are."""
    sequence = now_ms()
    message = facts_to_message(replace(facts_of(identity, sequence=sequence), model=model, span_limit=None))
    message.addresses[:] = addresses
    body = message.SerializeToString(deterministic=True)
    facts = FACTS + identity.sign(DOMAIN + FACTS + body) + body
    return facts, sign_state(state_of(identity, sequence=sequence + 1, facts_sequence=sequence), identity)


async def tell(liar: Discovery, *records: bytes) -> None:
    """Pushes records over every link of the liar's."""

    async def push(network: Network) -> None:
        for record in records:
            network.gossip.broadcast(record)

    await liar.in_network(push, timeout_s=PATIENCE_S)


async def set_wall_clock(plane: Discovery, clock: Callable[[], float]) -> None:
    """Has the peer's machine show another time."""

    async def set_it(network: Network) -> None:
        network.publisher.wall_clock = clock

    await plane.in_network(set_it)


@contextlib.asynccontextmanager
async def honest(
    *initial: str, identity: Identity | None = None, model: ServedModel = MODEL, **options: object
) -> AsyncIterator[Discovery]:
    """A peer that has announced itself."""
    identity = identity or Identity.generate()
    facts = replace(facts_of(identity), addresses=(), model=model, span_limit=None)
    async with Discovery(
        identity,
        initial_peers=initial,
        timing=QUICK,
        fallback=PATIENT,
        **options,  # type: ignore[arg-type]
    ) as discovery:
        await discovery.announce(facts, state_of(identity))
        yield discovery


class HeldLinks:
    """Links of free identities, dialled again whenever one ends, and how many have been tried once."""

    def __init__(self, addresses: Sequence[str], count: int, held: trio.Event) -> None:
        self._addresses = [address for address in addresses for _ in range(count)]
        self._tried = 0
        self._held = held
        """Is set when each has been tried."""

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            for address in self._addresses:
                nursery.start_soon(self._hold, address)

    async def _hold(self, address: str) -> None:
        tried = trio.Event()
        async with open_host(Identity.generate(), None, None) as host:
            while True:
                try:
                    peer_id = await host.dial(address, timeout_s=PATIENCE_S)
                    link = CompressedStream(await host.open_stream(peer_id, GOSSIP, timeout_s=PATIENCE_S))
                    while True:
                        await link.send([b""])
                        self._note(tried)
                        await trio.sleep(0.2)
                except (DialError, StreamEndedError):
                    self._note(tried)
                    await trio.sleep(0.1)

    def _note(self, tried: trio.Event) -> None:
        """A link has been tried, for the first time or again."""
        if not tried.is_set():
            tried.set()
            self._tried += 1
        if self._tried == len(self._addresses):
            self._held.set()


@contextlib.asynccontextmanager
async def links_held(addresses: Sequence[str], count: int) -> AsyncIterator[None]:
    """The same in a thread of its own, while the block runs; each link has been tried once when it begins."""

    @contextlib.asynccontextmanager
    async def attack() -> AsyncIterator[None]:
        held = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(HeldLinks(addresses, count, held).run)
            with trio.fail_after(PATIENCE_S):
                await held.wait()
            yield
            nursery.cancel_scope.cancel()

    async with TrioThread(attack, name="attacker"):
        yield
