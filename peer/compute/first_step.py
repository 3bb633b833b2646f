"""The first step of a peer: one layer of its model on the chosen device, in one way after the other until one is right.

A card, its driver, a compiler and the libraries between them fail in more ways than anybody can list. So nothing is
concluded from their names: what is going to be used is used, before anybody depends on it.
"""

import importlib.util
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from molink.configuration import SettingsError
from molink.peer.device.device import free_memory_bytes, give_back_memory
from molink.peer.memory.memory import format_bytes
from molink.peer.models.model import LocalModel
from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.ways import DecodingWay, decoding_in
from molink.shards.checkpoint.store import describe
from molink.shards.errors import QuantizationUnavailable, WeightsError, in_one_line
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.paged_attention.paged import NotPaged
from molink.shards.spec import ModelSpec, Span

PROMPTS = (17, 3)
"""Tokens of two sessions: a block and more, and less than one."""
DECODE_STEPS = 3
"""One is recorded, the others are played."""
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest difference between two ways, relative to the largest number. Rounding gives a tenth of it, a wrong kernel
much more."""
_SAID_MOST = 160
_LOST = {DecodingWay.RECORDED: "the fused ones fail here", DecodingWay.LAUNCHED: "steps cannot be recorded"}
_log = logging.getLogger(__name__)

Decodings = Callable[[DecodingWay, str], Decoding | None]


@dataclass(frozen=True, slots=True)
class Proof:
    """In which way a device computes, as it has shown."""

    way: DecodingWay
    sentence: str | None
    """What does not work and why, for the owner; None: all that could be expected does."""
    library_bytes: int | None = None
    """What matrix libraries have kept of a CUDA device's memory after the steps; None: it was not measured."""


def _watched(made: Any, failures: list[Exception], expected: tuple[type[Exception], ...] = ()) -> Any:  # noqa: ANN401 - kernels or a recorder
    """The same calls, of which it is noted why they failed, should an engine go on without them."""

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: object) -> Any:  # noqa: ANN401 - as the call
            try:
                return call(*arguments)
            except expected:
                raise
            except Exception as error:
                failures.append(error)
                raise

        return noted

    calls = ("store", "rotate_and_store", "attend", "record")
    return SimpleNamespace(**{name: noting(getattr(made, name)) for name in calls if hasattr(made, name)})


def first_step(model: LocalModel, device: str) -> Proof:
    """As `prove`, on a device of this machine. A processor has one way, and nothing to prove: nothing is loaded."""
    return Proof(DecodingWay.TORCH, None) if device == "cpu" else prove(model, device)


def prove(
    model: LocalModel,
    device: str,
    ways: Sequence[DecodingWay] = tuple(DecodingWay),
    decodings: Decodings = decoding_in,
) -> Proof:
    """The first of `ways` in which the device computes what it computes with torch's own attention.

    Blocks for as long as one layer takes to load. Of a hub's model no weights are fetched.

    Raises:
        SettingsError: the device cannot compute this model at all; it says why, and what to type instead.
        WeightsError, QuantizationUnavailable, OSError: the layer cannot be read.
    """
    spec = model.spec
    try:
        stage = _loaded(model.folder, spec, device, model)
        expected = _steps(stage, spec, device, None)
        if not bool(torch.isfinite(expected).all()):
            raise ArithmeticError("a layer computes what are no numbers")
    except (WeightsError, QuantizationUnavailable, OSError):
        raise
    except Exception as error:
        _log.debug("the first step failed", exc_info=error)
        raise SettingsError(_refusal(model, device, error)) from error
    proof = _first_that_works(stage, spec, device, expected, ways, decodings)
    del stage
    give_back_memory(device)
    return (
        replace(proof, library_bytes=torch.cuda.memory_allocated(device))
        if device.startswith("cuda")
        else proof
    )


def _first_that_works(
    stage: Stage,
    spec: ModelSpec,
    device: str,
    expected: Tensor,
    ways: Sequence[DecodingWay],
    decodings: Decodings,
) -> Proof:
    failure: Exception | None = None
    for way in ways:
        if way is DecodingWay.TORCH:
            break
        attending, recording = list[Exception](), list[Exception]()
        try:
            decoding = decodings(way, device)
            if decoding is None:
                break
            watched = replace(
                decoding,
                attention=_watched(decoding.attention, attending),
                latents=decoding.latents and _watched(decoding.latents, attending),
                recorder=decoding.recorder and _watched(decoding.recorder, recording, (NotPaged,)),
            )
            _compare(_steps(stage, spec, device, watched), expected, spec.dtype)
            if attending:
                raise attending[-1]
        except Exception as error:  # noqa: BLE001 - of a compiler and its cards there is no list of errors
            _log.debug("%s: the first step failed", way.value, exc_info=error)
            failure = error
            continue
        if recording:
            return Proof(DecodingWay.LAUNCHED, _sentence(DecodingWay.LAUNCHED, device, recording[-1]))
        return Proof(way, None if failure is None else _sentence(way, device, failure))
    if failure is None and not (device.startswith("cuda") and DecodingWay.RECORDED in ways):
        return Proof(DecodingWay.TORCH, None)
    return Proof(DecodingWay.TORCH, _sentence(DecodingWay.TORCH, device, failure))


def _loaded(folder: Path, spec: ModelSpec, device: str, model: LocalModel) -> Stage:
    """The middle layer, as it will be served."""
    middle = spec.layers // 2
    return load_stage(
        folder,
        Span(middle, middle + 1),
        StageSettings(spec.dtype, spec.quantization, device=device, ways=model.ways),
        parts=model.stand_ins(),
    )


def _steps(stage: Stage, spec: ModelSpec, device: str, decoding: Decoding | None) -> Tensor:
    """What a few steps give, in float32 on the host: prompts, then one token of each session, then of one alone beside
    a piece of a prompt."""
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        engine, span = Engine(spec, device, decoding=decoding), stage.span
        engine.attach(stage)
        room = min(spec.context_length, max(PROMPTS) + DECODE_STEPS + 2)
        caches = [engine.new_cache(span, room) for _ in PROMPTS]
        prompts = [min(count, max(1, room - DECODE_STEPS - 2)) for count in PROMPTS]
        generator = torch.Generator().manual_seed(0)
        counts = [prompts, *[[1] * len(PROMPTS)] * DECODE_STEPS, [1, 2]]
        results = []
        for step in counts if room > DECODE_STEPS + 2 else counts[:1]:
            rows, hidden = [], None
            for cache, count in zip(caches, step, strict=True):
                ids = tuple(range(count)) if span.start == 0 else None
                rows.append(Rows(cache, count, ids, logit_rows=1))
            if span.start:
                hidden = torch.randn(sum(step), spec.hidden_size, generator=generator).to(stage.facts.dtype)
            results.append(engine.step(span, rows, hidden).float().cpu())
        failure = engine.paged.failure
        if failure is not None and not isinstance(failure, NotPaged):
            raise failure
        return torch.cat(results)


def _compare(found: Tensor, expected: Tensor, dtype: str) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not difference <= TOLERANCES[dtype]:
        raise ArithmeticError(
            f"its results are off by {difference:.1%}, and rounding alone gives less than {TOLERANCES[dtype]:.1%}"
        )


def _sentence(way: DecodingWay, device: str, failure: Exception | None) -> str:
    """Which way is taken, why none before it, and what would help."""
    if failure is None:
        extra = ' (`pip install "molink[windows]"`)' if platform.system() == "Windows" else ""
        return f"Note: {device} computes with {way.value}, because Triton is not there{extra}; many sessions are slower"
    lost = _LOST.get(way, "Triton's kernels fail here")
    remedy = ""
    if "c compiler" in str(failure).lower():
        remedy = "; install one, such as gcc, and start again"
    elif way is DecodingWay.TORCH and importlib.util.find_spec("triton") is None:
        remedy = "; install Triton, and start again"
    return f"Note: {device} computes with {way.value}, because {lost} ({in_one_line(failure, _SAID_MOST)}){remedy}"


def _refusal(model: LocalModel, device: str, error: Exception) -> str:
    """Why the device cannot compute the model, and what to type instead."""
    spec = model.spec
    named = spec.name if spec.quantization == "none" else f"{spec.name} in {spec.quantization}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        layer = format_bytes(max(spec.layer_bytes))
        give_back_memory(device)
        return (
            f"--device {device}: one layer of {named} takes {layer} and more while it is loaded, and "
            f"{format_bytes(free_memory_bytes(device))} of its memory are free: choose a smaller model"
            f"{', --quantization nf4' if spec.quantization == 'none' else ''}, or --device cpu"
        )
    said = in_one_line(error, _SAID_MOST)
    return f"--device {device} cannot compute {named} in {spec.dtype} ({said}): {_what_helps(model, device)}"


def _what_helps(model: LocalModel, device: str) -> str:
    """What to type instead: the first of other numbers that this device can compute with, or the processor."""
    spec = model.spec
    others = [(spec.dtype, "none", "--quantization none")] if spec.quantization != "none" else []
    others += [
        (dtype, spec.quantization, f"--dtype {dtype}")
        for dtype in ("bfloat16", "float16", "float32")
        if dtype != spec.dtype
    ]
    for dtype, quantization, typed in others:
        try:
            other = describe(model.manifest, dtype, quantization, name=spec.name)
            found = _steps(_loaded(model.folder, other, device, model), other, device, None)
            if bool(torch.isfinite(found).all()):
                return f"type {typed}, or --device cpu"
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("%s does not help", typed, exc_info=error)
    return "type --device cpu"
