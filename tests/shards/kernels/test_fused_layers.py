"""Layers of the Llama family run as one function where no bit is promised, if it gives what their own gives."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.circuit_runs import DEVICE, engine_of, start_run, step_runs
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from molink.shards.batching.engine import Engine
from molink.shards.kernels import fused_layers
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Stage, cache_parameter
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

WHOLE = (0, 6)
PROMPTS = ((5, 9, 200, 31, 7), tuple(range(40, 70)), (3,))
FAMILY = ("llama", "mistral", "qwen2_sliding", "qwen3")
FLOAT32 = StageSettings("float32")
OTHERS = ("gpt2", "granite", "smollm3")


def stage_of(folder: Path, settings: StageSettings = FLOAT32) -> Stage:
    return load_stage(folder, Span(*WHOLE), replace(settings, device=DEVICE))


def layers_of(stage: Stage) -> list[nn.Module]:
    base = stage.model
    return list(base.get_submodule("transformer.h" if hasattr(base, "transformer") else "model.layers"))


def is_fused(layer: nn.Module) -> bool:
    return "forward" in layer.__dict__


def logits_of(engine: Engine, steps: int) -> list[torch.Tensor]:
    """Of prompts together, then of single tokens, with one session alone at the end."""
    circuit = [(engine, Span(*WHOLE))]
    runs = [start_run(circuit, prompt, steps + 1) for prompt in PROMPTS]
    for _ in range(steps):
        step_runs(circuit, runs)
    step_runs(circuit, runs[:1])
    return [logits for run in runs for logits in run.logits]


@pytest.mark.parametrize("kind", FAMILY)
def test_layers_of_the_family_are_fused_and_compute_the_same_up_to_rounding(
    kind: str, tiny_model: TinyModel
) -> None:
    """Windows, biases, norms of heads: prompts longer than the window, batches and single sessions."""
    folder = tiny_model(kind)
    own, fused = stage_of(folder, StageSettings("float32", exact=True)), stage_of(folder)
    assert not any(map(is_fused, layers_of(own)))
    assert all(map(is_fused, layers_of(fused)))
    for one, two in zip(logits_of(engine_of([own]), 4), logits_of(engine_of([fused]), 4), strict=True):
        torch.testing.assert_close(two, one, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "nf4")]
)
def test_they_are_fused_in_every_form_of_weights(
    dtype: str, quantization: str, tiny_model: TinyModel
) -> None:
    stage = stage_of(tiny_model("llama"), StageSettings(dtype, quantization))
    assert all(map(is_fused, layers_of(stage)))
    assert all(bool(torch.isfinite(logits).all()) for logits in logits_of(engine_of([stage], dtype), 2))


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_of_other_formulas_keep_their_own(kind: str, tiny_model: TinyModel) -> None:
    assert not any(map(is_fused, layers_of(stage_of(tiny_model(kind)))))


def test_a_layer_of_the_family_that_computes_something_else_keeps_its_own(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a later release of transformers might."""
    own = LlamaDecoderLayer.forward

    @functools.wraps(own)
    def forward(layer: nn.Module, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
        return own(layer, hidden_states, **named) * 1.001

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    assert not any(map(is_fused, layers_of(stage_of(tiny_model("llama")))))


@pytest.mark.parametrize("cache", ["cache", "past_key_values"])
def test_layers_are_fused_whatever_their_release_calls_the_cache(
    cache: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does as transformers does since 5.24, and as it did before."""
    own, base = LlamaDecoderLayer.forward, inspect.unwrap(LlamaModel.forward)
    wanted = logits_of(engine_of([stage_of(tiny_model("llama"))]), 2)
    theirs = cache_parameter(own)

    def renamed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def with_own_name(*given: object, **named: object) -> object:
            return forward(*given, **{theirs if name == cache else name: one for name, one in named.items()})

        signature = inspect.signature(forward)
        parameters = [
            parameter.replace(name=cache) if name == theirs else parameter
            for name, parameter in signature.parameters.items()
        ]
        with_own_name.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_own_name

    monkeypatch.setattr(LlamaDecoderLayer, "forward", renamed(own))
    monkeypatch.setattr(LlamaModel, "forward", renamed(base))
    stage = stage_of(tiny_model("llama"))
    assert all(map(is_fused, layers_of(stage)))
    for one, two in zip(logits_of(engine_of([stage]), 2), wanted, strict=True):
        torch.testing.assert_close(two, one)


def test_a_layer_whose_function_fails_keeps_its_own(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotated(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(fused_layers, "_rotated", rotated)
    stage = stage_of(tiny_model("llama"))
    assert not any(map(is_fused, layers_of(stage)))
    assert len(logits_of(engine_of([stage]), 1)) == len(PROMPTS) + 1
