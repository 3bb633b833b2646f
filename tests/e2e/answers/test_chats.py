"""What was said before is not computed again."""

import asyncio
from collections.abc import Sequence

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    PROGRAM_TIMEOUT_S,
    References,
    bundled_folder,
    free_ports,
    generate,
    rows_computed,
)

from molink.client.api.swarm import AsyncSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

ANSWER_TOKENS = 40
BLOCK_TOKENS = 16


async def until_rows(ports: Sequence[int], wanted: Sequence[int]) -> None:
    """A step is counted when what it gave is on its way; more rows than wanted are seen too."""
    async with asyncio.timeout(PROGRAM_TIMEOUT_S):
        while any(now < want for now, want in zip(await rows_computed(ports), wanted, strict=True)):  # noqa: ASYNC110 - other processes count
            await asyncio.sleep(0.05)
    assert await rows_computed(ports) == list(wanted)


async def test_the_second_turn_of_a_chat_computes_its_new_tokens_alone(references: References) -> None:
    ports = free_ports(2)
    folder = bundled_folder()
    chat = references.ids(folder, "ROMEO:\nBut, soft! what light through yonder window breaks?\n\nJULIET:\n")
    question = references.ids(folder, "\n\nROMEO:\nAnd what says she of me?\n\nJULIET:\n")
    async with ForkedSwarm() as swarm:
        for name, span, port in (("front", "0:6", ports[0]), ("back", "6:12", ports[1])):
            await swarm.join(name, "--model", BUNDLED, "--layers", span, "--metrics-port", str(port))
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            known = 0
            for _ in range(3):
                before = await rows_computed(ports)
                generation = await generate(client, chat, ANSWER_TOKENS, speculation="off")
                assert len(generation.circuit.hops) == 2
                answer = generation.token_ids
                # a client that stands still for seconds answers no ping, and loses its links and what they carry
                assert answer == await asyncio.to_thread(references.greedy, folder, chat, ANSWER_TOKENS)
                # the last token is drawn and never stepped
                stepped = len(chat) + len(answer) - 1
                await until_rows(ports, [rows + stepped - known for rows in before])
                known = stepped // BLOCK_TOKENS * BLOCK_TOKENS
                chat = (*chat, *answer, *question)
