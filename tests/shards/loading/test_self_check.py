"""Before a peer serves a kind of model, it finds out whether it is exact; and it would notice if it were not."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.tiny_models import ARCHITECTURES, make_tiny_model
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from molink.shards.attention import attention
from molink.shards.attention.attention import AttentionRules
from molink.shards.batching import packed, padded
from molink.shards.batching.padded import LeftPaddedCache
from molink.shards.errors import UnsupportedArchitecture
from molink.shards.loading import self_check as checking
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.loading.self_check import self_check
from molink.shards.loading.tiny_config import LAYERS, tiny_config
from molink.shards.model import partial_model
from molink.shards.model.boundary import Boundary
from molink.shards.model.stage import Batching
from molink.shards.spec import Span

Breakage = Callable[[pytest.MonkeyPatch], None]
Checks = functools._lru_cache_wrapper


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    """Verdicts of this process are neither used here, nor do they come from here."""
    fresh = functools.lru_cache(maxsize=64)(checking._check.__wrapped__)
    monkeypatch.setattr(checking, "_check", fresh)
    return fresh


def config_of(name: str, **changes: object) -> PreTrainedConfig:
    architecture, settings = ARCHITECTURES[name]
    return CONFIG_MAPPING[architecture](**(settings | changes))


def attend_otherwise(change: Callable[[AttentionRules], AttentionRules]) -> Breakage:
    def breakage(patch: pytest.MonkeyPatch) -> None:
        right = attention.attend_sequence

        def wrong(query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules) -> Tensor:
            return right(query, key, value, change(rules))

        patch.setattr(packed, "attend_sequence", wrong)
        patch.setattr(packed, "attend_up_to_rounding", wrong)

    return breakage


def enter_by_the_base_model(patch: pytest.MonkeyPatch) -> None:
    """Hidden states go through what embeddings go through."""
    patch.setattr(Boundary, "_entered", lambda _self, layer: layer)


def leave_by_the_base_model(patch: pytest.MonkeyPatch) -> None:
    """Hidden states go through what those of the last layer go through."""
    patch.setattr(Boundary, "_left", lambda _self, layer: layer)
    patch.setattr(partial_model, "_FINAL_NORM", re.compile("nothing"))


BREAKAGES: dict[str, tuple[str, Breakage]] = {
    "a window is ignored": ("mistral", attend_otherwise(lambda rules: rules._replace(sliding_window=None))),
    "a window is one too long": ("mistral", attend_otherwise(lambda rules: rules._replace(sliding_window=6))),
    "a cap is ignored": ("gemma2", attend_otherwise(lambda rules: rules._replace(softcap=None))),
    "sinks are ignored": ("gpt_oss", attend_otherwise(lambda rules: rules._replace(sinks=None))),
    "a scale is ignored": ("granite", attend_otherwise(lambda rules: rules._replace(scaling=None))),
    "every part has the final norm": ("llama", leave_by_the_base_model),
    "every part scales embeddings": ("granite", enter_by_the_base_model),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_mistake_is_noticed(name: str, checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, breakage = BREAKAGES[name]
    config = config_of(kind, **({"attention_multiplier": 0.5} if kind == "granite" else {}))
    assert self_check(config).batching is Batching.PACKED
    checks.cache_clear()
    breakage(monkeypatch)
    assert self_check(config).batching is not Batching.PACKED


def test_padding_that_is_not_masked_is_noticed(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("falcon_alibi")
    assert self_check(config).batching is Batching.PADDED
    checks.cache_clear()
    right = LeftPaddedCache.mask
    monkeypatch.setattr(
        padded.LeftPaddedCache, "mask", lambda self, device: torch.ones_like(right(self, device))
    )
    verdict = self_check(config)
    assert verdict.batching is None
    assert "something else than the whole" in verdict.reason


def test_what_is_not_exact_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model("llama", tmp_path)
    leave_by_the_base_model(monkeypatch)
    with pytest.raises(UnsupportedArchitecture, match=r"something else than the whole.*docs/MODELS\.md"):
        load_stage(folder, Span(0, 2), StageSettings("float32"))


def test_positions_that_scale_beyond_the_context_do_not_hinder_within() -> None:
    """Dynamic scaling changes nothing up to the length that a model was trained on, and peers go no further."""
    config = config_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert self_check(config).batching is Batching.PACKED


def test_models_of_equal_flags_share_a_check_and_others_do_not(checks: Checks) -> None:
    for changes in ({}, {"hidden_size": 128, "num_hidden_layers": 9}, {"vocab_size": 50_000}):
        assert self_check(config_of("llama", **changes)).batching is Batching.PACKED
    assert checks.cache_info().misses == 1
    assert self_check(config_of("llama", attention_bias=True)).batching is Batching.PACKED
    assert checks.cache_info().misses == 2


def test_a_tiny_configuration_keeps_the_flags() -> None:
    tiny = tiny_config(config_of("gemma3", num_hidden_layers=30, hidden_size=2048, rms_norm_eps=1e-3))
    assert tiny.num_hidden_layers == LAYERS
    assert set(tiny.layer_types) == {"sliding_attention", "full_attention"}
    assert (tiny.hidden_size, tiny.rms_norm_eps, tiny.tie_word_embeddings) == (64, 1e-3, True)
    assert tiny_config(config_of("qwen2_sliding")).layer_types[-1] == "sliding_attention"
