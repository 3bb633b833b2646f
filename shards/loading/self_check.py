"""Whether a kind of model is exact when it is split: a tiny random model of the kind, split against whole.

What a peer serves must be what the whole model would compute, and transformers has more architectures than anybody
can read. So each is tried before it is served, with the flags of the model in question.
"""

import copy
import functools
import hashlib
import itertools
import json
import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import transformers
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.conversions import ALIBI
from molink.shards.errors import UnsupportedArchitecture
from molink.shards.loading.lazy_tensors import CountedTensor, LoadCounter
from molink.shards.loading.lean_transformers import bring_in_meta_kernels
from molink.shards.loading.stage_builder import (
    TROUBLE,
    FoundTensors,
    Recipe,
    build_model,
    make_stage,
    quiet_transformers,
)
from molink.shards.loading.tiny_config import tiny_config
from molink.shards.model.partial_model import layers_path
from molink.shards.model.probe import other_layers
from molink.shards.model.stage import Batching, StageFacts
from molink.shards.model.text_backbone import decoder_name, generative_class, keep_text, text_config
from molink.shards.spec import ModelSpec, Span
from molink.shards.store.store_notes import replace_file

_NOWHERE: Final = Path()
_LENGTHS: Final = (17, 9, 13)
"""Tokens of the sessions: more than a tiny model's window."""
_CHUNKS: Final = (6, 1, 1, 1, 3, 1)
"""New tokens of a session in its first steps, over and over."""
_TOLERANCE: Final = 1e-3
"""Largest difference of logits, relative to the largest logit. Rounding gives some 1e-6, a wrong mask 1e-1."""


_STATELESS: Final = (Batching.PACKED, Batching.PADDED)
_STATEFUL: Final = (Batching.ROWS, Batching.SERIAL_ROWS, Batching.LONE)
"""What is tried, in order: the first that is exact is used."""
_SAID: Final = {
    Batching.PADDED: "in left-padded batches",
    Batching.SERIAL_ROWS: "token by token",
    Batching.LONE: "one by one",
}


_SAID_MOST: Final = 200


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """How models of a kind can be served."""

    batching: Batching | None
    """None: not at all."""
    reason: str
    """Why not in packed batches, or not at all; empty if packed."""


@dataclass(frozen=True, slots=True)
class _Flags:
    """A tiny configuration, compared by what it says."""

    text: str
    config: PreTrainedConfig = field(compare=False)


def self_check(config: PreTrainedConfig, memory: Path | None = None) -> SelfCheckResult:
    """How models with the flags of `config` can be served exactly. A few hundred milliseconds the first time, for each
    architecture and set of flags: in a process, or with the same software if the folder `memory` remembers it."""
    try:
        with quiet_transformers():
            tiny = tiny_config(config)
    except TROUBLE as error:
        return SelfCheckResult(None, f"no tiny model of its kind could be made to check it: {_said(error)}")
    flags = _Flags(tiny.to_json_string(use_diff=False), tiny)
    if memory is None:
        return _check(flags)
    path = memory / f"self-check-{hashlib.sha256((flags.text + software_state()).encode()).hexdigest()}.json"
    verdict = _remembered(path)
    if verdict is None:
        verdict = _check(flags)
        batching = None if verdict.batching is None else verdict.batching.value
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"batching": batching, "reason": verdict.reason}).encode())
    return verdict


def _remembered(path: Path) -> SelfCheckResult | None:
    """What was found out before; None if nothing was, or nothing readable."""
    try:
        content = json.loads(path.read_bytes())
        batching, reason = content["batching"], content["reason"]
        return SelfCheckResult(None if batching is None else Batching(batching), str(reason))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@functools.cache
def software_state() -> str:
    """What verdicts and trials depend on beside flags and weights: the libraries, and this package's own files."""
    own = sorted(Path(__file__).parents[1].rglob("*.py"))
    states = [(path.name, stat.st_size, stat.st_mtime_ns) for path in own for stat in [path.stat()]]
    return json.dumps([torch.__version__, transformers.__version__, platform.machine(), states])


@functools.lru_cache(maxsize=64)
def _check(flags: _Flags) -> SelfCheckResult:
    bring_in_meta_kernels()  # what is remembered must not depend on what this process has left out
    try:
        with quiet_transformers():
            whole = _random_model(flags.config)
            layers_path(whole)
            tensors = revert_weight_conversion(whole, whole.state_dict())
    except TROUBLE as error:
        return SelfCheckResult(None, f"a tiny model of its kind cannot be made: {_said(error)}")
    try:
        expected = _whole_logits(whole, tensors)
    except TROUBLE as error:
        alone = " with text alone" if set(whole.input_modalities) - {"text"} else ""
        return SelfCheckResult(None, f"a tiny model of its kind does not run{alone}: {_said(error)}")
    replaceable = whole.get_submodule(decoder_name(whole))._can_set_attn_implementation()  # noqa: SLF001 - transformers' only test
    reason = "" if replaceable else "its attention cannot be replaced by one for packed batches"
    for batching in _STATEFUL if other_layers(text_config(flags.config)) else _STATELESS:
        if batching.attends and not replaceable:
            continue
        found = _difference(flags.config, tensors, expected, batching)
        if found is None:
            return SelfCheckResult(batching, reason)
        reason = found if reason in ("", found) else f"{reason}; and {_SAID[batching]} {found}"
    return SelfCheckResult(None, reason)


def _said(error: Exception) -> str:
    """In one line, and no longer than one reads."""
    words = " ".join(str(error).removeprefix(f"{_NOWHERE}: ").split()) or type(error).__name__
    return words if len(words) <= _SAID_MOST else f"{words[:_SAID_MOST]}..."


def _whole_logits(whole: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """[tokens, vocabulary] of each session through the model in one piece and at once."""
    sessions = _sessions(text_config(whole.config).vocab_size)
    if not getattr(whole.config, ALIBI, False):
        with quiet_transformers(), torch.inference_mode():
            return [whole(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sessions]
    # transformers lacks the biases: the whole is ours as well, but without batches, chunks and cuts
    engine, span = _engine(whole.config, Span(0, whole.config.num_hidden_layers), tensors, Batching.PACKED)
    expected = []
    for ids in sessions:
        rows = [
            Rows(engine.new_cache(span, stop), stop, tuple(ids[:stop].tolist()), logit_rows=1)
            for stop in range(1, len(ids) + 1)
        ]
        expected.append(torch.cat([engine.step(span, [row], None) for row in rows]))
    return expected


def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model in float32 whose layers matter: matrices neither shrink nor blow up what goes through them."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        model = _initial_model(copy.deepcopy(config))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            parameter.data.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.add_(noise.clamp(-3, 3) * 0.1)
    return model.eval()


def _initial_model(config: PreTrainedConfig) -> PreTrainedModel:
    """In float32. What a model has for more than text never takes memory."""
    kind = generative_class(config)
    if kind is None:
        raise LookupError(f"no class generates text from a configuration of {config.model_type}")
    if text_config(config) is config:
        made: PreTrainedModel = kind._from_config(config, dtype=torch.float32)  # noqa: SLF001 - what AutoModel would call
        return made
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.float32)  # noqa: SLF001 - as above
    keep_text(model)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def _sessions(vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator) for length in _LENGTHS]


def _difference(
    config: PreTrainedConfig, tensors: Mapping[str, Tensor], expected: Sequence[Tensor], batching: Batching
) -> str | None:
    """What goes wrong when the model is split in three and sessions join each other, or None."""
    layers = text_config(config).num_hidden_layers
    cuts = (0, 1, max(min(2, layers), layers - 1), layers)
    try:
        hops = [
            _engine(config, Span(*cut), tensors, batching)
            for cut in itertools.pairwise(cuts)
            if cut[0] < cut[1]
        ]
        worst = _largest_difference(hops, expected)
    except UnsupportedArchitecture as refusal:
        return refusal.reason
    except TROUBLE as error:
        return f"a tiny model of its kind does not run in parts: {_said(error)}"
    if not worst <= _TOLERANCE:
        return "the parts of a tiny model of its kind compute something else than the whole"
    return None


def _engine(
    config: PreTrainedConfig, span: Span, tensors: Mapping[str, Tensor], batching: Batching
) -> tuple[Engine, Span]:
    counter = LoadCounter(None, 4)
    parts = {name: CountedTensor(name, _InMemory(tensor), counter, None) for name, tensor in tensors.items()}
    own = copy.deepcopy(config)
    recipe = Recipe(torch.float32, batching, exact=True)
    model = build_model(FoundTensors(_NOWHERE, parts), own, span, counter, recipe)
    stage = make_stage(_NOWHERE, model, own, span, recipe)
    engine = Engine(_spec_of(stage.facts), "cpu")
    engine.attach(stage)
    return engine, span


class _InMemory:
    """A tensor in the form of one that is stored."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: object) -> Tensor:
        return self._tensor[index].clone()  # type: ignore[index] # a slice or an ellipsis

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}[self._tensor.dtype]


def _spec_of(facts: StageFacts) -> ModelSpec:
    """What an engine needs to know; nobody asks this model's sizes."""
    return ModelSpec(
        model_hash="",
        content_hash="",
        name="self-check",
        architecture=facts.architecture,
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length,
        dtype="float32",
        quantization="none",
        layer_bytes=(0,) * facts.layers,
        embed_bytes=0,
        head_bytes=0,
        kv_bytes_per_token=(0,) * facts.layers,
        stop_token_ids=(),
    )


def _largest_difference(hops: Sequence[tuple[Engine, Span]], expected: Sequence[Tensor]) -> float:
    """Runs the sessions, each joining one step after the one before; relative to the largest logit."""
    sessions = _sessions(hops[0][0].spec.vocabulary_size)
    caches = [[engine.new_cache(span, len(ids)) for engine, span in hops] for ids in sessions]
    fed = [0] * len(sessions)
    worst = 0.0
    for step in range(sum(_LENGTHS)):
        counts = {
            one: min(_CHUNKS[(step - one) % len(_CHUNKS)], len(ids) - fed[one])
            for one, ids in enumerate(sessions)
            if one <= step and fed[one] < len(ids)
        }
        if not counts:
            break
        logits = torch.empty(0)
        for hop, (engine, span) in enumerate(hops):
            rows = []
            for one, count in counts.items():
                new = tuple(sessions[one][fed[one] : fed[one] + count].tolist())
                rows.append(Rows(caches[one][hop], count, new if span.start == 0 else None, logit_rows=1))
            logits = engine.step(span, rows, None if span.start == 0 else logits)
        for found, (one, count) in zip(logits, counts.items(), strict=True):
            fed[one] += count
            right = expected[one][fed[one] - 1]
            difference = float((found - right).abs().max() / right.abs().max())
            worst = difference if math.isnan(difference) else max(worst, difference)
    return worst
