"""Two real peers that take part in int8 activations: fewer bytes where a client asks for it, exact tokens elsewhere."""

import pytest
from live_swarms import BUNDLED, References, bundled_folder, generate, hops_of

from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

PROMPT = "ROMEO:\nBut, soft! what light"


async def test_a_client_that_asks_gets_int8_links_and_one_that_does_not_gets_exact_tokens(
    references: References,
) -> None:
    async with LocalSwarm() as swarm:
        for name, layers in (("front", "0:6"), ("back", "6:12")):
            peer = await swarm.join(
                name, "--model", BUNDLED, "--layers", layers, "--activation-codec", "int8"
            )
            effects = [line for line in peer.lines if line.startswith("Activation codec int8: a token takes")]
            assert len(effects) == 1
        said: list[str] = []
        async with (
            AsyncSwarm(
                BUNDLED, initial_peers=swarm.addresses, activation_codec="int8", report=said.append
            ) as asking,
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as exact,
        ):
            coded = await generate(asking, PROMPT, 24)
            assert hops_of(coded) == [("front", 0, 6), ("back", 6, 12)]
            assert len(coded.token_ids) == 24
            assert "activations go as int8 over 1 of 1 links" in said
            plain = await generate(exact, PROMPT, 24)
            ids = references.ids(bundled_folder(), PROMPT)
            assert plain.token_ids == references.greedy(bundled_folder(), ids, 24)
