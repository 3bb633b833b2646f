"""The client of `together.py`, a process of its own: it sends requests at once whenever it is told to.

Of `molink` it uses what users do, so that it runs with any version of the code. Each line that it reads is a turn's
seed, each that it prints a `Together` in JSON.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from molink import AsyncSwarm


@dataclass(frozen=True, slots=True)
class Together:
    """What came of requests that were sent at once."""

    tokens_per_s: float
    first_tokens_s: tuple[float, ...]
    """Of each request, the earliest first."""
    tpot_ms: float
    """Mean over requests of the time per token after the first."""


async def together(
    swarm: AsyncSwarm, requests: int, prompt_tokens: int, new_tokens: int, seed: int
) -> Together:
    """All requests at once; no two prompts begin alike."""
    prompts = [
        [2 + (31 * (one + seed) + 7 * at * (at + one + seed)) % 1000 for at in range(prompt_tokens)]
        for one in range(requests)
    ]
    began_s = time.perf_counter()
    generations = await asyncio.gather(
        *(swarm.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True) for prompt in prompts)
    )
    taken_s = time.perf_counter() - began_s
    firsts_s = tuple(sorted(one.ttft_s for one in generations))
    tpot_ms = statistics.fmean(one.tpot_s for one in generations) * 1000
    return Together(requests * new_tokens / taken_s, firsts_s, tpot_ms)


async def serve(options: argparse.Namespace) -> None:
    """A turn for each line, until there is none."""
    knows = "speculation" in signature(AsyncSwarm).parameters
    asked: dict[str, Any] = {"speculation": options.speculation} if knows else {}
    async with AsyncSwarm(options.model, initial_peers=[options.peer], **asked) as swarm:
        while line := await asyncio.to_thread(sys.stdin.readline):
            came = await together(swarm, options.requests, options.prompt_tokens, options.tokens, int(line))
            print(json.dumps(asdict(came)), flush=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("peer")
    parser.add_argument("--speculation", default="auto", help="where the version knows of it (auto)")
    for name in ("requests", "prompt-tokens", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
