"""Two real peers that take part in int8 activations: fewer bytes where a client asks for it, exact tokens elsewhere."""

from typing import cast

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate, hops_of

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.peer.daemon.control import call_peer
from molink.shards.codec import encoded_bytes

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "ROMEO:\nBut, soft! what light"
NEW_TOKENS = 24


async def sent_activation_bytes(swarm: LocalSwarm) -> int:
    """What all peers together have sent of activations since they were started."""
    answers = [await call_peer(peer.state_dir, "status", 10.0) for peer in swarm.peers]
    return sum(cast("int", answer["sent_activation_bytes"]) for answer in answers)


@pytest.mark.full
async def test_a_client_that_asks_gets_int8_links_and_one_that_does_not_gets_exact_tokens(
    references: References,
) -> None:
    async with ForkedSwarm() as swarm:
        for name, layers in (("front", "0:6"), ("back", "6:12")):
            peer = await swarm.join(
                name, "--model", BUNDLED, "--layers", layers, "--activation-codec", "int8"
            )
            effects = [line for line in peer.lines if line.startswith("Activation codec int8: a token takes")]
            assert len(effects) == 1
        said: list[str] = []
        async with (
            AsyncSwarm(
                BUNDLED,
                initial_peers=swarm.addresses,
                activation_codec="int8",
                speculation="off",
                report=said.append,
            ) as asking,
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses, speculation="off") as exact,
        ):
            ids = references.ids(bundled_folder(), PROMPT)
            coded = await generate(asking, ids, NEW_TOKENS)
            coded_bytes = await sent_activation_bytes(swarm)
            assert hops_of(coded) == [("front", 0, 6), ("back", 6, 12)]
            assert len(coded.token_ids) == NEW_TOKENS
            assert "activations go as int8 over 1 of 1 links" in said
            plain = await generate(exact, ids, NEW_TOKENS)
            assert plain.token_ids == references.greedy(bundled_folder(), ids, NEW_TOKENS)
            plain_bytes = await sent_activation_bytes(swarm) - coded_bytes
            rows = len(ids) + NEW_TOKENS - 1
            assert plain_bytes == rows * encoded_bytes("float32", 1, exact.model.hidden_size)
            assert coded_bytes == rows * encoded_bytes("int8", 1, exact.model.hidden_size)
            assert coded_bytes < 0.3 * plain_bytes
