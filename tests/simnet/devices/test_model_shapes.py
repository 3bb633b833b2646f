"""Shapes of models against what their makers publish of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.simnet.devices.layer_shapes import Experts, LatentAttention
from molink.simnet.devices.model_shapes import MODEL_SHAPES

PUBLISHED = {
    "llama-30b": 32_528_943_616,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 0.6e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen3-235b-a22b": 235.1e9,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671e9,
}
ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "deepseek-v3": 37e9,
}
"""As the makers' papers and model cards round them."""

experts = st.builds(Experts, st.integers(8, 512), st.integers(1, 8), st.integers(1, 4096))


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_those_that_are_published(name: str, parameters: float) -> None:
    assert MODEL_SHAPES[name].parameters == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(("name", "parameters"), ACTIVE.items())
def test_active_parameters_of_mixtures_are_those_that_are_published(name: str, parameters: float) -> None:
    assert MODEL_SHAPES[name].active_parameters == pytest.approx(parameters, rel=0.02)


def test_every_shape_is_among_the_published_but_for_the_bundled_model() -> None:
    assert set(MODEL_SHAPES) - set(PUBLISHED) == {"tiny-shakespeare"}


def test_specs_weigh_what_the_parameters_do() -> None:
    for shape in MODEL_SHAPES.values():
        spec = shape.spec()
        tied = shape.embed_parameters if shape.tied else 0
        assert spec.weight_bytes(spec.whole) == shape.element_bytes * (shape.parameters + tied)


def test_caches_of_a_token_and_layer() -> None:
    """Of Qwen2-7B 4 heads of 128, keys and values; of DeepSeek-V3 a latent of 512 and 64 of the shared key."""
    assert MODEL_SHAPES["qwen2-7b"].kv_bytes_per_token == 2 * 4 * 128 * 2
    assert MODEL_SHAPES["llama-2-70b"].kv_bytes_per_token == 4096
    assert MODEL_SHAPES["deepseek-v3"].kv_bytes_per_token == (512 + 64) * 2
    assert MODEL_SHAPES["deepseek-v3"].spec().kv_bytes_per_token == (1152,) * 61


def test_a_row_of_llama_30b_is_what_the_transmission_paper_says() -> None:
    assert MODEL_SHAPES["llama-30b"].activation_bytes == 13312


@given(experts, st.integers(1, 10_000))
def test_rows_read_at_least_one_row_s_experts_and_at_most_all(mixture: Experts, rows: int) -> None:
    assert mixture.active <= mixture.distinct(rows) * (1 + 1e-9)
    assert mixture.distinct(rows) <= min(mixture.count, rows * mixture.active) * (1 + 1e-9)
    assert mixture.distinct(rows) <= mixture.distinct(rows + 1)


def test_layers_of_deepseek_v3_are_unequal() -> None:
    shape = MODEL_SHAPES["deepseek-v3"]
    assert shape.layer_parameters(2) < 0.1 * shape.layer_parameters(3)
    assert shape.row_parameters(2) == shape.layer_parameters(2)
    assert shape.read_parameters(3, 1) == pytest.approx(shape.row_parameters(3))
    assert shape.read_parameters(3, 100_000) == pytest.approx(shape.layer_parameters(3))


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="experts are active"):
        Experts(count=4, active=5, intermediate_size=8)
    with pytest.raises(ValueError, match="negative"):
        Experts(count=4, active=2, intermediate_size=8, shared=-1)
    with pytest.raises(ValueError, match="at least 1"):
        LatentAttention(query_rank=1, kv_rank=0, rope_dim=1, head_dim=1, value_dim=1)
