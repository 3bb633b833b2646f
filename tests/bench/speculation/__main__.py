"""What guessed tokens gain: `python tests/bench/speculation [--prompts 8] [--mbps 100 --delay-ms 30]`.

Three real peers that compute the bundled model, each behind an uplink of its own; a client generates after held-out
prompts, each without guesses and with, in turns. Printed is the time per output token with guesses over that without,
and tokens a trip. Each prompt comes once with guesses: a client's tables would know a second time by heart. Beside
them transformers' assisted generation from the text itself (prompt lookup), on the same prompts: its tokens a step.
Then 8 hops of a 70B model's shapes, in virtual time, with the recorded acceptance. Last many sessions at once: over
loopback, where they fill the engines, and sessions without guesses beside such with, there and behind lines.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bench.speculation.crowded import Crowd, measure_beside, measure_full
from bench.tables import Table
from bench.this_machine import processor
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, free_ports
from transformers import AutoModelForCausalLM

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest, Speculation
from molink.shards.grammar import Grammar
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.core.generations import recorded_generations
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import MODEL_SHAPES, even_spans
from molink.simnet.emulate.processes.child_process import LinesProcess
from molink.simnet.emulate.processes.lines import LinesConfiguration
from molink.simnet.emulate.serving import spec_of
from molink.simnet.serve.scenario import SOFTWARE_MS, Scenario, SimulatedStage
from molink.simnet.serve.served_as import ServedAs
from molink.simnet.serve.simulated import RequestLoad, simulate_serving

MODEL = Path(__file__).resolve().parents[3] / "shards/models/tiny-shakespeare"
DRAFT = f"{BUNDLED}-draft"
PEERS, TIMEOUT_S = 3, 60.0
BESIDE = 4
"""Sessions without guesses beside those with."""
WHAT = ("peers", "transformers", "large", "full", "beside")
OFF = Speculation(wanted=False)
GREEDY = SamplingParams(ignore_eos=True)
SAMPLED = SamplingParams(ignore_eos=True, temperature=0.8, top_p=0.9, seed=7)
ROSTER = r'(\{"name": "[A-Z][a-z]{2,7}", "house": "(York|Lancaster)", "age": [1-9][0-9]\}\n){200}'
BY_GRAMMAR = SamplingParams(grammar=Grammar.regex(ROSTER))
WRONG_EVERY = 10
LARGE, LARGE_HOPS = "llama-3.1-70b", 8


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt without guesses, and with."""

    off_s: float
    on_s: float
    tokens_per_trip: float
    same: bool
    """Whether both gave the same tokens."""


class Circuit:
    """One client of three peers."""

    def __init__(self, connection: SwarmConnection, spec: ModelSpec, new_tokens: int) -> None:
        self.connection, self._spec, self._new_tokens = connection, spec, new_tokens

    async def turn(self, prompt: Sequence[int], params: SamplingParams, *, predicts: bool) -> Turn:
        """Generates after the prompt, without guesses first."""
        off, off_s, _ = await self._generate(prompt, params, OFF)
        wrong = [1 if at % WRONG_EVERY == WRONG_EVERY // 2 else token for at, token in enumerate(off)]
        asked = Speculation(prediction=wrong if predicts else ())
        on, on_s, trips = await self._generate(prompt, params, asked)
        return Turn(off_s, on_s, len(on) / trips, on == off)

    async def _generate(
        self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation
    ) -> tuple[list[int], float, int]:
        params = replace(params, max_new_tokens=self._new_tokens)
        asked = SessionRequest(prompt, params, partners=False, speculation=speculation)
        session = ClientSession(CircuitBuilder(self.connection, self._spec), asked)
        tokens = [token.token_id async for token in session.tokens(TIMEOUT_S)]
        came_s = session.log.arrived_s
        return tokens, (came_s[-1] - came_s[0]) / (len(came_s) - 1), session.log.trips.trips


@asynccontextmanager
async def on_loopback(draft: str, spec: ModelSpec) -> AsyncIterator[tuple[SwarmConnection, list[int]]]:
    """Three peers of which the head guesses so, and a client, on one machine; with the peers' process numbers."""
    async with ForkedSwarm() as swarm:
        for number, span in enumerate(even_spans(spec.layers, PEERS)):
            joined = ["--model", BUNDLED, "--layers", f"{span.start}:{span.stop}", "--draft", draft]
            await swarm.join(f"peer-{number}", *joined, "--partner", "off")
        async with SwarmConnection(swarm.addresses, None) as connection:
            yield connection, [peer.process.pid for peer in swarm.peers]


@asynccontextmanager
async def opened(draft: str, spec: ModelSpec, options: argparse.Namespace) -> AsyncIterator[Circuit]:
    """Three peers of which the head guesses so, and a client, each behind a line."""
    ports = free_ports(PEERS)
    lines = LinesProcess(LinesConfiguration(PEERS + 1, options.mbps, options.delay_ms))
    async with lines, ForkedSwarm() as swarm:
        await lines.settle([*([f"127.0.0.1:{port}"] for port in ports), ()])
        for number, (span, port) in enumerate(zip(even_spans(spec.layers, PEERS), ports, strict=True)):
            joined = ["--model", BUNDLED, "--layers", f"{span.start}:{span.stop}", "--draft", draft]
            joined += ["--grpc-port", str(port), "--http-proxy", lines.proxies[number], "--partner", "off"]
            await swarm.join(f"peer-{number}", *joined)
        async with SwarmConnection(swarm.addresses, None, http_proxy=lines.proxies[-1]) as connection:
            yield Circuit(connection, spec, options.tokens)


async def measure(table: Table, spec: ModelSpec, options: argparse.Namespace) -> None:
    """A row for each way to guess."""
    recorded = [one.prompt for one in recorded_generations() if one.temperature == 0]
    prompts = [prompt[:8] for prompt in recorded[: options.prompts]]
    cases: list[tuple[str, str, SamplingParams, bool, float | None]] = [
        ("lookup", "lookup alone, greedy", GREEDY, False, 0.75),
        (DRAFT, "draft model, greedy", GREEDY, False, 0.45),
        (DRAFT, "draft model, temperature 0.8, top_p 0.9", SAMPLED, False, 0.65),
        ("lookup", "prediction nine tenths right, greedy", GREEDY, True, 0.3),
        ("lookup", "names and numbers by a grammar, greedy", BY_GRAMMAR, False, None),
    ]
    for draft in dict.fromkeys(draft for draft, *_ in cases):
        async with opened(draft, spec, options) as circuit:
            await circuit.turn(recorded[-1], GREEDY, predicts=False)
            for _, name, params, predicts, bar in [case for case in cases if case[0] == draft]:
                turns = [await circuit.turn(prompt, params, predicts=predicts) for prompt in prompts]
                judge(table, name, turns, bar)


def judge(table: Table, name: str, turns: Sequence[Turn], bar: float | None) -> None:
    """The row of one way to guess; without a bar nobody has asked for one."""
    ratio = sum(turn.on_s for turn in turns) / sum(turn.off_s for turn in turns)
    a_trip = statistics.fmean(turn.tokens_per_trip for turn in turns)
    more: dict[str, Any] = {
        "off_ms": 1000 * statistics.fmean(turn.off_s for turn in turns),
        "on_ms": 1000 * statistics.fmean(turn.on_s for turn in turns),
        "tokens_per_trip": a_trip,
    }
    if bar is None:
        table.note(f"{name}: TPOT over off", f"{ratio:.3f}", **more)
    else:
        table.judge(f"{name}: TPOT over off", ratio, "", bar, **more)
    same = sum(turn.same for turn in turns)
    table.note(f"{name}: tokens a trip", f"{a_trip:.2f}; {same} of {len(turns)} with the same tokens")


async def crowds(table: Table, spec: ModelSpec, options: argparse.Namespace) -> None:
    """Many sessions at once."""
    async with on_loopback("auto", spec) as (connection, pids):
        for name, greedy in (("greedy", True), ("temperature 0.8, top_p 0.9", False)):
            crowd = Crowd(connection, spec, pids, options.turn_s, greedy=greedy)
            if "full" in options.only:
                where = f"{options.sessions} over loopback, {name}"
                await measure_full(table, crowd, where, options.sessions, options.rounds)
            if "beside" in options.only:
                await measure_beside(table, crowd, f"loopback, {name}", BESIDE, options.rounds)
    if "beside" in options.only:
        async with opened("auto", spec, options) as circuit:
            crowd = Crowd(circuit.connection, spec, (), options.turn_s, greedy=False)
            await measure_beside(table, crowd, "behind lines", BESIDE, options.rounds)


@torch.inference_mode()
def assisted(table: Table, options: argparse.Namespace) -> None:
    """What transformers gets a step from prompt lookup."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    model.register_forward_hook(count)
    recorded = [one.prompt[:8] for one in recorded_generations() if one.temperature == 0]
    for name, sampling in (
        ("greedy", {}),
        ("sampled", {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
    ):
        steps = tokens = 0
        for prompt in recorded[: options.prompts]:
            torch.manual_seed(7)
            ids = torch.tensor([prompt])
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=4, max_matching_ngram_size=3,
                max_new_tokens=options.tokens, min_new_tokens=options.tokens, pad_token_id=1,
                do_sample=sampling.get("do_sample", False), **{k: v for k, v in sampling.items() if k != "do_sample"},
            )  # fmt: skip
            tokens += made.shape[1] - len(prompt)
        table.note(f"transformers' prompt lookup, {name}: tokens a step", f"{tokens / steps:.2f}")


def large(table: Table) -> None:
    """Many hops of large layers in virtual time: one session, and 16."""
    shape = MODEL_SHAPES[LARGE]
    stages = tuple(SimulatedStage(DEVICES["rtx-4090"], span) for span in even_spans(shape.layers, LARGE_HOPS))
    scenario = Scenario(shape, stages, 100.0, 30.0, SOFTWARE_MS)
    for sessions, bar in ((1, 0.5), (16, 0.75)):
        trace = tuple(TraceRequest(1e-3 * at, 32, 200) for at in range(sessions))
        taken_s = {}
        for speculation in ("off", "auto", "draft"):
            load = RequestLoad(trace, sessions / 1000, 0.0, 1000.0)
            served_as = ServedAs("molink", None, speculation)
            ended = simulate_serving(scenario, "molink", served_as, load).outcomes[:sessions]
            taken_s[speculation] = statistics.fmean((one.token_s[-1] - one.token_s[0]) / 199 for one in ended)
        name = f"{LARGE} on {LARGE_HOPS} hops, {sessions} at once"
        table.note(f"{name}, lookup alone", f"{taken_s['auto'] / taken_s['off']:.3f}")
        table.judge(f"{name}, draft model", taken_s["draft"] / taken_s["off"], "", bar, **taken_s)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="of the held-out ones (8)")
    parser.add_argument("--tokens", type=int, default=160, help="to generate after each (160)")
    parser.add_argument("--mbps", type=float, default=100.0, help="of each uplink (100)")
    parser.add_argument("--delay-ms", type=float, default=30.0, help="from each to each, one way (30)")
    parser.add_argument("--only", nargs="+", default=list(WHAT), choices=WHAT)
    parser.add_argument("--sessions", type=int, default=32, help="that fill the engines (32)")
    parser.add_argument("--turn-s", type=float, default=10.0, help="that many sessions are counted for (10)")
    parser.add_argument("--rounds", type=int, default=3, help="of turns of many sessions (3)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(f"{processor()}\npython tests/bench/speculation {' '.join(sys.argv[1:])}", flush=True)
    table = Table()
    if "peers" in options.only:
        asyncio.run(measure(table, spec_of("real", None, "", 1), options))
    if "transformers" in options.only:
        assisted(table, options)
    if "large" in options.only:
        large(table)
    if {"full", "beside"} & {*options.only}:
        asyncio.run(crowds(table, spec_of("real", None, "", 1), options))
    if options.json:
        print(json.dumps(table.rows))


if __name__ == "__main__":
    main()
