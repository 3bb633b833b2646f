"""How long eight choices of one long prompt take to begin beside one: `python tests/bench/gateway/choices.py`.

Three real peers and a gateway on this machine, the bundled model, a prompt of a thousand tokens that is another one in
each turn, one and eight choices in turns. A request's time is that until the first token of its last choice is there.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
from bench.tables import Table
from bench.this_machine import processor
from support.swarms.live_swarms import BUNDLED

from molink.client.local.local_gateway import LocalGateway
from molink.client.local.local_swarm import LocalSwarm

PROMPT_TOKENS: Final = 1000
NEW_TOKENS: Final = 4
CHOICES: Final = 8
BAR: Final = 1.3
SPANS: Final = ("0:4", "4:8", "8:12")


async def first_tokens_s(client: httpx.AsyncClient, prompt: list[int], choices: int) -> float:
    """Returns the time until each choice has had its first token."""
    asked = {
        "model": BUNDLED,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "n": choices,
        "stream": True,
        "temperature": 0,
    }
    begun: set[int] = set()
    began_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                begun |= {one["index"] for one in json.loads(line[6:])["choices"]}
                if len(begun) == choices:
                    return time.perf_counter() - began_s
    raise RuntimeError("a choice has had no token")


async def main(turns: int) -> None:
    """Measures in turns."""
    took_s: dict[int, list[float]] = {1: [], CHOICES: []}
    with tempfile.TemporaryDirectory() as folder:
        async with LocalSwarm() as swarm:
            for at, span in enumerate(SPANS):
                await swarm.join(f"p{at}", "--model", BUNDLED, "--layers", span)
            async with (
                LocalGateway(swarm.addresses, Path(folder) / "log") as gateway,
                httpx.AsyncClient(base_url=gateway.url, timeout=120) as client,
            ):
                number = 0
                for turn in range(turns + 1):
                    for choices, times_s in took_s.items():
                        number += 1
                        prompt = [2 + (one * number + one * one) % 1000 for one in range(PROMPT_TOKENS)]
                        took = await first_tokens_s(client, prompt, choices)
                        if turn:
                            times_s.append(took)
    one, eight = (statistics.median(took_s[choices]) for choices in (1, CHOICES))
    table = Table()
    table.note(
        f"TTFT of {PROMPT_TOKENS} tokens, one choice; the last of {CHOICES}", f"{one:.3f}, {eight:.3f} s"
    )
    table.judge(f"n={CHOICES} over n=1", eight / one, "", BAR)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    print(f"{processor()}: {' '.join(sys.argv)}", flush=True)
    asyncio.run(main(parser.parse_args().turns))
