"""What a profile, measured with a few layers, predicts of decode steps through a model of 32: 1, 8 and 64 sessions.

`python tests/bench/engine/engine_profile.py`, on a card with `--device cuda`. Profile and steps take turns; the
fastest count.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bench.tables import Table
from bench.this_machine import processor
from transformers import LlamaConfig, LlamaForCausalLM

from molink.peer.compute.backend import MeasuredDevice, MeasuredModel
from molink.peer.profiling.profile import Profile, StepWork, predicted_ms
from molink.peer.profiling.profiler import measure
from molink.routing.cost.cost import PROFILED_CONTEXT_TOKENS
from molink.shards.batching.engine import Rows
from molink.shards.checkpoint.store import describe
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec

SESSIONS = 1, 8, 64
LAYERS = 32
STEPS = 7
BAR = 0.15
"""Most that a prediction is off, as a part of what was measured."""


def make_llama(folder: Path, hidden: int, dtype: str) -> ModelSpec:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=2048,
        eos_token_id=1, bos_token_id=0, dtype=dtype,
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return describe(folder)


class Whole:
    """The model in one engine, and sessions that decode."""

    def __init__(self, folder: Path, spec: ModelSpec, device: str) -> None:
        backend = MeasuredDevice(MeasuredModel(folder, spec, device))
        backend.load(spec.whole, lambda _done, _total: None)()
        self._engine, self._span = backend.engine, spec.whole
        self._caches: list[SequenceCache] = []
        for _ in range(SESSIONS[-1]):
            cache = self._engine.new_cache(self._span, 2 * PROFILED_CONTEXT_TOKENS)
            cache.require(PROFILED_CONTEXT_TOKENS)
            cache.advance(
                PROFILED_CONTEXT_TOKENS
            )  # how long a context takes to read does not depend on what it is
            self._caches.append(cache)

    def step_ms(self, sessions: int) -> float:
        """The fastest of a few steps; contexts are afterwards as they were."""
        caches = self._caches[:sessions]
        times_ms = []
        for _ in range(STEPS + 1):
            rows = [Rows(cache, 1, (5,), logit_rows=1) for cache in caches]
            began_s = time.perf_counter()
            self._engine.step(self._span, rows, None).argmax(-1).tolist()
            times_ms.append((time.perf_counter() - began_s) * 1000)
        for cache in caches:
            cache.truncate(PROFILED_CONTEXT_TOKENS)
        return min(times_ms[1:])


def prediction_ms(profile: Profile, sessions: int) -> float:
    contexts = (PROFILED_CONTEXT_TOKENS + STEPS // 2,) * sessions
    return predicted_ms(profile, StepWork(LAYERS, starts=True, ends=True, decode_contexts=contexts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table()
    print(
        f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads, on {arguments.device}"
    )
    predicted: dict[int, list[float]] = defaultdict(list)
    measured: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="molink-bench-") as name:
        folder = Path(name)
        spec = make_llama(folder, arguments.hidden, arguments.dtype)
        gc.collect()
        whole = Whole(folder, spec, arguments.device)
        for _ in range(arguments.rounds):
            profile = measure(MeasuredModel(folder, spec, arguments.device))
            print(f"  step {profile.step_ms:.3f} ms, head {profile.head_ms:.3f} ms, layer", end="")
            print("".join(f" {one.batch_size}: {one.layer_ms:.3f}" for one in profile.layer_latencies))
            for sessions in SESSIONS:
                predicted[sessions].append(prediction_ms(profile, sessions))
                measured[sessions].append(whole.step_ms(sessions))
    for sessions in SESSIONS:
        foreseen_ms, taken_ms = (min(one[sessions]) for one in (predicted, measured))
        table.note(f"{sessions} sessions", f"{foreseen_ms:.1f} ms foreseen, {taken_ms:.1f} taken")
        table.judge(f"{sessions} sessions, error", abs(foreseen_ms - taken_ms) / taken_ms, "of it", BAR)


if __name__ == "__main__":
    main()
