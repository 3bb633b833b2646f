"""Noise on the sockets of both planes harms nobody."""

import asyncio
import random

import pytest
from support.attackers.bystander import RECOVERY_S, bystander
from support.links.raw_links import facts_of
from support.swarms.live_swarms import References

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]


async def test_a_flood_of_noise_on_both_planes_leaves_generations_as_they_were(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(client, "front")
    ports = [int(facts.grpc_addresses[0].rsplit(":", 1)[1]), int(facts.addresses[0].split("/")[4])]
    noise = random.Random(3)

    async def send(port: int, opening: bytes) -> None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return  # refused, as it should be
        try:
            writer.write(opening + noise.randbytes(20_000))
            async with asyncio.timeout(RECOVERY_S):
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # a reset is a refusal too
        finally:
            writer.close()

    async with bystander(attacked, client, references):
        openings = (b"\x16\x03\x01\x40\x00", b"", b"\x13/multistream/1.0.0\n", b"GET / HTTP/1.1\r\n\r\n")
        for opening in openings:
            await asyncio.gather(*(send(port, opening) for port in ports for _ in range(10)))
