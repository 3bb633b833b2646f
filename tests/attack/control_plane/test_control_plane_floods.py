"""Floods of the control plane of peers that serve: honest users notice nothing, and newcomers get in."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable

import pytest
import trio
from support.attackers.bystander import Bystander, bystander
from support.attackers.control_plane_attack import (
    PATIENCE_S,
    Claim,
    delimited,
    dialled,
    newcomer_finds,
    pour,
    proven,
    varint,
)
from support.swarms.live_swarms import References

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.host.host import open_host
from molink.dht.identity.identity import Identity

pytestmark = [pytest.mark.anyio]

MIB = 2**20
ENOUGH_GENERATIONS = 3


class Strangers:
    """What strangers do to one address, in a thread of their own, until the honest user has seen enough."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._over = threading.Event()

    async def while_they_last(
        self, honest: Bystander, attack: Callable[["Strangers"], Awaitable[None]]
    ) -> None:
        enough = honest.generations + ENOUGH_GENERATIONS
        raging = asyncio.create_task(asyncio.to_thread(trio.run, attack, self))
        try:
            async with asyncio.timeout(PATIENCE_S):
                while honest.generations < enough:  # noqa: ASYNC110 nothing to wait on
                    await asyncio.sleep(0.05)
        finally:
            self.end()
            await raging

    def end(self) -> None:
        """They are over."""
        self._over.set()

    async def until_over(self) -> None:
        """Keeps open what is open."""
        await trio.to_thread.run_sync(self._over.wait)

    @property
    def over(self) -> bool:
        return self._over.is_set()


def crowds(*, silent: int, idle: int, liars: int) -> Callable[[Strangers], Awaitable[None]]:
    """So many connections that say nothing, so many identities that do nothing, so many lengths of 8 GiB; eight silent
    questions to the table; and newcomers among them all."""

    async def attack(strangers: Strangers) -> None:
        address = strangers.address

        async def lie() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                async with await dialled(address) as stream:
                    await stream.send_all(delimited("/multistream/1.0.0") + varint(2**33))
                    await pour(stream, 150 * MIB)

        async with (
            open_host(Identity.generate(), None, None) as host,
            contextlib.AsyncExitStack() as stack,
            trio.open_nursery() as nursery,
        ):
            for _ in range(liars):
                nursery.start_soon(lie)
            for _ in range(idle):
                with contextlib.suppress(Exception):  # who is sent away before it is proven has had its share
                    await stack.enter_async_context(proven(address, Claim.honest()))
            for _ in range(silent):
                stack.callback((await dialled(address)).socket.close)
            peer_id = await host.dial(address, timeout_s=PATIENCE_S)
            for _ in range(8):
                await host.open_stream(peer_id, TABLE, timeout_s=PATIENCE_S)
            await newcomer_finds(address)
            await strangers.until_over()
            await newcomer_finds(address)

    return attack


async def besiege(
    attacked: LocalSwarm,
    client: AsyncSwarm,
    references: References,
    attack: Callable[[Strangers], Awaitable[None]],
) -> None:
    async with bystander(attacked, client, references) as honest:
        await Strangers(attacked.addresses[0]).while_they_last(honest, attack)


@pytest.mark.real
@pytest.mark.full
async def test_crowds_at_the_door_harm_nobody(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    await besiege(attacked, client, references, crowds(silent=100, idle=30, liars=8))


@pytest.mark.attack
async def test_large_crowds_at_the_door_harm_nobody(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    await besiege(attacked, client, references, crowds(silent=600, idle=300, liars=32))


@pytest.mark.attack
async def test_a_flood_of_new_identities_leaves_honest_users_their_speed(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    async def attack(strangers: Strangers) -> None:
        async def come_and_go() -> None:
            while not strangers.over:
                with contextlib.suppress(Exception):  # sent away, before or after
                    with trio.move_on_after(1.0):
                        async with proven(strangers.address, Claim.honest()):
                            pass

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(come_and_go)

    await besiege(attacked, client, references, attack)
