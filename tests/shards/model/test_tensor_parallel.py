"""Layers divided over ranks compute what the whole model computes, and no rank holds what it does not need."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices.rank_threads import RankThreads
from support.models.tiny_models import ARCHITECTURES, greedy_reference, load_reference, make_tiny_model
from transformers import AutoConfig

from molink.shards.checkpoint import store
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.tensor_parallel import Shard, division_refusal, vocabulary_part
from molink.shards.spec import ModelSpec

PROMPT = [5, 6, 7, 9, 11, 200, 3]
TOKENS = 24
DIVIDED = ["llama", "qwen2", "mixtral"]
"""Dense, with biases, and with experts; each with two key-value heads for four heads."""
MORE = [
    "llama_tied",
    "mistral",
    "qwen2_sliding",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "cohere",
    "cohere2",
    "granite",
    "starcoder2",
    "phi",
    "smollm3",
    "ernie4_5",
]
WHOLE = [
    "phi3",
    "gpt2",
    "glm4",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo2",
    "opt",
    "bloom",
    "falcon",
    "stablelm",
]

Opened = tuple[Path, Manifest, ModelSpec]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Tiny models, each made once."""
    made: dict[str, Opened] = {}

    def of(architecture: str) -> Opened:
        if architecture not in made:
            folder = make_tiny_model(architecture, tmp_path_factory.mktemp(architecture))
            manifest = store.read_manifest(folder)
            made[architecture] = (folder, manifest, store.describe(manifest, "float32"))
        return made[architecture]

    return of


def check_equal(folder: Path, manifest: Manifest, spec: ModelSpec) -> None:
    ranks = RankThreads(folder, manifest, spec, 2)
    expected = load_reference(folder)(torch.tensor([PROMPT])).logits[0, -1]
    logits = ranks.step(PROMPT)[0]
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    first = int(logits.argmax())
    greedy = [first]
    while len(greedy) < TOKENS:
        greedy.append(int(ranks.step(greedy[-1:])[0].argmax()))
    assert greedy == greedy_reference(folder, PROMPT, TOKENS)


@pytest.mark.parametrize("architecture", DIVIDED)
def test_two_ranks_generate_the_tokens_of_the_whole_model(
    architecture: str, opened: Callable[[str], Opened]
) -> None:
    check_equal(*opened(architecture))


@pytest.mark.full
@pytest.mark.parametrize("architecture", MORE)
def test_so_do_they_for_every_architecture_whose_plan_is_understood(
    architecture: str, opened: Callable[[str], Opened]
) -> None:
    check_equal(*opened(architecture))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_each_rank_holds_its_share_and_its_heads_cache(
    architecture: str, opened: Callable[[str], Opened]
) -> None:
    folder, manifest, spec = opened(architecture)
    ranks = RankThreads(folder, manifest, spec, 2)
    whole = load_stage(folder, spec.whole, StageSettings("float32"), manifest=manifest)
    embedding = spec.embed_bytes
    divided = (whole.weight_bytes - embedding) / 2
    for stage, cache in zip(ranks.stages, ranks.caches, strict=True):
        assert divided <= stage.weight_bytes - embedding < 1.05 * divided  # norms and routers are whole
        assert cache.nbytes == spec.kv_bytes(spec.whole, 128) // 2


def test_four_ranks_share_four_heads(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, num_key_value_heads=4, num_hidden_layers=2)
    manifest = store.read_manifest(folder)
    ranks = RankThreads(folder, manifest, store.describe(manifest, "float32"), 4)
    assert ranks.greedy(PROMPT, TOKENS) == greedy_reference(folder, PROMPT, TOKENS)


@pytest.mark.parametrize("architecture", WHOLE)
def test_what_cannot_be_divided_is_refused(architecture: str) -> None:
    model_type, settings = ARCHITECTURES[architecture]
    assert division_refusal(AutoConfig.for_model(model_type, **settings), 1)


@pytest.mark.parametrize("architecture", [*DIVIDED, *MORE])
def test_what_can_be_divided_is_not_refused(architecture: str) -> None:
    model_type, settings = ARCHITECTURES[architecture]
    ranks = 2 if settings.get("num_key_value_heads") == 2 else 1
    assert division_refusal(AutoConfig.for_model(model_type, **settings), ranks) is None


def test_heads_that_do_not_divide_are_refused_with_their_number(opened: Callable[[str], Opened]) -> None:
    folder, _, spec = opened("llama")
    with pytest.raises(UnsupportedArchitecture, match="its 2 key-value heads cannot be divided by 4"):
        load_stage(folder, spec.whole, StageSettings("float32", shard=Shard(0, 4, lambda partial: partial)))
    with pytest.raises(UnsupportedArchitecture, match="its 4 attention heads cannot be divided by 3"):
        load_stage(folder, spec.whole, StageSettings("float32", shard=Shard(0, 3, lambda partial: partial)))


def test_an_mlp_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, intermediate_size=95, num_hidden_layers=2)
    spec = store.describe(store.read_manifest(folder), "float32")
    with pytest.raises(WeightsError, match=r"the 95 of layers\.0\.mlp\.gate_proj cannot be divided by 2"):
        load_stage(folder, spec.whole, StageSettings("float32", shard=Shard(0, 2, lambda partial: partial)))


def test_altered_weights_are_found_although_only_a_part_is_kept(opened: Callable[[str], Opened]) -> None:
    folder, manifest, spec = opened("llama")
    other = manifest.model_copy(update={"layers": manifest.layers[::-1]})
    with pytest.raises(WeightsError, match="a file was altered"):
        load_stage(
            folder,
            spec.whole,
            StageSettings("float32", shard=Shard(1, 2, lambda partial: partial)),
            manifest=other,
        )


@pytest.mark.parametrize("vocabulary", [7, 384, 128256])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_divide_the_vocabulary_without_gap_or_overlap(vocabulary: int, ranks: int) -> None:
    parts = [vocabulary_part(vocabulary, rank, ranks) for rank in range(ranks)]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == vocabulary
    assert max(stop - start for start, stop in parts) - min(stop - start for start, stop in parts) <= 1
