"""Addresses where nobody answers, and others' addresses, cost a client nothing, however many identities claim them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.attackers.bystander import TOKENS
from support.attackers.liars import announced, claim, until_known, view_of
from support.links.data_plane import End, facts_at, soon, until
from support.swarms.live_swarms import References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.identity.identity import Identity
from molink.peer.wire.link.certificate import new_certificate
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.link.link_resources import LINK_TIMES
from molink.shards.spec import Span

SYBILS = 40
DEADLINE_S = 120.0
"""To dial all tarpits one after the other takes longer."""
GIVEN_UP_S = 15.0
PROMPT = "ROMEO:"
SPANS = (Span(0, 6), Span(6, 12), Span(0, 12))


class Tarpit:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self.connections = 0
        self._held: list[asyncio.StreamWriter] = []
        self._closed = False

    def take(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._held.append(writer)
        if self._closed:  # accepted before the listener closed
            writer.transport.abort()

    async def let_go(self) -> None:
        """Ends every connection, and those that are still being taken."""
        self._closed = True
        for writer in self._held:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._held), return_exceptions=True)


@asynccontextmanager
async def tarpits(count: int) -> AsyncIterator[list[tuple[str, Tarpit]]]:
    """So many of them, each at an address of its own."""
    pits = [Tarpit() for _ in range(count)]
    servers = [await asyncio.start_server(pit.take, "127.0.0.1", 0) for pit in pits]
    try:
        yield [
            (f"127.0.0.1:{server.sockets[0].getsockname()[1]}", pit)
            for server, pit in zip(servers, pits, strict=True)
        ]
    finally:
        for pit, server in zip(pits, servers, strict=True):
            server.close()
            await pit.let_go()


@pytest.mark.real
@pytest.mark.full
@pytest.mark.anyio
@pytest.mark.parametrize("addresses", [pytest.param(1, marks=pytest.mark.attack), SYBILS])
async def test_clients_get_in_and_generate_beside_sybils_that_do_not_answer(
    addresses: int, attacked: LocalSwarm, references: References
) -> None:
    folder = bundled_folder()
    right = references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
    async with AsyncSwarm(initial_peers=attacked.addresses) as client, tarpits(addresses) as pits:
        like = view_of(client, "front")
        sybils = [Identity.generate() for _ in range(SYBILS)]
        claims = [
            claim(like, sybil, pits[number % addresses][0], SPANS[number % len(SPANS)])
            for number, sybil in enumerate(sybils)
        ]
        async with announced(attacked.addresses, claims):
            await until_known(client, [sybil.peer_id for sybil in sybils])
            async with asyncio.timeout(DEADLINE_S):
                assert (await generate(client, PROMPT, TOKENS)).token_ids == right
            async with (
                asyncio.timeout(DEADLINE_S),
                AsyncSwarm(initial_peers=attacked.addresses) as newcomer,
            ):
                assert (await generate(newcomer, PROMPT, TOKENS)).token_ids == right


@pytest.mark.full
def test_an_address_that_many_claim_is_dialled_once() -> None:
    async def attack() -> None:
        async with tarpits(1) as [(address, pit)], End(is_client=True, times=LINK_TIMES) as client:
            sybils = [Identity.generate() for _ in range(SYBILS)]
            dials = [
                client.links.to(
                    facts_at(sybil, new_certificate(sybil.peer_id), address), timeout_s=GIVEN_UP_S
                )
                for sybil in sybils
            ]
            answers = await soon(asyncio.gather(*dials, return_exceptions=True))
            assert all(isinstance(answer, LinkError) for answer in answers)
            assert pit.connections == 1

    asyncio.run(attack())


def test_who_is_really_at_an_address_that_others_claim_is_reached_at_once() -> None:
    async def attack() -> None:
        async with End() as honest, End(is_client=True) as client:
            address = honest.facts.grpc_addresses[0]
            liars = [Identity.generate() for _ in range(SYBILS)]
            claims = [facts_at(liar, new_certificate(liar.peer_id), address) for liar in liars]
            answers = await soon(asyncio.gather(*map(client.links.to, claims), return_exceptions=True))
            assert all(isinstance(answer, LinkError) for answer in answers)
            assert (await soon(client.links.to(honest.facts))).peer_id == honest.peer_id
            await until(lambda: honest.links.find(client.peer_id) is not None)

    asyncio.run(attack())


def test_the_address_that_answers_is_reached_beside_those_that_do_not() -> None:
    async def attack() -> None:
        async with tarpits(3) as pits, End() as honest, End(is_client=True) as client:
            addresses = (*(address for address, _ in pits), *honest.facts.grpc_addresses)
            # one after the other, each would take as long as a test has
            link = await soon(client.links.to(replace(honest.facts, grpc_addresses=addresses)))
            assert link.peer_id == honest.peer_id

    asyncio.run(attack())
