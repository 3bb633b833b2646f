"""Every attack of this folder in rounds, to be let loose on one swarm one by one or all at once."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import grpc.aio
import trio
from attack.control_plane.test_being_heard import UNDIALLABLE
from attack.control_plane.test_control_plane_floods import Strangers, crowds
from attack.links.test_forged_acknowledgements import LIES, forge
from attack.links.test_leases_held import flood
from attack.links.test_poisoned_batches import poison
from attack.links.test_tarpits import SPANS, tarpits
from support.attackers.connection_attack import careless_tls, grpc_port, silence
from support.attackers.liars import announced, claim, view_of
from support.attackers.lying_planes import honest as lying_plane
from support.attackers.lying_planes import links_held, records_with_addresses, tell
from support.attackers.memory_attack import LyingLink
from support.attackers.strangers import proven_link
from support.links.packet_examples import tampered
from support.links.raw_links import facts_of
from support.swarms.live_swarms import bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.errors import BootstrapUnreachable
from molink.dht.identity.identity import Identity
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.checkpoint import store

MOST_AT_ONCE_S = 20.0
"""What one round of an attack takes at most; then it begins again."""

REFUSED = (
    OSError,
    TimeoutError,
    grpc.aio.AioRpcError,
    asyncio.InvalidStateError,
    BootstrapUnreachable,
    ExceptionGroup,
)


class Attacks:
    """What strangers do to one swarm, each attack in rounds until all are told to end."""

    def __init__(self, swarm: LocalSwarm, client: AsyncSwarm) -> None:
        self.rounds: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        """Rounds that ended before their time."""
        self._swarm = swarm
        self._client = client
        self._facts = facts_of(client, "front")
        self._chance = random.Random(1)

    @property
    def each(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """One round of each."""
        return (
            self.silence_in_every_stage,
            self.idle_links,
            self.unfinished_messages,
            self.files_unacknowledged,
            self.damaged_packets,
            self.poisoned_steps,
            self.reservations,
            self.forged_acknowledgements,
            self.addresses_that_nobody_can_dial,
            self.all_links_taken,
            self.crowds_at_the_door,
            self.sybils_at_tarpits,
        )

    async def all_at_once(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for attack in self.each:
                group.create_task(self.again_and_again(attack), name=attack.__name__)

    async def again_and_again(self, attack: Callable[[], Awaitable[None]]) -> None:
        """One of them until cancelled."""
        while True:
            try:
                async with asyncio.timeout(2 * MOST_AT_ONCE_S):
                    await attack()
                self.rounds[attack.__name__] += 1
            except REFUSED as error:  # a stranger that is refused or cut off comes back
                self.rounds[attack.__name__] += 1
                self.refused[attack.__name__, type(error).__name__] += 1
            await asyncio.sleep(0.5)

    async def silence_in_every_stage(self) -> None:
        port = grpc_port(self._facts)
        async with silence(port, 300), silence(port, 100, tls=careless_tls()):
            await asyncio.sleep(MOST_AT_ONCE_S)

    async def idle_links(self) -> None:
        async with AsyncExitStack() as stack:
            for number in range(100):
                identity = Identity.generate() if number % 2 else None
                await stack.enter_async_context(proven_link(self._facts, identity))

    async def _lie(self, attack: Callable[[LyingLink], Awaitable[None]]) -> None:
        async with AsyncExitStack() as stack:
            links = [
                await LyingLink.dial(self._facts, Identity.generate(), bytes(16), stack) for _ in range(8)
            ]
            alive = [asyncio.create_task(link.keep_alive()) for link in links]
            try:
                await asyncio.gather(*map(attack, links))
                await asyncio.sleep(least_s=MOST_AT_ONCE_S / 2)
            finally:
                for task in alive:
                    task.cancel()
                await asyncio.gather(*alive, return_exceptions=True)

    async def unfinished_messages(self) -> None:
        await self._lie(lambda link: link.begin_messages(62 * 2**20))

    async def files_unacknowledged(self) -> None:
        sha256 = store.read_manifest(bundled_folder()).files["tokenizer.json"]
        asked = pb.GetFile(model_hash=self._facts.model.model_hash, sha256=sha256)
        await self._lie(lambda link: link.ask(pb.Request(get_file=asked), 200))

    async def damaged_packets(self) -> None:
        for _ in range(10):
            async with proven_link(self._facts) as call:
                for _ in range(50):
                    await call.write(tampered(self._chance))

    async def poisoned_steps(self) -> None:
        await poison(self._client, self._client.model, 20)

    async def reservations(self) -> None:
        await flood(self._client, 4, MOST_AT_ONCE_S / 4)

    async def forged_acknowledgements(self) -> None:
        await forge(self._facts, self._chance.choice(list(LIES.values())), least_s=MOST_AT_ONCE_S / 2)

    async def addresses_that_nobody_can_dial(self) -> None:
        async with lying_plane(*self._swarm.addresses[:2], model=self._facts.model) as liar:
            for _ in range(30):
                address = self._chance.choice(UNDIALLABLE)
                await tell(liar, *records_with_addresses(Identity.generate(), (address,), self._facts.model))
            await asyncio.sleep(1.0)
            await liar.leave()

    async def all_links_taken(self) -> None:
        async with links_held(self._swarm.addresses[:2], 11):
            await asyncio.sleep(MOST_AT_ONCE_S)

    async def crowds_at_the_door(self) -> None:
        strangers = Strangers(self._swarm.addresses[0])
        raging = asyncio.create_task(
            asyncio.to_thread(trio.run, crowds(silent=100, idle=50, liars=4), strangers)
        )
        try:
            await asyncio.sleep(MOST_AT_ONCE_S)
        finally:
            strangers.end()
            await asyncio.wait([raging])
            raging.exception()

    async def sybils_at_tarpits(self) -> None:
        async with tarpits(8) as pits:
            like = view_of(self._client, "front")
            claims = [
                claim(like, Identity.generate(), pits[number % 8][0], SPANS[number % len(SPANS)])
                for number in range(40)
            ]
            async with announced(self._swarm.addresses[:2], claims):
                await asyncio.sleep(MOST_AT_ONCE_S)
