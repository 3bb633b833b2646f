"""A gateway is killed in mid-generation and started again: what its users ask again begins behind its prompt."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, free_ports, rows_computed

from molink.client.local.local_gateway import LocalGateway

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
STREAMS = 32
"""As many as a peer lends one client memory for."""
NEW_TOKENS = 400
RETRIED_TOKENS = 24
DEADLINE_S = 120.0


async def test_what_is_asked_again_after_a_kill_begins_behind_its_prompt(
    references: References, tmp_path: Path
) -> None:
    folder = bundled_folder()
    prompt = (references.ids(folder, PROMPT) * 6)[:100]
    expected = references.text(folder, references.greedy(folder, prompt, RETRIED_TOKENS))
    ports = free_ports(2)
    async with ForkedSwarm() as swarm:
        for span, port in (("0:6", ports[0]), ("6:12", ports[1])):
            told = ("--model", BUNDLED, "--layers", span, "--metrics-port", str(port))
            await swarm.join(f"half {span[0]}", *told, "--draft", "off")  # guesses are computed rows as well
        async with LocalGateway(swarm.addresses, tmp_path / "log") as gateway:
            async with AsyncExitStack() as stack:
                user = await stack.enter_async_context(user_of(gateway))
                streams = await asyncio.gather(
                    *(
                        user.completions.create(
                            model=BUNDLED,
                            prompt=list(prompt),
                            max_tokens=NEW_TOKENS,
                            temperature=0,
                            stream=True,
                        )
                        for _ in range(STREAMS)
                    )
                )
                async with asyncio.timeout(DEADLINE_S):
                    await asyncio.gather(*(anext(aiter(one)) for one in streams))
                assert gateway.process_id is not None
                os.kill(gateway.process_id, signal.SIGKILL)
            await gateway.wait()
        async with LocalGateway(swarm.addresses, tmp_path / "log") as gateway, user_of(gateway) as user:
            await until_still(ports)
            before = await rows_computed(ports)
            answers = await asyncio.gather(
                *(
                    user.completions.create(
                        model=BUNDLED, prompt=list(prompt), max_tokens=RETRIED_TOKENS, temperature=0
                    )
                    for _ in range(STREAMS)
                )
            )
            assert {answer.choices[0].text for answer in answers} == {expected}
            behind = (len(prompt) - 1) // 16 * 16
            for rows, was in zip(await rows_computed(ports), before, strict=True):
                assert rows - was <= STREAMS * (len(prompt) - behind + RETRIED_TOKENS)


def user_of(gateway: LocalGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0, timeout=DEADLINE_S)


async def until_still(ports: Sequence[int]) -> None:
    """Nothing is computed any more for who is gone."""
    async with asyncio.timeout(DEADLINE_S):
        before: list[int] = []
        while (now := await rows_computed(ports)) != before:
            before = now
            await asyncio.sleep(1.0)
