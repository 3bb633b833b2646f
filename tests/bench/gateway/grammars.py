"""What a grammar costs a token: `python tests/bench/gateway/grammars.py [--only swarm|masks]`.

`swarm`: four real peers, the bundled model, generations under a JSON schema and without in turns, guesses off on both
sides, the same number of tokens each; first on this machine alone, whose cores the mask's process shares with all hops,
then behind emulated home lines. `masks`: one mask of a vocabulary of 128,000, as the tail's
process computes it, while texts of random schemas are followed; the tokens are byte-level pieces of words, invented but
as long as those of large models.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.tables import Table
from bench.this_machine import processor
from support.models.random_schemas import random_schema
from support.swarms.live_swarms import BUNDLED, free_ports

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.shards.grammar import Grammar
from molink.shards.text.token_masks import MaskTokenizer, TokenMasks
from molink.shards.text.tokenizer import Tokenizer
from molink.simnet.emulate.processes.child_process import LinesProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration

SPANS: Final = ("0:3", "3:6", "6:9", "9:12")
NEW_TOKENS: Final = 100
PROMPT: Final = "KING RICHARD III:\n"
MBPS, DELAY_MS = 100.0, 30.0
TPOT_BAR: Final = 1.02
SCHEMA: Final = {
    "type": "object",
    "properties": {"speech": {"type": "string", "minLength": 2000}},
    "required": ["speech"],
}
"""So long a text that every generation has all of its tokens."""
MASK_BAR_MS: Final = 1.0
VOCABULARY: Final = 128_000
SCHEMAS: Final = 40
MOST_TOKENS: Final = 120
SYLLABLES: Final = (
    "an ar as at be ca co de di do en er es ha he in is it la le li lo ma me na ne no on or ra re ri"
)


async def swarm(turns: int, table: Table) -> None:
    """TPOT under the schema over TPOT without: on one machine, and behind home lines."""
    async with LocalSwarm() as peers:
        for at, span in enumerate(SPANS):
            await peers.join(f"p{at}", "--model", BUNDLED, "--layers", span)
        async with AsyncSwarm(BUNDLED, initial_peers=peers.addresses, speculation="off") as client:
            await measure(client, turns, "on loopback", table)
    ports = free_ports(len(SPANS))
    lines = LinesProcess(LinesConfiguration(len(SPANS) + 1, MBPS, DELAY_MS))
    async with lines, LocalSwarm() as peers:
        await lines.settle([*([f"127.0.0.1:{port}"] for port in ports), ()])
        for at, (span, port) in enumerate(zip(SPANS, ports, strict=True)):
            behind = ("--grpc-port", str(port), "--http-proxy", lines.proxies[at], "--partner", "off")
            await peers.join(f"q{at}", "--model", BUNDLED, "--layers", span, *behind)
        os.environ["MOLINK_HTTP_PROXY"] = lines.proxies[-1]
        async with AsyncSwarm(BUNDLED, initial_peers=peers.addresses, speculation="off") as client:
            await measure(client, turns, f"at {MBPS:g} Mbps, {DELAY_MS:g} ms", table)


async def measure(client: AsyncSwarm, turns: int, where: str, table: Table) -> None:
    """In turns, after one that is not counted."""
    ways: dict[str, Grammar | None] = {"without": None, "schema": Grammar.json_schema(SCHEMA)}
    took_ms: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, grammar in ways.items():
            found = await client.generate(
                PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.8, seed=turn, grammar=grammar
            )
            if len(found.token_ids) < NEW_TOKENS or len(found.circuit.hops) != len(SPANS):
                raise RuntimeError(f"{len(found.token_ids)} tokens over {len(found.circuit.hops)} hops")
            if turn:
                took_ms[way].append(1000 * found.tpot_s)
    without, under = (statistics.median(times) for times in took_ms.values())
    text = f"{without:.2f}, under the schema {under:.2f} ms"
    table.note(f"TPOT over {len(SPANS)} hops {where}", text, **took_ms)
    table.judge(f"under a JSON schema over without, {where}", under / without, "times", TPOT_BAR)


def masks(table: Table) -> None:
    """The time of one mask, over all tokens of texts of random schemas."""
    plain = large_tokenizer()
    tokenizer = MaskTokenizer(plain, VOCABULARY, [0])
    draw, taken_ms = random.Random(0), list[float]()
    for seed in range(SCHEMAS):
        following = TokenMasks(tokenizer, Grammar.json_schema(random_schema(seed)))
        for _ in range(MOST_TOKENS):
            began_s = time.perf_counter()
            mask, ends = following.next()
            taken_ms.append(1000 * (time.perf_counter() - began_s))
            if ends:
                break
            allowed = [at for at in draw.sample(range(1, VOCABULARY), 4000) if mask[at // 8] >> at % 8 & 1]
            bits = int.from_bytes(mask, "little") & ~1
            following.follow([draw.choice(allowed) if allowed else (bits & -bits).bit_length() - 1])
    taken_ms.sort()
    p99 = taken_ms[int(0.99 * len(taken_ms))]
    table.note(
        f"{len(taken_ms)} masks of {VOCABULARY:,} tokens",
        f"median {statistics.median(taken_ms):.3f}, p99 {p99:.3f}, longest {taken_ms[-1]:.2f} ms",
    )
    table.judge("p99 of a mask", p99, "ms", MASK_BAR_MS)


def large_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose tokens are bytes, and words of one to five syllables with and without a space."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = {byte: 256 + at for at, byte in enumerate(sorted(set(range(256)) - set(letters)))}
    alphabet = [chr(others.get(byte, byte)) for byte in range(256)]
    tokens = ["<end>", *alphabet]
    known, merges = set(tokens), list[list[str]]()
    syllables = SYLLABLES.split()
    space = chr(others[32])
    for pair in itertools.chain.from_iterable(
        ([first, second] for second in alphabet[97:123]) for first in (*alphabet[97:123], space)
    ):
        merged = "".join(pair)
        if merged not in known:
            known.add(merged)
            tokens.append(merged)
            merges.append(pair)
    draw = random.Random(1)
    words = [one for one in tokens if len(one) > 1 and one != "<end>"]
    while len(tokens) < VOCABULARY:
        pair = [draw.choice(words), draw.choice(syllables)]
        merged = "".join(pair)
        if merged not in known and len(merged) <= 14:
            known.add(merged)
            tokens.append(merged)
            merges.append(pair)
            words.append(merged)
    described = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<end>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: at for at, token in enumerate(tokens)}, "merges": merges,
        },
    }  # fmt: skip
    return Tokenizer.from_files({"tokenizer.json": json.dumps(described).encode()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("swarm", "masks"))
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/gateway/grammars.py {' '.join(sys.argv[1:])}")
    table = Table()
    if options.only != "swarm":
        masks(table)
    if options.only != "masks":
        asyncio.run(swarm(options.turns, table))


if __name__ == "__main__":
    main()
