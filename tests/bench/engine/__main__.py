"""What the stage engine costs beside transformers, and what batches and shared prefixes save: `make bench-engine`, or
`python tests/bench/engine [--only CASES]`.

A random Llama of hidden size 512 and 8 layers in float32, in this process, on two threads. Every figure is a ratio of
measurements that take turns within the run, because the machine's speed drifts: the fastest step of each, over rounds.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bench.engine.engine_decoding import report_decoding
from bench.engine.engine_memory import report_memory
from bench.engine.engine_mixing import report_mixing
from bench.engine.engine_products import report_products
from bench.engine.engine_quantization import report_quantization
from bench.tables import Table
from bench.this_machine import processor
from support.models.circuit_runs import Circuit, Run, engine_with, start_run, start_sharing, step_runs
from support.models.tiny_models import load_reference
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from molink.shards.batching.engine import Engine
from molink.shards.spec import Span

WHOLE = Span(0, 8)
PROMPT = tuple(range(40, 72))
PREFIX_TOKENS = 1000
DECODES = 32
OVERHEAD_BAR = 1.05
"""Milliseconds per token over those of a plain loop around transformers' forward."""
BATCH_BARS = {8: 4.5, 32: 8.0}
"""Tokens per second of a batch over those of one session after the other."""
HIT_BAR = 0.1
"""Time to the first token behind a prefix that is there, over that behind one that is not."""


def make_llama(folder: Path) -> None:
    """A random Llama of hidden size 512 and 8 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=16384, eos_token_id=1, bos_token_id=0, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def least_s(times: int, action: Callable[[], None]) -> float:
    """Seconds of the fastest of so many: what else the machine does comes and goes."""
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


class Bench:
    """A model in an engine and in transformers."""

    def __init__(self, engine: Engine, model: PreTrainedModel, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.engine = engine
        self.model = model
        self.rounds = rounds
        self.circuit: Circuit = [(engine, WHOLE)]

    def in_turns(self, *ways: Callable[[], float]) -> list[float]:
        """The least seconds of each, which take turns; one round is not counted."""
        taken = [[way() for way in ways] for _ in range(self.rounds + 1)][1:]
        return [min(times) for times in zip(*taken, strict=True)]

    def decode_s(self, sessions: int) -> float:
        """The least seconds of a step of a batch, each in a context of 32 to 64 tokens."""
        runs = [start_run(self.circuit, PROMPT, DECODES + 1) for _ in range(sessions)]
        step_runs(self.circuit, runs)
        return least_s(DECODES, lambda: step_runs(self.circuit, runs))

    @torch.inference_mode()
    def forward_s(self) -> float:
        """The least seconds of a decode step of transformers' own forward, the same contexts."""
        out = self.model(input_ids=torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)
        cache, token = out.past_key_values, int(out.logits[0, -1].argmax())

        def step() -> None:
            nonlocal token
            out = self.model(input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            token = int(out.logits[0, -1].argmax())

        return least_s(DECODES, step)

    def first_token_s(self, text: tuple[int, ...], *, there: bool) -> float:
        """Seconds from the prompt to its first token: the text and 16 tokens that were never seen."""
        if not there:
            self.engine.pool.forget(WHOLE)
        fresh = tuple(time.perf_counter_ns() // 1024**place % 1024 for place in range(16))
        began_s = time.perf_counter()
        run: Run = start_sharing(self.circuit, text + fresh, 1)
        step_runs(self.circuit, [run])
        return time.perf_counter() - began_s


def overhead(bench: Bench, table: Table) -> None:
    """The whole model as one span, one session, beside a plain loop around transformers' forward."""
    ours_s, theirs_s = bench.in_turns(lambda: bench.decode_s(1), bench.forward_s)
    table.note("engine", f"{ours_s * 1000:.2f} ms per token", ms=ours_s * 1000)
    table.note("transformers' forward", f"{theirs_s * 1000:.2f} ms per token", ms=theirs_s * 1000)
    table.judge("engine over transformers", ours_s / theirs_s, "times", OVERHEAD_BAR)


def batches(bench: Bench, table: Table) -> None:
    """Decode steps of 8 and 32 sessions, beside one session after the other."""
    sizes = (1, *BATCH_BARS)
    alone_s, *together_s = bench.in_turns(*(lambda size=size: bench.decode_s(size) for size in sizes))
    table.note("1 session", f"{alone_s * 1000:.2f} ms per step", ms=alone_s * 1000)
    for (size, bar), taken_s in zip(BATCH_BARS.items(), together_s, strict=True):
        table.note(f"{size} sessions", f"{taken_s * 1000:.2f} ms per step", ms=taken_s * 1000)
        table.judge(f"{size} sessions over serial", size * alone_s / taken_s, "times", bar, least=True)


def prefix_hits(bench: Bench, table: Table) -> None:
    """A prompt of 1,000 tokens that were prefilled before, and 16 new ones."""
    text = tuple(7 * at * at % 1024 for at in range(PREFIX_TOKENS))
    miss_s, hit_s = bench.in_turns(
        lambda: bench.first_token_s(text, there=False), lambda: bench.first_token_s(text, there=True)
    )
    table.note("miss", f"{miss_s * 1000:.1f} ms to the first token", ms=miss_s * 1000)
    table.note("hit", f"{hit_s * 1000:.1f} ms to the first token", ms=hit_s * 1000)
    table.judge("hit over miss", hit_s / miss_s, "times", HIT_BAR)


def mixing(bench: Bench, table: Table) -> None:
    """Decode steps beside a prompt of 8,000 tokens, which is computed in pieces as a peer does it."""
    report_mixing(bench.engine, bench.folder, WHOLE, table)


def padded(bench: Bench, table: Table) -> None:
    """Decode steps of 8 sessions of a model whose own attention runs, on left-padded rows: a Falcon."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = FalconConfig(
            vocab_size=1024, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, alibi=False,
            ffn_hidden_size=2112, eos_token_id=1, bos_token_id=0, dtype="float32",
        )  # fmt: skip
        FalconForCausalLM(config).save_pretrained(folder)
        other = Bench(engine_with(Path(folder), (0, 8)), bench.model, Path(folder), bench.rounds)
        one_s, eight_s = other.in_turns(lambda: other.decode_s(1), lambda: other.decode_s(8))
    table.note("1 session", f"{one_s * 1000:.2f} ms per step", ms=one_s * 1000)
    table.note("8 sessions", f"{eight_s * 1000:.2f} ms per step", ms=eight_s * 1000)
    table.note("8 sessions over serial", f"{8 * one_s / eight_s:.2f} times", figure=8 * one_s / eight_s)


def memory(_: Bench, table: Table) -> None:
    """Resident memory that loading a span and one step add to a process that has imported everything."""
    report_memory(table)


def quantization(bench: Bench, table: Table) -> None:
    """Steps and memory of weights in float32, bfloat16, int8 and nf4."""
    report_quantization(table, bench.in_turns, least_s)


def products(bench: Bench, table: Table) -> None:
    """Steps at real widths, over bfloat16 and over the memory's speed."""
    report_products(table, bench.in_turns, least_s)


def decoding(bench: Bench, table: Table) -> None:
    """Whole decode steps of a Llama of 1B, one session and eight, in every form."""
    report_decoding(table, bench.in_turns, least_s)


CASES = {
    "overhead": overhead,
    "batches": batches,
    "prefix": prefix_hits,
    "mixing": mixing,
    "padded": padded,
    "memory": memory,
    "quantization": quantization,
    "products": products,
    "decoding": decoding,
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of every measurement (5)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (2)")
    parser.add_argument("--json", type=Path, help="writes every number there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    machine = f"{processor()}, torch {torch.__version__}, {platform.system()} {platform.release()}{load}"
    command = f"python tests/bench/engine {' '.join(sys.argv[1:])}"
    print(f"{machine}\n{command}", flush=True)
    cases: dict[str, object] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder))
        bench = Bench(
            engine_with(Path(folder), (0, 8)), load_reference(Path(folder)), Path(folder), options.rounds
        )
        for name in options.only or CASES:
            print(f"\n{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
            table = Table()
            CASES[name](bench, table)
            cases[name] = table.rows
            missed += [f"{name}: {row['name']}" for row in table.rows if row.get("held") is False]
    if options.json:
        document = {"machine": machine, "command": command, "cases": cases}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\nmissed: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
