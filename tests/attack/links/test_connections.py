"""Whoever holds connections or links without using them keeps nobody else out, and ends no peer."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest
from support.attackers.bystander import RECOVERY_S, bystander, require_alive
from support.attackers.connection_attack import HTTP2_PREFACE, careless_tls, grpc_port, silence
from support.links.raw_links import dialled, facts_of, question_of, refusal_of
from support.swarms.forked_peers import ForkedSwarm, start_program
from support.swarms.live_swarms import BUNDLED, References, check_that_it_serves

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.handshake import prove
from molink.peer.wire.protocol.frames import encode

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]
PROGRAM = Path(__file__).parents[2] / "support" / "attackers" / "peer_of_few_descriptors.py"
SILENT = 1100
ATTACK_S = 30.0
"""Several times as long as any stage may take."""


class SwarmOfFewDescriptors(ForkedSwarm):
    """Its peers may have 1024 files and sockets each."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        return await start_program(PROGRAM, arguments, log)


async def test_a_peer_of_1024_descriptors_outlives_1100_silent_connections_and_lets_newcomers_in(
    references: References,
) -> None:
    async with SwarmOfFewDescriptors() as swarm:
        peer = await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12", "--memory", "600MB")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as member:
            await check_that_it_serves(member, references)
            async with silence(grpc_port(facts_of(member)), SILENT) as attack:
                assert attack.opened >= SILENT
                require_alive([peer])
                await check_that_it_serves(member, references)
                async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as newcomer:
                    await check_that_it_serves(newcomer, references)
                require_alive([peer])
            async with asyncio.timeout(RECOVERY_S), AsyncSwarm(initial_peers=swarm.addresses) as newcomer:
                await check_that_it_serves(newcomer, references)
        said = peer.log.read_text(errors="replace")
        assert "silent connections from 127.0.0.1" in said
        assert len(said.splitlines()) < 20


@pytest.mark.parametrize("stage", [pytest.param("tls", marks=pytest.mark.attack), "http2"])
async def test_silence_after_tls_and_after_http2_begins_keeps_nobody_out(
    stage: str, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    opening = HTTP2_PREFACE if stage == "http2" else b""
    async with bystander(attacked, client, references) as honest:
        port = grpc_port(facts_of(client, "front"))
        async with silence(port, 200, tls=careless_tls(), opening=opening):
            await honest.generate(client, references)
            async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as newcomer:
                await honest.generate(newcomer, references)


async def link_of(
    facts: PeerFacts, identity: Identity, stack: AsyncExitStack, link_id: bytes
) -> "grpc.aio.StreamStreamCall[bytes, bytes]":
    call = await stack.enter_async_context(dialled(facts))
    question = await question_of(call)
    await call.write(
        encode(prove(question, identity, facts.certificate, None, link_id=link_id, is_client=False))
    )
    return call


@pytest.mark.parametrize("links", [32, pytest.param(300, marks=pytest.mark.attack)])
async def test_links_of_one_identity_are_four_and_keep_nobody_out(
    links: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts, identity = facts_of(client, "front"), Identity.generate()
    async with bystander(attacked, client, references) as honest, AsyncExitStack() as stack:
        calls = [await link_of(facts, identity, stack, number.to_bytes(16)) for number in range(links)]
        async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as newcomer:
            await honest.generate(newcomer, references)
        await asyncio.gather(*map(refusal_of, calls[:-4]))


@pytest.mark.parametrize("identities", [140, pytest.param(300, marks=pytest.mark.attack)])
async def test_links_of_many_identities_that_do_nothing_keep_no_newcomer_out(
    identities: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(client, "front")
    async with bystander(attacked, client, references) as honest, AsyncExitStack() as stack:
        for _ in range(identities):
            await link_of(facts, Identity.generate(), stack, bytes(16))
        async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as newcomer:
            await honest.generate(newcomer, references)


@pytest.mark.attack
async def test_silence_in_every_stage_at_once_for_half_a_minute_keeps_nobody_out(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts, identity = facts_of(client, "front"), Identity.generate()
    port = grpc_port(facts)
    async with bystander(attacked, client, references) as honest, AsyncExitStack() as stack:
        for tls, opening in ((None, b""), (careless_tls(), b""), (careless_tls(), HTTP2_PREFACE)):
            await stack.enter_async_context(silence(port, 300, tls=tls, opening=opening))
        for number in range(100):
            with suppress(grpc.aio.AioRpcError):  # it made room for others before it was proven
                await link_of(facts, identity, stack, number.to_bytes(16))
        ends_s = asyncio.get_running_loop().time() + ATTACK_S
        while asyncio.get_running_loop().time() < ends_s:
            async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as newcomer:
                await honest.generate(newcomer, references)
