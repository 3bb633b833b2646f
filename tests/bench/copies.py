"""What copies cost while nobody is lost, and what a loss costs without them: `python tests/bench/copies.py
[--quads 12] [--mbps 100 --delay-ms 30]`.

The swarm is that of `failover.py`. Generations with copies and without follow each other in fours, with, without,
without, with, so that what changes slowly weighs on both alike; judged is the median of the fours' ratios, with the
interval in which it is in 95 of 100 such runs. Beside it what the processors took, which other work on the machine
changes least. Then, without copies, the pause in which a circuit with another peer computes a thousand tokens again,
beside the plain prefill of as many.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.failover import SPANS, STRUCK_AFTER, TIMEOUT_S, Pairs
from bench.tables import Table
from bench.this_machine import processor

from molink.client.circuit.session_request import Speculation
from molink.shards.spec import ModelSpec
from molink.simnet.emulate.serving import spec_of

NEW_TOKENS, COPIED_AFTER = 128, 32
"""Of a generation, and of these how many come before its copies run: time counts behind them."""
LONG_PROMPT = 1000 - STRUCK_AFTER
"""With the tokens that come before its peer is killed a thousand are computed again."""
AFTER_LOSS = 20
TPOT_BAR, LOOPBACK_BAR, RECOMPUTED_BAR, RECOMPUTED_REST_S = 1.05, 1.03, 1.3, 1.0
ROLES = ("head", "middle", "tail")
SURE = 0.95


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A generation that nothing befalls."""

    tpot_s: float
    """Behind COPIED_AFTER tokens."""
    processor_s: dict[str, float]
    """For each of those tokens, by role of the process: the hops, all other peers together, and the client."""


async def generate(pairs: Pairs, turn: int, *, partners: bool) -> Undisturbed:
    """Without guesses, which are right more often for one prompt than for another."""
    speculation = Speculation(wanted=False)
    session = pairs.session(pairs.prompt(turn), NEW_TOKENS, partners=partners, speculation=speculation)
    came_s: list[float] = []
    before: dict[str, float] = {}
    async for _ in session.tokens(TIMEOUT_S):
        came_s.append(time.perf_counter())
        if len(came_s) == COPIED_AFTER:
            before = pairs.processors_s()
    after = pairs.processors_s()
    route = session.log.route
    assert route is not None
    assert len(session.log.standbys) == (SPANS if partners else 0), "its copies are what is measured"
    roles = dict(zip(route.peer_ids, ROLES, strict=True))
    tokens = len(came_s) - COPIED_AFTER
    taken_s: dict[str, float] = defaultdict(float)
    for name, at_s in after.items():
        taken_s[roles.get(name, name if name == "client" else "others")] += (at_s - before[name]) / tokens
    return Undisturbed((came_s[-1] - came_s[COPIED_AFTER - 1]) / tokens, taken_s)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Between which of these values the median of what they are drawn from is in SURE of all cases, whatever that is
    (order statistics, the sign test's interval); all of them where they are too few."""
    ranked, count = sorted(values), len(values)
    outside = 0.0
    for place in range(count // 2):
        outside += 2 * comb(count, place) / 2**count
        if outside > 1 - SURE:
            return ranked[max(0, place - 1)], ranked[count - max(1, place)]
    return ranked[0], ranked[-1]


async def compare(pairs: Pairs, table: Table, quads: int, bar: float) -> None:
    """Rows of what copies cost a generation."""
    with_copies: list[Undisturbed] = []
    without: list[Undisturbed] = []
    await generate(pairs, 0, partners=True)
    for turn in range(1, 2 * quads, 2):
        # of one prompt each kind begins in half of the fours
        for partners, prompt in ((True, turn), (False, turn), (False, turn + 1), (True, turn + 1)):
            (with_copies if partners else without).append(await generate(pairs, prompt, partners=partners))
    for role in (*ROLES, "others", "client"):
        copied, plain = (
            1000 * statistics.fmean(one.processor_s[role] for one in kind) for kind in (with_copies, without)
        )
        table.note(f"processor a token, {role}: with; without", f"{copied:.2f}; {plain:.2f} ms")
    hops, plain_hops = (
        sum(one.processor_s[role] for one in kind for role in ROLES) for kind in (with_copies, without)
    )
    table.judge("processor of the hops, with over without", hops / plain_hops, "", bar)
    sums = [
        (before.tpot_s + after.tpot_s) for kind in (with_copies, without) for before, after in _pairs(kind)
    ]
    ratios = [copied / plain for copied, plain in zip(sums[:quads], sums[quads:], strict=True)]
    medians_ms = [1000 * statistics.median(one.tpot_s for one in kind) for kind in (with_copies, without)]
    least, most = interval_of_median(ratios)
    table.note("TPOT with; without, medians", f"{medians_ms[0]:.2f}; {medians_ms[1]:.2f} ms")
    table.note("fours, over each other", f"{least:.3f} to {most:.3f}, {len(ratios)} of them")
    table.judge("TPOT with copies over without, median", statistics.median(ratios), "", bar)


def _pairs(kind: Sequence[Undisturbed]) -> list[tuple[Undisturbed, Undisturbed]]:
    return list(zip(kind[::2], kind[1::2], strict=True))


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
        await compare(pairs, table, options.quads, TPOT_BAR if options.mbps else LOOPBACK_BAR)
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
    parser.add_argument("--quads", type=int, default=12, help="fours of generations, two with copies (12)")
    parser.add_argument("--losses", type=int, default=3, help="without copies (3)")
    parser.add_argument("--mbps", type=float, help="of each home's uplink (none: loopback)")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="one way, with --mbps (30)")
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/copies.py {' '.join(sys.argv[1:])}", flush=True)
    asyncio.run(measure(Table(), spec_of("real", None, "", 1), options))


if __name__ == "__main__":
    main()
