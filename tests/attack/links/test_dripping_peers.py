"""Who claims a model and drips its files, byte by byte, neither outvotes nor delays those who have it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from support.attackers.bystander import TOKENS
from support.attackers.liars import Liar, announced, claim, until_known, view_of
from support.swarms.live_swarms import References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.records.records import ServedModel
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

DRIPPING = 3
DRIP_EVERY_S = 3.0
DEADLINE_S = 20.0
PROMPT = "ROMEO:"


async def drips(request: pb.Request) -> tuple[pb.Response, bytes]:
    """A byte of whatever is asked for, after a while."""
    await asyncio.sleep(DRIP_EVERY_S)
    return pb.Response(content=pb.Content(total_bytes=100_000)), b"{"


@asynccontextmanager
async def dripping(
    attacked: LocalSwarm, like: AsyncSwarm, model: ServedModel | None
) -> AsyncIterator[list[Liar]]:
    """Peers that claim the whole of a model, by default of the one that the swarm serves."""
    view = view_of(like, "front")
    if model is not None:
        view = replace(view, facts=replace(view.facts, model=model))
    async with AsyncExitStack() as stack:
        liars = [await stack.enter_async_context(Liar(request=drips)) for _ in range(DRIPPING)]
        claims = [
            claim(
                view,
                liar.identity,
                liar.address,
                Span(0, 12),
                certificate=liar.certificate.der,
                layer_ms=50.0,
            )
            for liar in liars
        ]
        await stack.enter_async_context(announced(attacked.addresses, claims))
        await until_known(like, [liar.peer_id for liar in liars])
        yield liars


async def require_newcomer(attacked: LocalSwarm, references: References) -> None:
    folder = bundled_folder()
    async with asyncio.timeout(DEADLINE_S), AsyncSwarm(initial_peers=attacked.addresses[:1]) as newcomer:
        generation = await generate(newcomer, PROMPT, TOKENS)
    assert generation.token_ids == references.greedy(folder, references.ids(folder, PROMPT), TOKENS)


async def test_another_model_that_more_identities_claim_is_not_waited_for(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    served = view_of(client, "front").facts.model
    invented = replace(served, name="a/better-model", model_hash="0" * 64, content_hash="1" * 64)
    async with dripping(attacked, client, invented):
        await require_newcomer(attacked, references)


async def test_who_drips_the_files_of_the_right_model_delays_nobody(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    async with dripping(attacked, client, None):
        await require_newcomer(attacked, references)
