"""Ranks of a quantized model hold parts of what the whole one holds, number for number, and compute its tokens."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.devices.rank_threads import RankThreads
from support.models.tiny_models import make_tiny_model
from support.pairwise import usually
from torch import Tensor

from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint import store
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.errors import WeightsError
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.matrices.quantized_matrices import Int8Matrices, Nf4Matrices, QuantizedMatrices
from molink.shards.model.tensor_parallel import Division, Shard
from molink.shards.spec import ModelSpec

PROMPT = [5, 6, 7, 9, 11, 200, 3]
TOKENS = 16


def described(folder: Path, quantization: str) -> tuple[Manifest, ModelSpec]:
    manifest = store.read_manifest(folder)
    return manifest, store.describe(manifest, "float32", quantization)


def numbers_of(matrices: QuantizedMatrices, stack: tuple[int, ...]) -> Tensor:
    return torch.stack([matrices[index] for index in range(stack[0])]) if stack else matrices[...]


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    usually(
        [("mixtral", "nf4")],
        [("llama", "nf4"), ("llama", "int8"), ("qwen2", "nf4"), ("qwen2", "int8"), ("mixtral", "int8")],
    ),
)
def test_two_ranks_generate_the_tokens_of_the_quantized_whole(
    architecture: str, quantization: str, tmp_path: Path
) -> None:
    # half a row is whole blocks of nf4
    folder = make_tiny_model(
        architecture, tmp_path, hidden_size=128, intermediate_size=256, num_hidden_layers=3
    )
    manifest, spec = described(folder, quantization)
    stage = load_stage(folder, spec.whole, StageSettings("float32", quantization))
    engine = Engine(spec, "cpu")
    engine.attach(stage)
    cache = engine.new_cache(spec.whole, 64)
    ranks = RankThreads(folder, manifest, spec, 2)
    tokens = PROMPT
    for _ in range(TOKENS):
        expected = engine.step(spec.whole, [Rows(cache, len(tokens), tuple(tokens), logit_rows=1)], None)
        logits = ranks.step(tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert int(logits.argmax()) == int(expected.argmax())
        tokens = [int(expected.argmax())]
    ends = spec.embed_bytes + spec.head_bytes
    for rank in ranks.stages:
        assert rank.weight_bytes - ends < 0.65 * (stage.weight_bytes - ends)


@given(
    rows=st.integers(1, 4).map(lambda count: count * 4),
    blocks=st.integers(1, 3),
    stack=st.sampled_from([(), (3,)]),
    by_rows=st.booleans(),
    matrices=st.sampled_from([1, 2]),
    kind=st.sampled_from([Int8Matrices, Nf4Matrices]),
)
def test_a_part_of_quantized_matrices_is_that_part_of_their_numbers(
    rows: int,
    blocks: int,
    stack: tuple[int, ...],
    by_rows: bool,
    matrices: int,
    kind: type[Int8Matrices] | type[Nf4Matrices],
) -> None:
    generator = torch.Generator().manual_seed(rows * blocks)
    whole = kind.of(torch.randn(*stack, rows, blocks * 256, generator=generator))
    dimension = len(stack) + (0 if by_rows else 1)
    for rank in range(2):
        division = Division(dimension, matrices, rank, 2)
        part = whole.part(division)
        assert torch.equal(numbers_of(part, stack), division.part(numbers_of(whole, stack)))
        assert division.whole_shape(numbers_of(part, stack).shape) == tuple(numbers_of(whole, stack).shape)


def test_ranks_share_rows_in_nf4_only_in_whole_blocks(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path, num_hidden_layers=2)
    _, spec = described(folder, "nf4")
    shard = Shard(0, 2, lambda partial: partial)
    with pytest.raises(
        WeightsError, match=r"ranks cannot share .* in nf4: its rows of 32 .* choose one device, or int8"
    ):
        load_stage(folder, spec.whole, StageSettings("float32", "nf4", shard=shard))
    load_stage(folder, spec.whole, StageSettings("float32", "int8", shard=shard))
