"""Tiny models of every kind that is served, and what is found when each is run in all ways of `exactness`."""

import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from support.devices.rank_threads import RankThreads
from support.models.architecture_table import configuration_of, store_tiny
from support.models.circuit_runs import Circuit, Run, engine_with, start_run, step_runs
from support.models.exactness import (
    ALREADY_THERE,
    SPLITS,
    TOKENS,
    TOLERANCE,
    WHOLE,
    Rounded,
    Whole,
    compared,
    join,
    preempt,
    prompts_alike,
    ragged_prompts,
    rounded,
    share,
    shares_prefixes,
)
from support.models.reference_models import REFERENCE_MODELS, ReferenceModel
from support.models.tiny_models import ARCHITECTURES, load_reference
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from molink.shards.checkpoint.store import describe, read_manifest
from molink.shards.errors import UnsupportedArchitecture
from molink.shards.loading.stage_builder import TROUBLE
from molink.shards.model.text_backbone import text_config
from molink.shards.spec import Span

VARIANTS = ("llama_tied", "qwen2_sliding", "gpt2_inverse_scale", "falcon_alibi")
"""Of `tiny_models`: flags that the defaults of their architecture do not have."""
AMPLIFYING = {"lfm3": 1e-3, "lfm3_vl": 1e-3, "minicpm_ocr": 1e-2, "qwen3_5": 1e-3}
"""Kinds whose tiny random model makes more of rounding, and how much. With every number in float64 they differ by less
than 1e-12, so that it is rounding."""


@dataclass(frozen=True)
class TinyModel:
    """One in a folder."""

    name: str
    folder: Path
    vocabulary: int
    whole: Whole
    """In float32."""

    @property
    def tolerance(self) -> float:
        """Largest difference of float32 logits, relative to the largest logit."""
        return AMPLIFYING.get(self.name, TOLERANCE)

    def circuit(
        self, cuts: Sequence[tuple[int, int]], dtype: str = "float32", quantization: str = "none"
    ) -> Circuit:
        return [
            (engine_with(self.folder, cut, dtype=dtype, quantization=quantization), Span(*cut))
            for cut in cuts
        ]

    def rounded(self) -> Whole:
        """The whole in bfloat16. Of a converted model, which transformers lacks, ours in one piece and alone."""
        if self.name in REFERENCE_MODELS:
            return alone(self.circuit(WHOLE, "bfloat16"))
        return whole_model(self.folder, "bfloat16")


def tiny_model(name: str, folder: Path) -> TinyModel:
    """Makes the one of a row of docs/MODELS.md, or a variant."""
    if name in REFERENCE_MODELS:
        model = REFERENCE_MODELS[name]
        stored = model.save(folder, model.weights())
        spec = describe(stored)
        return TinyModel(name, stored, spec.vocabulary_size, described_model(model))
    if name in VARIANTS:
        model_type, settings = ARCHITECTURES[name]
        config = CONFIG_MAPPING[model_type](**settings)
    else:
        config = configuration_of(name)
    try:
        return _stored(name, config, folder, narrow=text_config(config) is not config)
    except TROUBLE:  # not all towers can be narrow
        shutil.rmtree(folder)
        folder.mkdir()
        return _stored(name, config, folder, narrow=False)


def _stored(name: str, config: PreTrainedConfig, folder: Path, *, narrow: bool) -> TinyModel:
    store_tiny(config, folder, narrow=narrow)
    whole = whole_model(folder)
    vocabulary = describe(folder).vocabulary_size
    whole(tuple(range(3)), 1)
    return TinyModel(name, folder, vocabulary, whole)


def whole_model(folder: Path, dtype: str = "float32") -> Whole:
    """As transformers runs it."""
    reference = load_reference(folder, dtype)

    @functools.lru_cache(maxsize=64)
    def logits(ids: tuple[int, ...], last: int) -> Tensor:
        with torch.inference_mode():
            found: Tensor = reference(input_ids=torch.tensor([ids]), use_cache=False).logits
        return found[0, -last:].float().clone()

    return logits


def described_model(model: ReferenceModel) -> Whole:
    """As its description says."""
    weights = model.weights()

    @functools.lru_cache(maxsize=64)
    def logits(ids: tuple[int, ...], last: int) -> Tensor:
        return model.logits(weights, list(ids))[-last:].clone()

    return logits


def alone(circuit: Circuit) -> Whole:
    """One session at a time, all its tokens at once."""

    @functools.lru_cache(maxsize=64)
    def logits(ids: tuple[int, ...], last: int) -> Tensor:
        rows = []
        for stop in range(len(ids) - last + 1, len(ids) + 1):
            run = start_run(circuit, ids[:stop], 1)
            step_runs(circuit, [run])
            rows += run.logits
        return torch.stack(rows)

    return logits


def same_bits(circuits: Sequence[Circuit], prompts: Sequence[tuple[int, ...]]) -> bool:
    """Whether each session, alone, has exactly the same logits in all of them."""
    for prompt in prompts:
        runs = [start_run(circuit, prompt, TOKENS) for circuit in circuits]
        for circuit, run in zip(circuits, runs, strict=True):
            while len(run.tokens) < TOKENS:
                step_runs(circuit, [run])
        first = torch.stack(runs[0].logits)
        if not all(torch.equal(first, torch.stack(run.logits)) for run in runs[1:]):
            return False
    return True


def joining_faults(model: TinyModel, circuit: Circuit) -> list[str]:
    """What is wrong where sessions of different lengths join each other, prompts in chunks."""
    return _differences(model, join(circuit, ragged_prompts(model.vocabulary)))


def sharing_faults(model: TinyModel, circuit: Circuit) -> list[str]:
    """What is wrong where prompts begin alike, or whether such a circuit did not share though it can, or did though it
    cannot."""
    runs, found = share(circuit, prompts_alike(model.vocabulary))
    expected = ALREADY_THERE if shares_prefixes(circuit) else (0,) * len(ALREADY_THERE)
    return _differences(model, runs) + (
        [] if found == expected else [f"{found} tokens were shared, not {expected}"]
    )


def preemption_faults(model: TinyModel, circuit: Circuit) -> list[str]:
    """What is wrong where there is room for few of the sessions; or whether they were not moved out on some hop."""
    prompts = prompts_alike(model.vocabulary) + ragged_prompts(model.vocabulary)
    runs, moved = preempt(circuit, prompts)
    enough = min(moved) >= len(prompts)
    return _differences(model, runs) + ([] if enough else [f"sessions were preempted {moved} times"])


def _differences(model: TinyModel, runs: Sequence[Run]) -> list[str]:
    found = compared(runs, model.whole)
    faults = (
        []
        if found.difference <= model.tolerance
        else [f"logits differ by {found.difference:.1e} of the largest"]
    )
    return faults if found.same_tokens else [*faults, "tokens differ"]


def in_bfloat16(model: TinyModel) -> Rounded:
    """Sessions that join, share prefixes and are preempted."""
    circuit = model.circuit(SPLITS[-1], "bfloat16")
    alike = prompts_alike(model.vocabulary)
    runs = (
        join(circuit, ragged_prompts(model.vocabulary))
        + share(circuit, alike)[0]
        + preempt(circuit, alike)[0]
    )
    return rounded(runs, model.rounded(), model.whole)


def rounding_faults(found: Rounded) -> list[str]:
    """What is wrong in bfloat16, beyond rounding. At clear positions tokens differ only if they are not those of the
    highest logits; what tells more is how many positions are clear, and how far logits are apart."""
    faults = {
        f"{found.wrong} tokens differ beyond what rounding explains": found.wrong,
        f"only {found.clear} of {found.positions} positions are clear": found.clear
        < min(found.positions / 2, found.clear_alone),
        f"logits differ by {found.ours:.1e}, by rounding only {found.theirs:.1e}": not found.ours
        <= found.theirs,
    }
    return [fault for fault, present in faults.items() if present]


def quantization_faults(model: TinyModel, quantization: str) -> list[str]:
    """What is wrong with quantized weights: they are refused, of another size than announced, no smaller, or
    parts have not the logits of the whole bit for bit."""
    plain, announced = (describe(model.folder, "float32", kind) for kind in ("none", quantization))
    try:
        whole, split = (model.circuit(cuts, quantization=quantization) for cuts in (WHOLE, SPLITS[-1]))
    except UnsupportedArchitecture as refusal:
        return [f"it is refused: {refusal.reason}"]
    engine, middle = split[1]
    held, said = engine.weight_bytes, announced.weight_bytes(middle)
    faults = {
        f"{held} bytes are held, and {said} announced": abs(held - said) > 0.02 * said,
        "matrices are no smaller": said > plain.weight_bytes(middle) / 2,
        "parts differ from the whole": not same_bits((whole, split), ragged_prompts(model.vocabulary)[:3]),
    }
    return [fault for fault, present in faults.items() if present]


def division_faults(model: TinyModel, ranks: int) -> list[str]:
    """What is wrong where so many ranks divide the layers."""
    manifest = read_manifest(model.folder)
    divided = RankThreads(model.folder, manifest, describe(manifest, "float32"), ranks)
    ids = list(ragged_prompts(model.vocabulary)[0])
    found = torch.cat([divided.step(ids), *(divided.step([token]) for token in range(TOKENS))])
    expected = model.whole((*ids, *range(TOKENS)), TOKENS + 1)
    apart = float((found - expected).abs().max() / expected.abs().max())
    return [] if apart <= TOLERANCE else [f"logits differ by {apart:.1e} of the largest"]
