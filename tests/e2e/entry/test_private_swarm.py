"""A private swarm of two peers that have room for one session at a time."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.links.raw_links import dialled, facts_of, question_of, refusal_of
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    References,
    bundled_folder,
    check_that_it_serves,
    generate,
    run_program,
)

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import SwarmUnavailable
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.identity.identity import Identity
from molink.peer.wire.link.handshake import prove
from molink.peer.wire.protocol.frames import encode

pytestmark = [pytest.mark.real, pytest.mark.anyio]

RACE_TOKENS = 24
ONE_SESSION = "25MB"
"""10 MB of work space, 10.3 MB of weights, and 960 tokens in 6 layers take 2.9 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class PrivateSwarm:
    """The peers, and the file with the key that they ask for."""

    swarm: LocalSwarm
    key: Path

    def client(self) -> AsyncSwarm:
        return AsyncSwarm(BUNDLED, initial_peers=self.swarm.addresses, swarm_key=self.key)


@pytest.fixture(scope="module")
async def private(
    anyio_backend: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[PrivateSwarm]:
    key = await make_key(tmp_path_factory.mktemp("key"))
    options = ("--model", BUNDLED, "--memory", ONE_SESSION, "--swarm-key", str(key))
    async with ForkedSwarm() as swarm:
        await swarm.join("front", "--layers", "0:6", *options)
        await swarm.join("back", "--layers", "6:12", *options)
        yield PrivateSwarm(swarm, key)


async def make_key(folder: Path) -> Path:
    made = await run_program("molink.peer", "swarm-key", str(folder / "swarm.key"))
    assert (made.status, made.err) == (0, "")
    return folder / "swarm.key"


async def test_who_has_the_key_is_served(private: PrivateSwarm, references: References) -> None:
    async with private.client() as client:
        await check_that_it_serves(client, references)


async def test_a_client_without_the_key_or_with_another_one_stays_outside(
    private: PrivateSwarm, tmp_path: Path
) -> None:
    for key in (None, await make_key(tmp_path)):
        with pytest.raises(SwarmUnavailable, match="swarm key"):
            async with AsyncSwarm(BUNDLED, initial_peers=private.swarm.addresses, swarm_key=key):
                pass


@pytest.mark.full
async def test_who_knows_a_peer_but_not_the_key_gets_no_link(
    private: PrivateSwarm, references: References
) -> None:
    async with private.client() as client:
        facts = facts_of(client, "front")
        async with dialled(facts) as call:
            question = await question_of(call)
            proof = prove(
                question, Identity.generate(), facts.certificate, None, link_id=bytes(16), is_client=True
            )
            await call.write(encode(proof))
            code, details = await refusal_of(call)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "this swarm is private" in details
        await check_that_it_serves(client, references)


@pytest.mark.full
async def test_two_clients_that_race_for_the_memory_of_one_session_both_end_well(
    private: PrivateSwarm, references: References
) -> None:
    """The peers have room for their layers, and for the KV cache of one such session at a time."""
    folder = bundled_folder()
    prompt = references.ids(folder, "What say you, my lord?\n" * 200)[:900]
    expected = references.greedy(folder, prompt, RACE_TOKENS)
    async with private.client() as one, private.client() as two:
        generations = await asyncio.gather(
            *(generate(client, prompt, RACE_TOKENS) for client in (one, two, one, two))
        )
    assert [generation.token_ids for generation in generations] == [expected] * 4
