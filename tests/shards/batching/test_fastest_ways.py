"""Unless it is to be exact, every step goes the fastest way: float32 tokens are still transformers' where these are
further apart than rounding."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import Circuit, engine_with, start_run, step_runs
from support.models.tiny_models import VOCABULARY, load_reference
from support.pairwise import usually

from molink.shards.matrices import products
from molink.shards.matrices.products import Timings
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

TOKENS = 24
ROUNDING = 4.0
"""Our sums are rounded in another order than transformers': by no more than so many times what rounding does to its own
logits, at the position where it does most."""
USUAL = (("llama", False, True), ("gemma2", True, True), ("qwen2", True, False), ("gpt2", False, False))
"""Each kind, and each pair of ways."""
CLEAR_SHARE = 0.9
"""Positions of a random model that must be clear, or they would prove nothing."""


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(6)
    return [
        tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())
        for length in (13, 1, 70, 17)
    ]


@pytest.mark.parametrize(
    ("kind", "packs", "together"),
    usually(USUAL, product(("llama", "gemma2", "qwen2", "gpt2"), (False, True), (False, True))),
)
def test_tokens_are_those_of_transformers_wherever_they_are_clear(
    kind: str, packs: bool, together: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights packed and not, one session alone and several."""
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(products, "TIMED_ROWS", (1, 8))
    monkeypatch.setattr(products, "WORTH", 10.0)  # whatever else there is, is used
    monkeypatch.setattr(Timings, "pays", lambda *_: packs)
    folder = tiny_model(kind)
    halves = ((0, 3), (3, 6))
    circuit: Circuit = [(engine_with(folder, half, exact=False), Span(*half)) for half in halves]
    runs = [start_run(circuit, prompt, TOKENS) for prompt in prompts()]
    groups = [runs] if together else [[run] for run in runs]
    for group in groups:
        while len(group[0].tokens) < TOKENS:
            step_runs(circuit, group)
    single, double = load_reference(folder, "float32"), load_reference(folder, "float64")
    clear = 0
    for run in runs:
        ids = torch.tensor([[*run.prompt, *run.tokens[:-1]]])
        with torch.inference_mode():
            theirs, exact = (model(input_ids=ids).logits[0, -TOKENS:].double() for model in (single, double))
        rounding = ROUNDING * float((theirs - exact).abs().max())
        ours = torch.stack(run.logits).double()
        assert float((ours - exact).abs().max()) <= rounding
        best, second = theirs.topk(2).values.unbind(-1)
        certain = best - second > 2 * rounding
        clear += int(certain.sum())
        assert torch.tensor(run.tokens)[certain].tolist() == theirs.argmax(-1)[certain].tolist()
    assert clear >= CLEAR_SHARE * TOKENS * len(runs)
