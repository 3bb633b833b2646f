"""Drawing the tokens of 64 rows of a vocabulary of 128,000, all at once and row by row, in turns.

`python tests/bench/engine/engine_sampling.py`, on a card with `--device cuda`: there the bar of a batch with top_p
holds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from bench.tables import Table
from bench.this_machine import processor
from support.devices.sampling_by_row import sample_by_row

from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import sample_each
from molink.shards.spec import SamplingParams

ROWS = 64
VOCABULARY = 128_000
BAR_MS = 0.5
"""Of 64 rows with top_p on a card."""
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k and top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "top_p, 5 log-probabilities": SamplingParams(temperature=0.8, top_p=0.95, logprobs=5),
}
SPREADS = {"as models make them": 4.0, "nearly flat": 1.0}
"""Standard deviation of the logits: top_p leaves a few hundred tokens, or tens of thousands."""


def timed_ms(action: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    action()
    return (time.perf_counter() - began_s) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    device, table = arguments.device, Table()
    print(f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads, on {device}")
    generator = torch.Generator().manual_seed(0)
    for shape, spread in SPREADS.items():
        logits = (spread * torch.randn(ROWS, VOCABULARY, generator=generator)).to(device)
        for kind, params in KINDS.items():
            requests = [SampleRequest(params, row, 100) for row in range(ROWS)]
            assert [getattr(one, "token_id", one) for one in sample_each(logits, requests)] == [
                getattr(one, "token_id", one) for one in sample_by_row(logits, requests)
            ]
            pairs = [
                (
                    timed_ms(lambda asked=requests, rows=logits: sample_each(rows, asked), device),
                    timed_ms(lambda asked=requests, rows=logits: sample_by_row(rows, asked), device),
                )
                for _ in range(arguments.rounds)
            ]
            together_ms, by_row_ms = (statistics.median(column) for column in zip(*pairs, strict=True))
            text = f"{together_ms:.2f} ms together, {by_row_ms:.2f} row by row: {by_row_ms / together_ms:.1f} times"
            table.note(f"{kind}, {shape}", text, together_ms=together_ms, by_row_ms=by_row_ms)
            if device != "cpu" and kind == "top_p":
                table.judge(f"{kind}, {shape}", together_ms, "ms", BAR_MS)


if __name__ == "__main__":
    main()
