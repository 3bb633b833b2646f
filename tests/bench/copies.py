"""What copies cost while nobody is lost, and what a loss costs without them: `python tests/bench/copies.py
[--turns 6] [--mbps 100 --delay-ms 30]`.

The swarm is that of `failover.py`. Time per token with copies and without in turns; then, without copies, the pause in
which a circuit with another peer computes a thousand tokens again, beside the plain prefill of as many.
"""

import argparse
import asyncio
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.failover import SPANS, STRUCK_AFTER, TIMEOUT_S, Pairs
from bench.tables import Table
from bench.this_machine import processor

from molink.client.circuit.session_request import Speculation
from molink.shards.spec import ModelSpec
from molink.simnet.emulate.serving import spec_of

NEW_TOKENS = 192
LONG_PROMPT = 1000 - STRUCK_AFTER
"""With the tokens that come before its peer is killed a thousand are computed again."""
AFTER_LOSS = 20
TPOT_BAR, RECOMPUTED_BAR, RECOMPUTED_REST_S = 1.05, 1.3, 1.0


async def tpot_s(pairs: Pairs, turn: int, *, partners: bool) -> tuple[float, float]:
    """Time per token after the first, of one generation without guesses, which are right more often for one prompt than
    for another; and what the peers' processors take for each."""
    speculation = Speculation(wanted=False)
    session = pairs.session(pairs.prompt(turn), NEW_TOKENS, partners=partners, speculation=speculation)
    before_s = pairs.processor_s()
    came_s = [time.perf_counter() async for _ in session.tokens(TIMEOUT_S)]
    computed_s = (pairs.processor_s() - before_s) / len(came_s)
    return (came_s[-1] - came_s[0]) / (len(came_s) - 1), computed_s


async def plain_prefill_s(pairs: Pairs, turn: int) -> float:
    """From the start on a ready circuit to the first token."""
    session = pairs.session(pairs.prompt(turn, 1000), 1, partners=False)
    async for _ in session.tokens(TIMEOUT_S):
        pass
    return session.log.prefill_s


async def recomputed_s(pairs: Pairs, turn: int) -> tuple[float, int]:
    """The longest wait for a token since a peer was killed, and how many tokens were computed again."""
    session = pairs.session(pairs.prompt(turn, LONG_PROMPT), STRUCK_AFTER + AFTER_LOSS, partners=False)
    came_s, _ = await pairs.struck(session, turn % SPANS, pairs.kill)
    longest_s = max(after - before for before, after in pairwise(came_s[STRUCK_AFTER - 1 :]))
    return longest_s, session.log.recoveries[-1].recomputed_tokens


async def measure(table: Table, spec: ModelSpec, options: argparse.Namespace) -> None:
    """Both, in one swarm."""
    async with Pairs(spec, options.mbps, options.delay_ms) as pairs:
        with_s, without_s, computed_with_s, computed_without_s = [], [], [], []
        await tpot_s(pairs, 0, partners=True)
        for turn in range(1, options.turns + 1):
            # who is first takes turns, too
            for partners in (True, False) if turn % 2 else (False, True):
                found_s, computed_s = await tpot_s(pairs, 2 * turn + partners, partners=partners)
                (with_s if partners else without_s).append(found_s)
                (computed_with_s if partners else computed_without_s).append(computed_s)
        ratios = [one / other for one, other in zip(with_s, without_s, strict=True)]
        table.note("TPOT with copies; without, medians", f"{_ms(with_s)}; {_ms(without_s)} ms")
        table.note("processors a token", f"{_ms(computed_with_s)}; {_ms(computed_without_s)} ms")
        table.note("in turns, over each other", " ".join(f"{ratio:.3f}" for ratio in ratios))
        ratio = statistics.median(with_s) / statistics.median(without_s)
        table.judge("TPOT with copies over without", ratio, "", TPOT_BAR if options.mbps else 1.03)
        if not options.losses:
            return
        plain_s, again_s, tokens = [], [], []
        for turn in range(100, 100 + options.losses):
            plain_s.append(await plain_prefill_s(pairs, 2 * turn))
            longest_s, computed = await recomputed_s(pairs, 2 * turn + 1)
            again_s.append(longest_s)
            tokens.append(computed)
        table.note("plain prefill of 1,000; pause without a copy", f"{_ms(plain_s)}; {_ms(again_s)} ms")
        table.note("tokens computed again", " ".join(map(str, tokens)))
        over = [(again - RECOMPUTED_REST_S) / plain for again, plain in zip(again_s, plain_s, strict=True)]
        table.judge("(pause - 1 s) over plain prefill", statistics.median(over), "", RECOMPUTED_BAR)


def _ms(found_s: list[float]) -> str:
    return f"{1000 * statistics.median(found_s):.1f}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="generations with copies, and without (6)")
    parser.add_argument("--losses", type=int, default=3, help="without copies (3)")
    parser.add_argument("--mbps", type=float, help="of each home's uplink (none: loopback)")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way, with --mbps (30)")
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/copies.py {' '.join(sys.argv[1:])}", flush=True)
    asyncio.run(measure(Table(), spec_of("real", None, "", 1), options))


if __name__ == "__main__":
    main()
