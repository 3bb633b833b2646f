"""How fast one GPU decodes and prefills Llama 3 8B's shapes with random weights: `make bench-engine-gpu`, or
`python tests/bench/engine/engine_gpu.py [--only CASES]`.

It needs torch, transformers and this checkout, nothing else: the package `molink` need not be installed. `--tiny` runs
every case with a tiny model on a processor, where only that it runs means something.
"""

import argparse
import importlib.machinery
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if importlib.machinery.PathFinder.find_spec("molink") is None:
    package = types.ModuleType("molink")
    # The folders at the top of the checkout are the package's, and what lies in public/ is in it.
    package.__path__ = [str(CHECKOUT), str(CHECKOUT / "public")]
    sys.modules["molink"] = package

import torch
from bench.tables import Table
from support.devices.paged_reference import decoding_here
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from molink.shards.attention.attention import IMPLEMENTATION, BatchSlot
from molink.shards.batching.decode import Decoding, decoding_on
from molink.shards.batching.engine import Engine, Rows
from molink.shards.kernels.fused import fused_on, install_fused
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.model.later_packing import LaterWork
from molink.shards.model.probe import ProbeBatch
from molink.shards.model.stage import Stage, StageFacts, View, shorten_lookups
from molink.shards.spec import ModelSpec, Span

ALONE_BAR = 1.35
"""Time of a token over that to read the weights once, at the bandwidth of a copy."""
BATCH_BAR = 35.0
"""Tokens per second of 64 sessions over those of one."""
LEAST_DIFFERENCE = 1e-5
"""Of logits over logits, however little rounding does."""
GUESSED = 4
"""Tokens that are guessed beside the last one."""
GUESSES_BAR = 1.1
"""Time of a step of so many rows of one session and the last token's over that of one row."""
PEERS_BAR = 1.25
"""Time of a token through four engines, each with a quarter of the layers and through the host, over one engine's."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured with."""

    config: LlamaConfig
    dtype: str
    batch: int
    context: int
    """Tokens that a decoding session has before."""
    prompt: int
    chunk: int
    steps: int
    copied_bytes: int


def llama(layers: int, hidden: int, inner: int, heads: int, vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=heads // 4, vocab_size=vocabulary, max_position_embeddings=8192 + 256,
        tie_word_embeddings=False, attn_implementation=IMPLEMENTATION,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip


FULL = Scale(llama(32, 4096, 14336, 32, 128_256), "bfloat16", 64, 256, 8000, 1000, 64, 2 << 30)
TINY = Scale(llama(4, 32, 48, 4, 64), "float32", 3, 20, 32, 16, 2, 1 << 16)


class Bench:
    """A random model on one device."""

    def __init__(self, scale: Scale, device: str, decoding: Decoding | None) -> None:
        self.scale = scale
        self.device = device
        self.decoding = decoding
        self.layers = scale.config.num_hidden_layers
        self.whole = Span(0, self.layers)
        self.model = random_model(scale, device)
        self.stage = whole_stage(self.model, scale, device)

    def engine(self, *spans: Span, decoding: Decoding | None) -> Engine:
        """One that holds these layers, which all engines of this process share."""
        engine = Engine(spec_of(self.stage, self.scale.dtype), self.device, decoding=decoding)
        for span in spans or (self.whole,):
            engine.attach(self.stage.keep(span))
        return engine

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def median_s(self, action: Callable[[], object], warm: int = 3) -> float:
        """The median seconds of an action that ends with a result on the host."""
        taken = []
        for turn in range(warm + self.scale.steps):
            self.synchronize()
            began_s = time.perf_counter()
            action()
            self.synchronize()
            if turn >= warm:
                taken.append(time.perf_counter() - began_s)
        return statistics.median(taken)

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a copy of memory on the device."""
        source = torch.ones(self.scale.copied_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self.scale.copied_bytes / self.median_s(lambda: target.copy_(source))

    def sessions(self, engine: Engine, count: int, span: Span | None = None) -> list[SequenceCache]:
        """With random keys and values of a context, as if that had been prefilled."""
        scale = self.scale
        tokens = scale.context + 2 * scale.steps + 16
        caches = [engine.new_cache(span or self.whole, tokens) for _ in range(count)]
        with torch.inference_mode():
            for cache in caches:
                cache.require(scale.context)
                for views in cache.parts(0, scale.context):
                    for view in views:
                        view.normal_()
                cache.advance(scale.context)
        return caches

    def guessing(self, engine: Engine, guessed: int) -> Callable[[], list[int]]:
        """A step of one session's last token and so many guesses behind it, all of them refused."""
        (cache,) = self.sessions(engine, 1)
        rows = 1 + guessed

        def step() -> list[int]:
            logits = engine.step(self.whole, [Rows(cache, rows, (1,) * rows, logit_rows=rows)], None)
            drawn: list[int] = logits.argmax(-1).tolist()
            engine.begin_behind(cache, cache.length - guessed)
            return drawn

        return step

    def decode(self, engines: Sequence[Engine], spans: Sequence[Span], sessions: int) -> Callable[[], Tensor]:
        """A step of one token for each session through all engines; between two of them through the host."""
        caches = [self.sessions(engine, sessions, span) for engine, span in zip(engines, spans, strict=True)]
        tokens = [1] * sessions

        def step() -> Tensor:
            states: Tensor | None = None
            for engine, span, own in zip(engines, spans, caches, strict=True):
                rows = [
                    Rows(cache, 1, (token,) if span.start == 0 else None, logit_rows=1)
                    for cache, token in zip(own, tokens, strict=True)
                ]
                states = engine.step(span, rows, states)
                if span.stop < self.layers:
                    states = states.cpu()
            assert states is not None
            tokens[:] = states.argmax(-1).tolist()
            return states

        return step


def random_model(scale: Scale, device: str) -> LlamaForCausalLM:
    """Its weights drawn on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, scale.dtype))
    try:
        with torch.device(device):
            return LlamaForCausalLM(scale.config).eval().requires_grad_(requires_grad=False)
    finally:
        torch.set_default_dtype(before)


def whole_stage(model: LlamaForCausalLM, scale: Scale, device: str) -> Stage:
    """As the loader makes one of a model from files."""
    config = scale.config
    facts = StageFacts(
        architecture="llama", layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size, context_length=config.max_position_embeddings,
        dtype=getattr(torch, scale.dtype),
    )  # fmt: skip
    span, slot, probe = Span(0, facts.layers), BatchSlot(None), ProbeBatch(config, keeps_states=False)
    slot.install(model.model.layers)
    install_fused(model, slot, fused_on(torch.device(device)))
    shorten_lookups(model.model.layers)
    trial = Stage(model, span, facts, {}, slot, View, LaterWork())
    with torch.inference_mode():
        places = torch.tensor([[0, 1]], device=device)
        trial.view(span).try_out(places, places, probe)
    return Stage(model, span, facts, probe.layouts(span), slot, View, LaterWork())


def spec_of(stage: Stage, dtype: str) -> ModelSpec:
    """What the engine reads of a description."""
    facts = stage.facts
    return ModelSpec(
        model_hash="0" * 64, content_hash="0" * 64, name="random", architecture=facts.architecture,
        layers=facts.layers, hidden_size=facts.hidden_size, vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length, dtype=dtype, quantization="none",
        layer_bytes=(1,) * facts.layers, embed_bytes=1, head_bytes=1,
        kv_bytes_per_token=(1,) * facts.layers, stop_token_ids=(),
    )  # fmt: skip


def agreement(bench: Bench, table: Table) -> None:
    """Rows together and recorded, beside each session by itself: the same model, caches and tokens. How far rounding
    alone takes them apart say rows together whose sessions attend one after the other."""
    together = _first_logits(bench, bench.decoding, at_once=bench.scale.batch)
    rounded = _first_logits(bench, None, at_once=bench.scale.batch)
    expected = _first_logits(bench, None, at_once=1)
    rounding, difference = (float((one - expected).norm() / expected.norm()) for one in (rounded, together))
    same = float((together.argmax(-1) == expected.argmax(-1)).double().mean())
    table.note("most likely tokens that are the same", f"{100 * same:.1f} %", same=same)
    table.note("difference of logits over logits, by rounding", f"{rounding:.3g}", rounding=rounding)
    table.judge("difference of logits over logits", difference, "", max(LEAST_DIFFERENCE, 1.5 * rounding))


def _first_logits(bench: Bench, decoding: Decoding | None, at_once: int) -> Tensor:
    """Of the first step of all sessions, so many at once."""
    torch.manual_seed(0)
    engine = bench.engine(decoding=decoding)
    rows = [Rows(cache, 1, (1,), logit_rows=1) for cache in bench.sessions(engine, bench.scale.batch)]
    groups = (rows[first : first + at_once] for first in range(0, len(rows), at_once))
    return torch.cat([engine.step(bench.whole, group, None).double().cpu() for group in groups])


def alone(bench: Bench, table: Table) -> None:
    """Decode steps of one session, beside the time to read the weights."""
    bandwidth = bench.copy_bytes_per_s()
    table.note("copy", f"{bandwidth / 1e9:.0f} GB/s read and written", bytes_per_s=bandwidth)
    embedding = (
        bench.scale.config.vocab_size * bench.scale.config.hidden_size * bench.stage.facts.dtype.itemsize
    )
    read_s = (bench.stage.weight_bytes - embedding) / bandwidth
    taken_s = bench.median_s(bench.decode([bench.engine(decoding=bench.decoding)], [bench.whole], 1))
    table.note("reading the weights", f"{read_s * 1000:.2f} ms", ms=read_s * 1000)
    table.note("a token", f"{taken_s * 1000:.2f} ms", ms=taken_s * 1000)
    table.judge("a token over reading the weights", taken_s / read_s, "times", ALONE_BAR)


def batch(bench: Bench, table: Table) -> None:
    """Decode steps of many sessions, beside one."""
    engine = bench.engine(decoding=bench.decoding)
    one_s = bench.median_s(bench.decode([engine], [bench.whole], 1))
    many = bench.scale.batch
    many_s = bench.median_s(bench.decode([engine], [bench.whole], many))
    table.note(f"{many} sessions", f"{many / many_s:.0f} tokens/s, {many_s * 1000:.2f} ms", ms=many_s * 1000)
    table.judge(f"{many} sessions over one", many * one_s / many_s, "times", BATCH_BAR, least=True)


def guesses(bench: Bench, table: Table) -> None:
    """Steps of one session that guesses, beside those of one that does not."""
    engine = bench.engine(decoding=bench.decoding)
    one_s, several_s = (bench.median_s(bench.guessing(engine, guessed)) for guessed in (0, GUESSED))
    table.note("one row", f"{one_s * 1000:.2f} ms", ms=one_s * 1000)
    table.note(f"{1 + GUESSED} rows", f"{several_s * 1000:.2f} ms", ms=several_s * 1000)
    table.judge(f"{1 + GUESSED} rows of a session over one", several_s / one_s, "times", GUESSES_BAR)


def peers(bench: Bench, table: Table) -> None:
    """Four engines of a quarter each, hidden states through the host, beside one: without a network, whose share needs
    the other dependencies and processes (`make bench-link`)."""
    quarter = bench.layers // 4
    spans = [Span(quarter * index, quarter * (index + 1)) for index in range(4)]
    one_s = bench.median_s(bench.decode([bench.engine(decoding=bench.decoding)], [bench.whole], 1))
    engines = [bench.engine(span, decoding=bench.decoding) for span in spans]
    four_s = bench.median_s(bench.decode(engines, spans, 1))
    table.note("one engine", f"{one_s * 1000:.2f} ms", ms=one_s * 1000)
    table.note("four engines", f"{four_s * 1000:.2f} ms", ms=four_s * 1000)
    table.judge("four engines over one", four_s / one_s, "times", PEERS_BAR)


def prefill(bench: Bench, table: Table) -> None:
    """A long prompt in chunks by itself, and decode steps beside such chunks."""
    scale, engine = bench.scale, bench.engine(decoding=bench.decoding)

    def prompt() -> Iterator[Rows]:
        cache = engine.new_cache(bench.whole, scale.prompt)
        for start in range(0, scale.prompt, scale.chunk):
            count = min(scale.chunk, scale.prompt - start)
            yield Rows(cache, count, (1,) * count, logit_rows=int(start + count == scale.prompt))

    for row in prompt():
        engine.step(bench.whole, [row], None)
    bench.synchronize()
    began_s = time.perf_counter()
    for row in prompt():
        engine.step(bench.whole, [row], None)
    bench.synchronize()
    taken_s = time.perf_counter() - began_s
    table.note("prefill", f"{scale.prompt / taken_s:.0f} tokens/s", tokens_per_s=scale.prompt / taken_s)
    caches = bench.sessions(engine, scale.batch)
    for sessions in sorted({1, min(8, scale.batch)}):
        steps = []
        for row in prompt():
            decoding = [Rows(cache, 1, (1,), logit_rows=1) for cache in caches[:sessions]]
            bench.synchronize()
            began_s = time.perf_counter()
            engine.step(bench.whole, [*decoding, row], None)
            bench.synchronize()
            steps.append(time.perf_counter() - began_s)
        text = f"{statistics.median(steps) * 1000:.1f} ms a step, {max(steps) * 1000:.1f} at most"
        table.note(f"{sessions} decoding beside chunks of {scale.chunk}", text, steps_s=steps)


CASES = {
    "agreement": agreement, "alone": alone, "batch": batch, "guesses": guesses, "peers": peers, "prefill": prefill,
}  # fmt: skip


@contextmanager
def compiled(model: nn.Module, backend: str) -> Iterator[None]:
    """Norms and MLPs as torch.compile makes them, which joins their small kernels: an experiment."""
    parts = [part for part in model.modules() if type(part).__name__.endswith(("RMSNorm", "MLP"))]
    for module in parts:
        module.__dict__["forward"] = torch.compile(module.forward, backend=backend)
    try:
        yield
    finally:
        for module in parts:
            del module.__dict__["forward"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="every case on a processor, as a test of this script"
    )
    parser.add_argument(
        "--plain", action="store_true", help="launch every kernel from Python instead of recording"
    )
    parser.add_argument("--compile", action="store_true", help="with compiled norms and MLPs")
    parser.add_argument("--json", type=Path, help="writes every number there")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none, so nothing was measured")
        return 2
    records = not options.plain
    if options.tiny:
        bench = Bench(TINY, "cpu", decoding_here(records=records)[0])
        machine = "a processor, as a test: no figure means anything"
    else:
        bench = Bench(FULL, "cuda:0", decoding_on("cuda:0", records=records, fuses=True))
        machine = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    print(
        f"{machine}\npython tests/bench/engine/engine_gpu.py {' '.join(arguments or sys.argv[1:])}",
        flush=True,
    )
    if bench.decoding is None:
        print("torch has no Triton here: sessions attend one after the other, and no step is recorded")
    cases: dict[str, object] = {}
    missed: list[str] = []
    for name in options.only or CASES:
        print(f"\n{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", flush=True)
        table = Table()
        if options.compile:
            with compiled(bench.model, "eager" if options.tiny else "inductor"):
                CASES[name](bench, table)
        else:
            CASES[name](bench, table)
        cases[name] = table.rows
        missed += [f"{name}: {row['name']}" for row in table.rows if row.get("held") is False]
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine, "cases": cases}, indent=1) + "\n", encoding="utf-8"
        )
    print(f"\nmissed: {'; '.join(missed) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
