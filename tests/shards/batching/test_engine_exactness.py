"""Whatever the split and whatever else is in the batch, float32 tokens are those of transformers."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import Circuit, engine_with, greedy, greedy_joining, start_run, step_runs
from support.models.tiny_models import ARCHITECTURES, VOCABULARY, greedy_references, load_reference

from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

BASIC = ("llama",)
"""Beside `test_exact_in_every_way`, which has gemma2, and qwen3_next with its experts, in every run."""
MONOTONOUS = ("falcon_alibi", "bloom")
"""Their random models repeat one token; `test_architectures` compares their logits."""
OTHERS = tuple(name for name in ARCHITECTURES if name not in BASIC + MONOTONOUS)

PROMPT = (5, 9, 200, 31, 7, 7, 100, 44, 3, 250, 12, 19, 90)
TOKENS = 24


def ragged_prompts() -> list[tuple[int, ...]]:
    draw = random.Random(11)
    return [
        tuple(draw.randrange(VOCABULARY) for _ in range(length)) for length in (13, 1, 30, 7, 21, 2, 17, 5)
    ]


def circuits(folder: Path) -> list[Circuit]:
    """One to four hops; of whole stages, of parts of one stage, and over stages that were loaded apart."""
    whole = engine_with(folder, (0, 6))
    apart = engine_with(folder, (0, 2), (2, 6))
    tail = engine_with(folder, (4, 6))
    return [
        [(whole, Span(0, 6))],
        [(apart, Span(0, 6))],
        [(apart, Span(0, 4)), (tail, Span(4, 6))],
        [(whole, Span(0, 2)), (apart, Span(2, 5)), (whole, Span(5, 6))],
        [(apart, Span(0, 1)), (apart, Span(1, 4)), (whole, Span(4, 5)), (tail, Span(5, 6))],
    ]


def check_architecture(folder: Path) -> None:
    prompts = ragged_prompts()
    expected, *alone = greedy_references(folder, [list(prompt) for prompt in (PROMPT, *prompts)], TOKENS)
    assert len(set(expected)) >= 10, "the model's text is too monotonous to prove anything"
    splits = circuits(folder)
    for circuit in splits:
        assert greedy(circuit, PROMPT, TOKENS) == expected, [str(span) for _, span in circuit]
    split = splits[2]
    assert greedy(split, PROMPT, TOKENS, chunk=4) == expected
    assert greedy_joining(split, prompts, TOKENS) == alone
    assert greedy_joining(split, prompts, TOKENS, chunk=8) == alone


@pytest.mark.full
@pytest.mark.parametrize("architecture", BASIC)
def test_tokens_equal_transformers_over_splits_and_ragged_batches(
    tiny_model: TinyModel, architecture: str
) -> None:
    check_architecture(tiny_model(architecture))


@pytest.mark.full
@pytest.mark.parametrize("architecture", OTHERS)
def test_tokens_equal_transformers_for_further_architectures(
    tiny_model: TinyModel, architecture: str
) -> None:
    check_architecture(tiny_model(architecture))


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["deepseek_v3", "gpt_oss"])
def test_compressed_caches_and_attention_sinks_are_exact_in_ragged_batches(
    tiny_model: TinyModel, architecture: str
) -> None:
    folder = tiny_model(architecture)
    prompts = ragged_prompts()[:4]
    engine = engine_with(folder, (0, 6))
    circuit: Circuit = [(engine, Span(0, 3)), (engine, Span(3, 6))]
    alone = greedy_references(folder, [list(prompt) for prompt in prompts], TOKENS)
    assert greedy_joining(circuit, prompts, TOKENS, chunk=8) == alone


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen2", "float32")]
)
def test_one_session_has_bitwise_the_logits_of_transformers(
    tiny_model: TinyModel, architecture: str, dtype: str
) -> None:
    folder = tiny_model(architecture)
    first, second = engine_with(folder, (0, 3), dtype=dtype), engine_with(folder, (3, 6), dtype=dtype)
    circuit: Circuit = [(first, Span(0, 3)), (second, Span(3, 6))]
    run = start_run(circuit, PROMPT, 8)
    while len(run.tokens) < 8:
        step_runs(circuit, [run])
    model = load_reference(folder, dtype)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert run.tokens == generated.sequences[0, len(PROMPT) :].tolist()
    for ours, theirs in zip(run.logits, generated.logits, strict=True):
        assert torch.equal(ours, theirs[0].float())


def test_a_session_in_a_batch_differs_from_one_alone_by_rounding_only(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    alone = start_run(circuit, PROMPT, 4)
    step_runs(circuit, [alone])
    together = [start_run(circuit, prompt, 4) for prompt in (PROMPT, *ragged_prompts())]
    step_runs(circuit, together)
    scale = float(alone.logits[0].abs().max())
    assert float((alone.logits[0] - together[0].logits[0]).abs().max()) < 1e-4 * scale
