"""Requests that come at once: `python tests/bench/together.py [--peers N] [--before PYTHONPATH]`.

Peers that hold a model in even parts, by default one with a random Llama, each a process of its own on loopback, and a
client that sends eight prompts of 32 tokens at the same moment. Prints tokens per second of all requests, from the
first one's sending to the last one's last token, when each got its first token, and the mean time per further token.
With --before peers and clients of other versions of the code, each found on such a PYTHONPATH, take turns with this
one's, and the median ratio of a turn's times is told.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench.this_machine import processor
from bench.together_client import Together
from support.models.random_llama import Widths, write_random_llama

from molink.client.local.local_swarm import LocalSwarm
from molink.shards.checkpoint import catalog

TURN_WITHIN_S = 300.0
SHAPES = {
    "small": Widths(hidden=512, inner=1408, layers=8, heads=8, key_heads=8),
    "1b": Widths(hidden=2048, inner=8192, layers=16, heads=32, key_heads=8),
}


class Client:
    """A client's process, with the version of the code that its peers have."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def started(cls, options: argparse.Namespace, folder: Path, local: LocalSwarm) -> Self:
        """It enters the swarm that `local` has founded."""
        asked = {
            "requests": options.requests,
            "prompt-tokens": options.prompt_tokens,
            "tokens": options.tokens,
            "speculation": options.speculation,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("together_client.py")), str(folder), local.addresses[0],
            *(f"--{name}={value}" for name, value in asked.items()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=local.environment,
        )  # fmt: skip
        return cls(process)

    async def take_turn(self, seed: int) -> Together:
        """All requests once, within TURN_WITHIN_S."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n".encode())
        async with asyncio.timeout(TURN_WITHIN_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a client has ended: its last words are above")
        came = json.loads(line)
        return Together(came["tokens_per_s"], tuple(came["first_tokens_s"]), came["tpot_ms"])

    async def end(self) -> None:
        """Has it leave."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def run(options: argparse.Namespace, folder: Path) -> dict[str, list[Together]]:
    """By version of the code, its rounds; the first round is not counted."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    versions = {f"before {at}" if at else "before": path for at, path in enumerate(options.before)}
    versions["now"] = os.environ.get("PYTHONPATH", "")
    cuts = [layers * at // options.peers for at in range(options.peers + 1)]
    how = ["--model", str(folder), "--dtype", options.dtype, "--quantization", options.quantization]
    found: dict[str, list[Together]] = {version: [] for version in versions}
    async with AsyncExitStack() as stack:
        clients = {}
        for version, path in versions.items():
            local = await stack.enter_async_context(
                LocalSwarm({"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path})
            )
            for start, stop in pairwise(cuts):
                await local.join(f"{version}-{start}", *how, "--layers", f"{start}:{stop}")
            clients[version] = await Client.started(options, folder, local)
            stack.push_async_callback(clients[version].end)
        for turn in range(options.rounds + 1):
            for version, client in clients.items():
                came = await client.take_turn(100 * turn)
                if turn:
                    found[version].append(came)
                    firsts = " ".join(f"{one:.2f}" for one in came.first_tokens_s)
                    print(
                        f"  {version:<9}{came.tokens_per_s:7.1f} tokens/s, {came.tpot_ms:6.2f} ms per token"
                        f"   first tokens after {firsts} s",
                        flush=True,
                    )
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument(
        "--model", help="a folder with a model, or the bundled one, in place of a random one of --shape"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="that each request asks for (32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each peer (2)")
    parser.add_argument(
        "--speculation", choices=("auto", "off"), default="auto", help="of the clients (auto)"
    )
    parser.add_argument("--peers", type=int, default=1, help="that hold the model in even parts (1)")
    parser.add_argument(
        "--before", metavar="PYTHONPATH", action="append", default=[], help="another version of the code"
    )
    parser.add_argument("--json", type=Path, help="writes every number there")
    options = parser.parse_args()
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    machine = f"{processor()}, torch {torch.__version__}, {platform.system()} {platform.release()}{load}"
    command = f"python tests/bench/together.py {' '.join(sys.argv[1:])}"
    print(f"{machine}\n{command}", flush=True)
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as made:
        folder = catalog.resolve(options.model) if options.model else Path(made) / "llama"
        if options.model is None:
            write_random_llama(folder, SHAPES[options.shape], torch.bfloat16)
        found = asyncio.run(run(options, folder))
    for version, rounds in found.items():
        rate = statistics.median(one.tokens_per_s for one in rounds)
        last_s = statistics.median(one.first_tokens_s[-1] for one in rounds)
        tpot_ms = statistics.median(one.tpot_ms for one in rounds)
        ratio = statistics.median(
            now.tpot_ms / one.tpot_ms for now, one in zip(found["now"], rounds, strict=True)
        )
        print(
            f"{version}: median of {len(rounds)}: {rate:.1f} tokens/s, last first token after {last_s:.2f} s, "
            f"{tpot_ms:.2f} ms per token; now takes {ratio:.2f} of that in the median of turns"
        )
    if options.json:
        rounds = {version: [asdict(one) for one in counted] for version, counted in found.items()}
        document = {"machine": machine, "command": command, "rounds": rounds}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
