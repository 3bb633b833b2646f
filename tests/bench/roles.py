"""What roles of two holders are worth: `python tests/bench/roles.py [--roles whole pieces pairs auto] [--mbps 100]`.

One span, the whole of a random Llama whose prompts take a second, held by two real peers behind uplinks of their own.
Some sessions decode, without guesses, which would bring tokens several at a time, and bursts of long prompts come
meanwhile. Printed for each setting is the 99th percentile of the times between tokens of those that decode, and the
longest, the mean time to the end of all jobs and to a prompt's first token, and how many sessions went over; then each
over that of `pieces`, and of `whole`, where prompts are mixed in as they are.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.tables import Table
from bench.this_machine import processor
from support.models.random_llama import Widths, write_random_llama
from support.swarms.forked_peers import ForkedSwarm, fork_peer
from support.swarms.live_swarms import free_ports

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest, Speculation
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.emulate.processes.child_process import LinesProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration
from molink.simnet.emulate.serving import spec_of

HOLDERS = 2
LLAMA = Widths(hidden=768, inner=2048, layers=8, heads=12, key_heads=4)
DECODING, DECODED_TOKENS, SHORT_TOKENS = 4, 500, 32
BURST, PROMPT_TOKENS, ANSWER_TOKENS = 2, 1000, 8
FIRST_BURST_AT, EVERY_TOKENS = 150, 100
"""Tokens of the first session after which bursts come, for as long as it goes on: of a hundred gaps between tokens
there is one in which a burst is computed, if it is computed at once, so that the 99th percentile sees it."""
BURSTS = 1 + (DECODED_TOKENS - FIRST_BURST_AT) // EVERY_TOKENS
TIMEOUT_S = 60.0
BARS = {"pieces": (1.0, 1.02), "whole": (0.6, 0.9)}
"""By what it is compared with: 99th percentile of gaps, mean job."""
WHOLE = Path(__file__).with_name("whole_prompt_peer.py")


class WholePrompts(ForkedSwarm):
    """A swarm of peers that compute prompts whole."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        return await fork_peer(arguments, self.environment, log, WHOLE)  # type: ignore[return-value]


@dataclass(slots=True)
class Measured:
    """What one setting gave."""

    gaps_s: list[float] = field(default_factory=list)
    jobs_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    moves: int = 0

    @property
    def p99_s(self) -> float:
        return sorted(self.gaps_s)[int(0.99 * len(self.gaps_s))]

    @property
    def job_s(self) -> float:
        return statistics.fmean(self.jobs_s)


async def measure(folder: Path, spec: ModelSpec, roles: str, options: argparse.Namespace) -> Measured:
    """Sessions and bursts in a swarm of its own."""
    ports, found = free_ports(HOLDERS), Measured()
    async with AsyncExitStack() as stack:
        lines = await stack.enter_async_context(
            LinesProcess(LinesConfiguration(HOLDERS + 1, options.mbps, options.delay_ms))
        )
        await lines.settle([*([f"127.0.0.1:{port}"] for port in ports), ()])
        is_whole = roles == "whole"
        swarm = await stack.enter_async_context(WholePrompts() if is_whole else ForkedSwarm())
        for number, port in enumerate(ports):
            joined = [
                "--model",
                str(folder),
                "--threads",
                "1",
                "--layers",
                f"0:{spec.layers}",
                "--roles",
                "off" if is_whole else roles,
            ]
            joined += ["--grpc-port", str(port), "--http-proxy", lines.proxies[number]]
            await swarm.join(f"peer-{number}", *joined)
        connection = await stack.enter_async_context(
            SwarmConnection(swarm.addresses, None, http_proxy=lines.proxies[-1])
        )
        builder = CircuitBuilder(connection, spec)
        marks: asyncio.Queue[int] = asyncio.Queue()

        async def job(number: int, prompt_tokens: int, new_tokens: int) -> None:
            prompt = tuple(
                2 + (31 * number + 7 * at) % (spec.vocabulary_size - 2) for at in range(prompt_tokens)
            )
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            asked = SessionRequest(prompt, params, speculation=Speculation(wanted=False))
            session = ClientSession(builder, asked)
            began_s, came_s = time.perf_counter(), []
            async for _ in session.tokens(TIMEOUT_S):
                came_s.append(time.perf_counter())
                if number == 0:
                    marks.put_nowait(len(came_s))
            found.jobs_s.append(came_s[-1] - began_s)
            found.moves += session.log.moves
            if prompt_tokens == PROMPT_TOKENS:
                found.first_s.append(came_s[0] - began_s)
            else:
                found.gaps_s += [after - before for before, after in pairwise(came_s[FIRST_BURST_AT:])]

        jobs = [asyncio.create_task(job(number, SHORT_TOKENS, DECODED_TOKENS)) for number in range(DECODING)]
        for burst in range(BURSTS):
            while await marks.get() < FIRST_BURST_AT + EVERY_TOKENS * burst:
                pass
            numbers = range(100 + burst * BURST, 100 + (burst + 1) * BURST)
            jobs += [asyncio.create_task(job(one, PROMPT_TOKENS, ANSWER_TOKENS)) for one in numbers]
        await asyncio.gather(*jobs)
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--roles", nargs="+", default=["whole", "pieces", "pairs", "auto"])
    parser.add_argument("--mbps", type=float, default=100.0, help="of each home's uplink (100)")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="from home to home, one way (30)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/roles.py {' '.join(sys.argv[1:])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as folder:
        write_random_llama(Path(folder), LLAMA)
        found = run(Path(folder), options)
    judge(found, options)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Measured]:
    """Each setting, one after the other."""
    spec, found = spec_of("real", str(folder), "", 1), {}
    for roles in options.roles:
        found[roles] = one = asyncio.run(measure(folder, spec, roles, options))
        print(
            f"{roles}: 99 % of gaps {1000 * one.p99_s:.0f} ms, median {1000 * statistics.median(one.gaps_s):.0f} ms, "
            f"longest {1000 * max(one.gaps_s):.0f} ms, jobs {one.job_s:.2f} s, "
            f"first token {statistics.fmean(one.first_s):.2f} s, moves {one.moves}",
            flush=True,
        )
    return found


def judge(found: dict[str, Measured], options: argparse.Namespace) -> None:
    """Prints each over that of `pieces`, and of `whole`."""
    table = Table()
    for other, (p99_bar, job_bar) in BARS.items():
        compared = found.get(other)
        for roles, one in found.items():
            if compared is not None and roles not in BARS:
                table.judge(f"{roles}: 99 % of gaps over {other}", one.p99_s / compared.p99_s, "", p99_bar)
                table.judge(f"{roles}: mean job over {other}", one.job_s / compared.job_s, "", job_bar)
    if options.json:
        print(json.dumps(table.rows))


if __name__ == "__main__":
    main()
