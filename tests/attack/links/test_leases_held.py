"""Leases that nobody uses, and reservations without end, keep nobody out."""

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import pytest
from support.attackers.bystander import bystander
from support.links.data_plane import DEADLINE_S, End, asynchronous, describe, soon, until
from support.links.raw_links import facts_of
from support.swarms.live_swarms import References
from support.swarms.served_peer import (
    PATIENT,
    PATIENT_LEASES,
    Served,
    failures_told,
    model,
    once_ready,
    served,
)

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.peer.memory.lease_rules import KEPT_PART
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.serving.request_limits import RESERVATIONS
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import Span

__all__ = ["model"]

SLOTS = 64


async def ask(link: Link, descriptor: pb.SessionDescriptor) -> pb.Response:
    request = pb.Request(reserve=pb.Reserve(descriptor=descriptor, hop=0))
    return (await link.request(request, DEADLINE_S))[0]


async def renew(link: Link, descriptor: pb.SessionDescriptor) -> pb.Response:
    return await once_ready(link, descriptor)


async def hold(link: Link, peer: Served, first: int) -> list[pb.SessionDescriptor]:
    """As many leases as the peer gives this client, all of them ready."""
    held = []
    for session in range(first, first + 100):
        asked = peer.alone(session)
        if not (await ask(link, asked)).HasField("reserved"):
            break
        assert (await renew(link, asked)).readiness.ready
        held.append(asked)
    return held


@asynchronous
async def test_two_clients_that_ask_for_all_sessions_leave_some_to_newcomers(model: LocalModel) -> None:
    async with served(model, kv_tokens=4000) as peer, AsyncExitStack() as stack:
        ends = [await stack.enter_async_context(End(is_client=True)) for _ in range(3)]
        first, second, newcomer = [await end.links.to(peer.facts) for end in ends]
        held = len(await hold(first, peer, 1)) + len(await hold(second, peer, 101))
        assert held == SLOTS - SLOTS // KEPT_PART
        assert (await ask(newcomer, peer.alone(250))).HasField("reserved")


@asynchronous
async def test_a_lease_that_is_renewed_and_never_used_ends_and_its_client_hears_so(
    model: LocalModel,
) -> None:
    settings = DataPlaneSettings(timeouts=replace(PATIENT, expiry_check_s=0.05))
    async with served(model, settings=settings, lease_times=replace(PATIENT_LEASES, idle_s=0.5)) as peer:
        failures = failures_told(peer)
        asked = peer.alone()
        assert (await peer.reserve(asked)).HasField("reserved")
        assert (await peer.ready(asked)).readiness.ready
        while failures.empty():
            peer.link.post(pb.Request(id=0, await_ready=pb.AwaitReady(session=asked.session, epoch=1)))
            await asyncio.sleep(0)
            await peer.readiness(peer.alone(2))
        assert (await soon(failures.get())).code == "expired"
        assert peer.leases.leases == ()


@asynchronous
async def test_idle_leases_make_room_for_who_asks_and_steps_are_use(
    model: LocalModel,
) -> None:
    spared = replace(PATIENT_LEASES, spared_s=0.0)
    async with served(model, kv_tokens=40, lease_times=spared) as peer, End(is_client=True) as other:
        failures = failures_told(peer)
        asked = peer.alone()
        assert (await peer.reserve(asked)).HasField("reserved")
        assert (await peer.ready(asked)).readiness.ready
        link = await other.links.to(peer.facts)
        wanted = peer.alone(9)
        wanted.capacity_tokens = 30
        assert (await ask(link, wanted)).HasField("reserved")
        assert (await soon(failures.get())).session == asked.session
        assert (await renew(link, wanted)).readiness.ready


@asynchronous
async def test_reservations_beyond_the_rate_are_refused_and_say_when_to_come_back(
    model: LocalModel,
) -> None:
    async with served(model, kv_tokens=4000) as peer:
        most = round(RESERVATIONS.identity.at_once)
        answers = await asyncio.gather(*(peer.reserve(peer.alone(1, epoch)) for epoch in range(1, 2 * most)))
        refused = [answer.refusal for answer in answers if answer.HasField("refusal")]
        assert refused
        assert {refusal.code for refusal in refused} == {"busy"}
        assert all(refusal.retry_after_ms > 0 for refusal in refused)


async def flood(client: AsyncSwarm, links: int, seconds: float) -> int:
    """Reservations over so many links, as fast as they are answered; how many were asked."""
    facts = facts_of(client, "front")
    asked = 0
    async with AsyncExitStack() as stack, asyncio.timeout(seconds + DEADLINE_S):
        ends = [await stack.enter_async_context(End(is_client=True)) for _ in range(links)]
        connection = client.connection
        records = {view.facts.name: view for view in connection.snapshot()}
        hops = [
            pb.Hop(
                peer_id=records[name].peer_id,
                start=span.start,
                stop=span.stop,
                quantization="none",
                facts=records[name].facts_record,
            )
            for name, span in (("front", Span(0, 6)), ("back", Span(6, 12)))
        ]

        async def ask_on(end: End, number: int) -> None:
            nonlocal asked
            link = await end.links.to(facts)
            epoch = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while True:
                        epoch += 1
                        descriptor = describe(hops, session=number, epoch=epoch, spec=client.model)
                        descriptor.capacity_tokens = 21
                        with suppress(LinkError):
                            await ask(link, descriptor)
                        asked += 1

        await asyncio.gather(*(ask_on(end, number) for number, end in enumerate(ends, 1)))
    return asked


@pytest.mark.real
@pytest.mark.full
@pytest.mark.anyio
async def test_a_flood_of_reservations_fails_no_generation(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    async with bystander(attacked, client, references) as honest:
        assert await flood(client, 4, 2.0) > 0
        await until(lambda: honest.generations > 1)


@pytest.mark.attack
@pytest.mark.anyio
async def test_minutes_of_reservations_fail_no_generation(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    async with bystander(attacked, client, references) as honest:
        assert await flood(client, 4, 30.0) > 0
        await until(lambda: honest.generations > 1)
