"""Layers with sliding windows reserve what they can hold at once, and never need more."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.circuit_runs import (
    DEVICE,
    KEY,
    Circuit,
    Run,
    engine_with,
    finish,
    start_sharing,
    step_runs,
)
from support.models.tiny_models import ARCHITECTURES, VOCABULARY, greedy_references, make_tiny_model
from support.pairwise import usually

from molink.shards.batching.engine import Engine
from molink.shards.checkpoint import store
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.prefix import block_names
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import KV_BLOCK_TOKENS, MAX_STEP_TOKENS, Span, most_kv_blocks

TinyModel = Callable[[str], Path]

WHOLE = Span(0, 6)
CAPACITY = 1600
QUICK = ("llama", "qwen2_sliding", "cohere2", "mistral", "gemma2", "gpt_oss", "falcon_alibi")
WINDOWED = ("mistral", "gemma3", "gpt_oss")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models whose context is longer than what a window reserves."""
    folder = tmp_path_factory.mktemp("windows")

    def make(architecture: str) -> Path:
        if not (folder / architecture).exists():
            make_tiny_model(architecture, folder, max_position_embeddings=2048)
        return folder / architecture

    return make


def feed(engine: Engine, cache: SequenceCache, steps: list[int]) -> None:
    """As steps of so many new tokens do, without what they compute."""
    for tokens in steps:
        before = cache.nbytes
        cache.begin_step()
        cache.require(tokens)
        assert cache.nbytes <= before
        cache.advance(tokens)
        engine.pool.check_integrity()


@given(
    tokens=st.integers(1, 5000),
    window=st.none() | st.integers(1, 3000),
    start=st.integers(0, 5000),
    step=st.integers(1, MAX_STEP_TOKENS),
)
def test_no_step_sees_or_writes_more_blocks_than_are_reserved(
    tokens: int, window: int | None, start: int, step: int
) -> None:
    start = min(start, tokens - 1)
    stop = min(start + step, tokens)
    first = 0 if window is None else max(0, start - window + 1) // KV_BLOCK_TOKENS
    blocks = -(-stop // KV_BLOCK_TOKENS) - first
    most = most_kv_blocks(tokens, window)
    assert blocks <= most <= -(-tokens // KV_BLOCK_TOKENS)
    assert window is None or most <= (window + MAX_STEP_TOKENS) // KV_BLOCK_TOKENS + 2


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.full)
        for name in ARCHITECTURES
        if name != "qwen3_next"
    ],
)
def test_a_lease_counts_what_the_engine_reserves(tiny_model: TinyModel, architecture: str) -> None:
    folder = tiny_model(architecture)
    spec = store.describe(store.read_manifest(folder), "float32", "none")
    layouts = load_stage(folder, spec.whole, StageSettings("float32", device=DEVICE, exact=True)).layouts
    assert (spec.kv_windows or (None,) * spec.layers) == tuple(layouts[layer].window for layer in spec.whole)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_what_is_reserved_is_enough_whatever_the_steps(
    long_model: Callable[[str], Path], architecture: str
) -> None:
    folder = long_model(architecture)
    spec = store.describe(store.read_manifest(folder), "float32", "none")
    engine = engine_with(folder, (0, 6))
    reserved = spec.kv_bytes(WHOLE, CAPACITY)
    windows = sum(window is not None for window in spec.kv_windows)
    assert reserved < (1 - 0.6 * windows / 6) * CAPACITY * sum(spec.kv_bytes_per_token)
    engine.pool.limit(reserved)
    names = block_names(range(CAPACITY), KEY)
    for steps in ([512, 512, 512, 64], [1] * 700, [1, 511, 2, 512, 3, 512, 59], [100] * 16):
        cache = engine.new_cache(WHOLE, CAPACITY)
        assert cache.nbytes == reserved
        feed(engine, cache, steps)
        cache.close()
        named = engine.new_cache(WHOLE, CAPACITY, names)
        named.truncate(0)
        feed(engine, named, steps)
        named.close()
    engine.pool.forget(WHOLE)
    assert engine.pool.used_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("architecture", usually(["gemma3"], WINDOWED))
def test_long_sessions_that_share_and_are_cancelled_have_their_tokens(
    long_model: Callable[[str], Path], architecture: str
) -> None:
    folder = long_model(architecture)
    draw = random.Random(7)
    text = tuple(draw.randrange(VOCABULARY) for _ in range(900))
    prompts = [text, text[:700], text[:250] + text[:600], text[:640], text[300:], text[:30]]
    expected = greedy_references(folder, [list(prompt) for prompt in prompts], 40)
    engine = engine_with(folder, (0, 6))
    spec = store.describe(store.read_manifest(folder), "float32", "none")
    circuit: Circuit = [(engine, WHOLE)]
    engine.pool.limit(3 * spec.kv_bytes(WHOLE, 940))
    for round_ in range(3):
        waiting, running = list(zip(prompts, expected, strict=True)), []
        while waiting or running:
            while waiting and len(running) < 3:
                prompt, tokens = waiting.pop()
                running.append((start_sharing(circuit, prompt, 40, chunk=100 + 150 * round_), tokens))
            step_runs(circuit, [run for run, _ in running])
            engine.pool.check_integrity()
            for run, tokens in running:
                assert run.tokens == tokens[: len(run.tokens)]
                if len(run.tokens) == 40 or (run.tokens and draw.random() < 0.03):
                    run.caches[0].close()
            running = [pair for pair in running if not pair[0].caches[0].closed]
    assert engine.pool.tables == 0
    engine.pool.forget(WHOLE)
    assert engine.pool.used_bytes == 0


def test_windows_let_more_sessions_in(long_model: Callable[[str], Path]) -> None:
    folder = long_model("gemma3")
    spec = store.describe(store.read_manifest(folder), "float32", "none")
    engine = engine_with(folder, (0, 6))
    assert spec.kv_windows == (8, 8, 8, 8, 8, None)
    whole = CAPACITY * sum(spec.kv_bytes_per_token)
    engine.pool.limit(4 * whole)
    fitting = 4 * whole // spec.kv_bytes(WHOLE, CAPACITY)
    assert fitting == 8
    caches = [engine.new_cache(WHOLE, CAPACITY) for _ in range(fitting)]
    with pytest.raises(PoolFull):
        engine.new_cache(WHOLE, CAPACITY)
    assert sum(cache.nbytes for cache in caches) == engine.pool.used_bytes


def test_a_hit_may_go_back_within_what_its_windows_keep(long_model: Callable[[str], Path]) -> None:
    engine = engine_with(long_model("gemma3"), (0, 6))
    circuit: Circuit = [(engine, WHOLE)]
    text = tuple(7 * at % VOCABULARY for at in range(900))
    finish(circuit, [start_sharing(circuit, text, 4)], 4)
    names = block_names(text, KEY)
    (miss,) = finish(circuit, [Run(text, [engine.new_cache(WHOLE, 904)], chunk=300)], 4)
    for length in (896, 700, 0):
        cache = engine.new_cache(WHOLE, 904, names)
        assert cache.length == 896
        assert cache.least_length == (56 - 34) * 16 + 7
        cache.truncate(length, same_tokens=True)
        assert finish(circuit, [Run(text, [cache], chunk=300, fed=length)], 4) == [miss]
        cache.close()
    engine.pool.check_integrity()
