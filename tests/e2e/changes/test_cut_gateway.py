"""A gateway whose connections to every hop are cut for seconds goes on with its streams where they were."""

import asyncio
import os
import sys

import openai
import pytest
from support.links.cutting_proxy import CuttingProxy
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
HALVES = ("0:6", "6:12")
NEW_TOKENS = 200
CUT_AFTER_PIECES = 30
CUT_S = 5.0
STARTED_WITHIN_S = 120.0


async def test_no_stream_breaks_and_no_token_repeats_or_is_missing_after_five_seconds_without_any_hop(
    anyio_backend: str, references: References
) -> None:
    folder = bundled_folder()
    expected = references.text(folder, references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS))
    async with CuttingProxy() as proxy, ForkedSwarm() as swarm:
        for number, span in enumerate(HALVES):
            await swarm.join(f"half-{number}", "--model", BUNDLED, "--layers", span)
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from molink.client.gateway.cli import main; main()",
            "--port", "0", "--initial-peers", swarm.addresses[0],
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MOLINK_HTTP_PROXY": proxy.url},
        )  # fmt: skip
        assert gateway.stdout is not None
        try:
            async with asyncio.timeout(STARTED_WITHIN_S):
                line = (await gateway.stdout.readline()).decode()
            assert line.startswith("Listening on http://127.0.0.1:"), line
            async with openai.AsyncOpenAI(
                base_url=f"{line.split()[-1]}/v1", api_key="any", max_retries=0, timeout=STARTED_WITHIN_S
            ) as client:
                stream = await client.completions.create(
                    model=BUNDLED, prompt=PROMPT, max_tokens=NEW_TOKENS, temperature=0, stream=True
                )
                pieces: list[str] = []
                reasons = []
                cut: asyncio.Task[None] | None = None
                async for chunk in stream:
                    pieces.append(chunk.choices[0].text)
                    reasons.append(chunk.choices[0].finish_reason)
                    if len(pieces) == CUT_AFTER_PIECES:
                        assert proxy.connections >= len(HALVES)
                        cut = asyncio.create_task(cut_for(proxy, CUT_S))
                assert cut is not None
                assert cut.done(), "the stream was over before its connections were back"
            assert "".join(pieces) == expected
            assert reasons[-1] == "length"
        finally:
            if gateway.returncode is None:
                gateway.kill()
                await gateway.wait()


async def cut_for(proxy: CuttingProxy, seconds: float) -> None:
    """Every connection breaks, and none can be made for so long."""
    proxy.refuses = True
    proxy.cut()
    await asyncio.sleep(seconds)
    proxy.refuses = False
