"""An honest user in a process of its own, which no attacker shares: `python honest_user.py ADDRESS...`.

For each line on its input it generates once, and answers with a line of JSON: the tokens, and seconds a token.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from molink.client.api.swarm import AsyncSwarm

MODEL = "molink/tiny-shakespeare"
PROMPT = "ROMEO:"
TOKENS = 24
ANSWER_TIMEOUT_S = 60.0


class HonestUser:
    """The other end: starts the process, and asks it to generate."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__)), *self._addresses, stdin=PIPE, stdout=PIPE
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def generate(self) -> tuple[tuple[int, ...], float]:
        """The tokens of one generation, and how many seconds each took after the first."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = json.loads(await self._process.stdout.readline())
        return tuple(answer["tokens"]), answer["tpot_s"]


async def serve(addresses: Sequence[str]) -> None:
    """Generates for each line, until there are no more."""
    loop = asyncio.get_running_loop()
    async with AsyncSwarm(MODEL, initial_peers=addresses) as swarm:
        while await loop.run_in_executor(None, sys.stdin.readline):
            generation = await swarm.generate(PROMPT, max_new_tokens=TOKENS)
            answer = {"tokens": generation.token_ids, "tpot_s": generation.tpot_s}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
