"""Many sessions on one circuit, with guesses and without in turns: what these take from throughput where engines are
full, and from sessions that want none.

Each session generates one text after another until its turn is over, so that as many share the circuit at any time:
were each to end after a number of tokens, those that guess well would leave the engines to the others.
"""

import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise

import psutil
from bench.tables import Table

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest, Speculation
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.core.generations import recorded_generations

OFF = Speculation(wanted=False)
TIMEOUT_S = 60.0
WARM_S = 3.0
"""Of a turn: what comes in it is not counted, until all sessions decode."""
PROMPT_TOKENS, NEW_TOKENS = 24, 192
SCOPE_BYTES = 16
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
THROUGHPUT_BAR, BESIDE_BAR = 0.98, 1.15
GUESSING = 8
"""Sessions with guesses beside those without."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one turn."""

    tokens_per_s: float
    busy_ms: float
    """What a token took of processors, at all peers together."""
    gaps_s: tuple[tuple[float, ...], ...]
    """Of each session: between the trips that brought its tokens."""


class Crowd:
    """Sessions that share a circuit for one turn after another."""

    def __init__(
        self,
        connection: SwarmConnection,
        spec: ModelSpec,
        peers: Sequence[int],
        turn_s: float,
        *,
        greedy: bool,
    ) -> None:
        """`peers` are the numbers of their processes."""
        self._connection, self._spec, self._turn_s = connection, spec, turn_s
        self._peers = [psutil.Process(one) for one in peers]
        self._params = SamplingParams(
            max_new_tokens=NEW_TOKENS, ignore_eos=True, **({} if greedy else SAMPLED)
        )
        self._rng = random.Random(5)

    async def turn(self, wanted: Sequence[bool]) -> Turn:
        """As many sessions, each with guesses or without."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        until_s = began_s + WARM_S + self._turn_s
        busy_s = self._busy_s()
        came = await asyncio.gather(*(self._session(guesses, until_s) for guesses in wanted))
        busy_s = self._busy_s() - busy_s
        counted = [
            [[at_s for at_s in arrived if began_s + WARM_S <= at_s < until_s] for arrived in texts]
            for texts in came
        ]
        tokens = sum(len(arrived) for texts in counted for arrived in texts)
        gaps = [
            tuple(two - one for arrived in texts for one, two in pairwise(arrived) if two > one)
            for texts in counted
        ]
        all_tokens = sum(len(arrived) for texts in came for arrived in texts)
        return Turn(tokens / self._turn_s, 1000 * busy_s / all_tokens, tuple(gaps))

    def _busy_s(self) -> float:
        return sum(sum(one.cpu_times()[:2]) for one in self._peers)

    async def _session(self, guesses: bool, until_s: float) -> list[list[float]]:
        """When tokens came, text by text. No text's prompt comes twice, nor does one know another's."""
        clock, texts = asyncio.get_running_loop().time, list[list[float]]()
        while clock() < until_s:
            recorded = self._rng.choice(recorded_generations()).generated
            begin = self._rng.randrange(len(recorded) - PROMPT_TOKENS)
            prompt = recorded[begin : begin + PROMPT_TOKENS]
            asked = SessionRequest(
                prompt,
                replace(self._params, seed=self._rng.randrange(1 << 30)),
                partners=False,
                speculation=Speculation(scope=os.urandom(SCOPE_BYTES)) if guesses else OFF,
            )
            session = ClientSession(CircuitBuilder(self._connection, self._spec), asked)
            async with aclosing(session.tokens(TIMEOUT_S)) as tokens:
                async for _ in tokens:
                    if clock() >= until_s:
                        break
            texts.append(session.log.arrived_s)
        return texts


async def measure_full(table: Table, crowd: Crowd, name: str, sessions: int, rounds: int) -> None:
    """Tokens a second with guesses over those without. What a token takes of processors says the same where other work
    shares them, which moves rates by half."""
    ratios, busy = [], []
    for _ in range(rounds):
        off = await crowd.turn([False] * sessions)
        on = await crowd.turn([True] * sessions)
        ratios.append(on.tokens_per_s / off.tokens_per_s)
        busy.append(on.busy_ms / off.busy_ms)
        rates = f"{off.tokens_per_s:.1f} and {on.tokens_per_s:.1f} tokens/s"
        table.note(
            f"{name}, a turn", f"{rates}, {off.busy_ms:.2f} and {on.busy_ms:.2f} ms of processors a token"
        )
    ratio = statistics.median(ratios)
    table.note(f"{name}: processors a token over off", f"{statistics.median(busy):.3f}", ratios=busy)
    table.judge(f"{name}: throughput over off", ratio, "", THROUGHPUT_BAR, least=True, ratios=ratios)


async def measure_beside(table: Table, crowd: Crowd, name: str, without: int, rounds: int) -> None:
    """What the slowest of a hundred trips takes of sessions without guesses beside GUESSING with, over that where none
    has any."""
    slow: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for guesses in (False, True):
            turn = await crowd.turn([*[False] * without, *[guesses] * GUESSING])
            slow[guesses] += [gap_s for gaps in turn.gaps_s[:without] for gap_s in gaps]
    alone_s, beside_s = (statistics.quantiles(slow[guesses], n=100)[-1] for guesses in (False, True))
    table.judge(
        f"{name}: p99 between trips beside {GUESSING} with", beside_s / alone_s, "", BESIDE_BAR,
        alone_ms=1000 * alone_s, beside_ms=1000 * beside_s,
    )  # fmt: skip
