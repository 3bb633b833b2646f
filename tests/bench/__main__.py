"""The speed of a swarm on this machine, beside transformers in the same run: `make bench`.

Peers are real processes on loopback. Every figure is a ratio or a difference of interleaved measurements, because the
machine's speed drifts; medians over rounds, without guesses, so that a token is a trip. Prints a table, and with --json
the numbers.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from support.models.random_llama import Widths, write_random_llama
from support.models.tiny_models import load_reference
from transformers import PreTrainedModel

from molink import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.shards.checkpoint import catalog

PROMPT = tuple(range(40, 72))
TOKENS = 96
BUNDLED = "molink/tiny-shakespeare"
LLAMA = Widths(hidden=512, inner=1408, layers=8, heads=8, key_heads=8)


@dataclass(frozen=True, slots=True)
class OnePeer:
    """One peer over loopback against transformers' generate."""

    model: str
    generate_ms: float
    swarm_ms: float
    ratio: float
    """Median over rounds of (swarm's TPOT / generate's)."""


@dataclass(frozen=True, slots=True)
class Hops:
    """What hops cost beside their compute."""

    hops: int
    tpot_ms: float
    compute_ms: float
    overhead_ms: float
    """Median over rounds of TPOT less the compute of all hops."""


def generate_tpot_ms(model: PreTrainedModel) -> float:
    """Milliseconds per output token of transformers' own greedy generate, its prefill taken off."""
    ids = torch.tensor([PROMPT])

    def timed(count: int) -> float:
        started_s = time.perf_counter()
        model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
        return time.perf_counter() - started_s

    return (timed(TOKENS) - timed(1)) * 1000 / (TOKENS - 1)


async def swarm_tpot_ms(swarm: AsyncSwarm) -> float:
    generation = await swarm.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
    return generation.tpot_s * 1000


async def measure_one_peer(name: str, folder: Path, rounds: int) -> OnePeer:
    model = load_reference(folder)
    async with LocalSwarm() as local:
        peer = await local.join(
            "alone", "--model", str(folder), "--layers", f"0:{model.config.num_hidden_layers}"
        )
        async with AsyncSwarm(str(folder), initial_peers=[peer.address], speculation="off") as swarm:
            await swarm_tpot_ms(swarm)
            generate_tpot_ms(model)
            pairs = [(generate_tpot_ms(model), await swarm_tpot_ms(swarm)) for _ in range(rounds)]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    theirs_ms, ours_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
    return OnePeer(name, theirs_ms, ours_ms, ratio)


async def measure_hops(rounds: int, most: int = 4) -> list[Hops]:
    """The bundled model over 1 to `most` peers, each count in a swarm of its own, measured in turn."""
    folder = catalog.resolve(BUNDLED)
    layers = 12
    async with LocalSwarm() as local:
        swarms: list[tuple[AsyncSwarm, int]] = []
        try:
            for count in range(1, most + 1):
                first = None
                for hop in range(count):
                    span = f"{hop * layers // count}:{(hop + 1) * layers // count}"
                    known = [first.address] if first is not None else []
                    peer = await local.join(
                        f"peer-{count}-{hop}", "--model", str(folder), "--layers", span, initial_peers=known
                    )
                    first = first or peer
                assert first is not None
                swarm = AsyncSwarm(str(folder), initial_peers=[first.address], speculation="off")
                swarms.append((await swarm.__aenter__(), count))
            samples: dict[int, list[tuple[float, float]]] = {count: [] for _, count in swarms}
            for _ in range(rounds):
                for swarm, count in swarms:
                    explanation = await swarm.explain(PROMPT, max_new_tokens=TOKENS, ignore_eos=True)
                    assert len(explanation.hops) == count
                    compute_ms = sum(hop.measured_compute_ms for hop in explanation.hops)
                    samples[count].append((explanation.measured_tpot_ms, compute_ms))
        finally:
            for swarm, _ in swarms:
                await swarm.__aexit__(None, None, None)
    return [_hops(count, pairs) for count, pairs in samples.items()]


def _hops(count: int, pairs: list[tuple[float, float]]) -> Hops:
    return Hops(
        count,
        statistics.median(tpot for tpot, _ in pairs),
        statistics.median(compute for _, compute in pairs),
        statistics.median(tpot - compute for tpot, compute in pairs),
    )


def machine() -> str:
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread(s) in every process"
    )


async def run(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as folder:
        llama = Path(folder) / "llama-512x8"
        write_random_llama(llama, LLAMA)
        one_peer = [
            await measure_one_peer(BUNDLED, catalog.resolve(BUNDLED), rounds),
            await measure_one_peer("random llama 512 x 8", llama, rounds),
        ]
    hops = await measure_hops(rounds)
    added_ms = {each.hops: (each.overhead_ms - hops[0].overhead_ms) / (each.hops - 1) for each in hops[1:]}
    return {
        "machine": machine(),
        "command": f"python tests/bench --rounds {rounds}",
        "one_peer": [asdict(each) for each in one_peer],
        "hops": [asdict(each) for each in hops],
        "added_ms_per_further_hop": added_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments.rounds))
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['machine']}\n{result['command']}\n")
    print("One peer over loopback, ms per output token (limit of the ratio: 1.15)")
    for each in result["one_peer"]:
        print(
            f"  {each['model']:<26} generate {each['generate_ms']:6.2f}   swarm {each['swarm_ms']:6.2f}   "
            f"ratio {each['ratio']:.3f}"
        )
    print("Hops over loopback, ms per output token (limit: 1 ms for each further hop beyond its compute)")
    for each in result["hops"]:
        added = result["added_ms_per_further_hop"].get(each["hops"])
        print(
            f"  {each['hops']} hops   TPOT {each['tpot_ms']:6.2f}   compute {each['compute_ms']:6.2f}   "
            f"rest {each['overhead_ms']:5.2f}"
            + (f"   per further hop {added:.2f}" if added is not None else "")
        )


if __name__ == "__main__":
    main()
