"""Damaged packets and records, false identities and deflated bombs end the stream that they came on, no more."""

import asyncio
import random
import zlib
from contextlib import suppress

import grpc.aio
import pytest
from support.attackers.bystander import RECOVERY_S, bystander
from support.attackers.strangers import damaged, on_control_plane, proven_link, stream_to, until_turned_away
from support.links.packet_examples import tampered
from support.links.raw_links import facts_of
from support.pairwise import usually
from support.swarms.live_swarms import References
from support.swarms.swarm_examples import facts_of as example_facts
from support.swarms.swarm_examples import state_of as example_state

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.gossip.table import pull
from molink.dht.host.compressed_stream import CompressedStream, Deflater
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.records.announcement import sign_facts, sign_state

pytestmark = [pytest.mark.real, pytest.mark.anyio]


def counted(few: int, many: int, most: int | None = None) -> list[object]:
    """So many in every run, beside the attacks, and where everything is tried."""
    runs: list[object] = [few, pytest.param(many, marks=pytest.mark.attack)]
    return runs if most is None else [*runs, pytest.param(most, marks=pytest.mark.fuzz)]


@pytest.mark.full
@pytest.mark.parametrize("packets", counted(200, 20_000, 100_000))
async def test_damaged_packets_end_their_links_only(
    packets: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    chance = random.Random(packets)
    facts = facts_of(client, "front")
    sent = 0

    async def one_link() -> None:
        nonlocal sent
        with suppress(grpc.aio.AioRpcError):  # refused, or ended by the peer
            async with proven_link(facts) as call:
                for _ in range(50):
                    await call.write(tampered(chance))
                    sent += 1

    async with bystander(attacked, client, references):
        while sent < packets:
            await asyncio.gather(*(one_link() for _ in range(4)))


@pytest.mark.parametrize("records", counted(500, 20_000, 100_000))
async def test_damaged_records_change_nobodys_view(
    records: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    chance = random.Random(records)
    mallory = Identity.generate()
    whole = [sign_facts(example_facts(mallory), mallory), sign_state(example_state(mallory), mallory)]
    front = attacked.peers[0]

    async def attack() -> None:
        sent = 0
        while sent < records:
            with until_turned_away():  # not listened to any longer
                async with stream_to(front, GOSSIP) as (_, stream):
                    packed = CompressedStream(stream)
                    for _ in range(10):
                        batch = [
                            damaged(
                                chance.choice(whole), [chance.randrange(4096)], bytes([chance.randrange(256)])
                            )
                            for _ in range(20)
                        ]
                        sent += len(batch)
                        await packed.send(batch)

    async with bystander(attacked, client, references):
        await on_control_plane(attack, within_s=RECOVERY_S + records / 100)
        assert mallory.peer_id not in await known_to(front)


@pytest.mark.full
@pytest.mark.parametrize("identities", counted(100, 5000))
async def test_many_identities_over_one_link_push_nobody_out(
    identities: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    front = attacked.peers[0]

    async def attack() -> None:
        async with stream_to(front, GOSSIP) as (_, stream):
            packed = CompressedStream(stream)
            for _ in range(identities):
                sybil = Identity.generate()
                await packed.send(
                    [
                        sign_facts(example_facts(sybil), sybil),
                        sign_state(example_state(sybil, ttl_s=60), sybil),
                    ]
                )

    async with bystander(attacked, client, references):
        with until_turned_away():  # it reads a hundred records a second
            await on_control_plane(attack)
        honest = {peer.peer_id for peer in attacked.peers}
        assert honest <= await known_to(front)


@pytest.mark.full
@pytest.mark.parametrize("bombs", counted(8, 20))
@pytest.mark.parametrize("protocol", usually([GOSSIP], [TABLE]))
async def test_deflated_bombs_are_not_inflated(
    protocol: str, bombs: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    inflates_to_64_mib = bomb.compress(bytes(64 * 2**20)) + bomb.flush(zlib.Z_SYNC_FLUSH)
    deflated = 8 * inflates_to_64_mib
    pieces = [deflated[at : at + 60_000] for at in range(0, len(deflated), 60_000)]

    async def attack() -> None:
        for _ in range(bombs):
            with until_turned_away():
                async with stream_to(attacked.peers[0], protocol) as (_, stream):
                    await stream.send([Deflater().pack([b"\x0f" * 9])[0], *pieces])

    async with bystander(attacked, client, references, growth_bytes=256 * 2**20):
        await on_control_plane(attack)


async def known_to(peer: LocalPeer) -> set[str]:
    """The peer ids in the table that the peer hands out."""
    found: set[str] = set()

    async def ask() -> None:
        membership = Membership(None, lambda: None)
        async with stream_to(peer, TABLE) as (_, stream):
            await pull(CompressedStream(stream), membership, timeout_s=RECOVERY_S)
        found.update(view.peer_id for view in membership.snapshot())

    await on_control_plane(ask)
    return found
