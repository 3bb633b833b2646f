"""Many sessions in little memory: all get their tokens, and nothing is left behind."""

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.live_tensors import live_tensor_bytes
from support.models.circuit_runs import KEY, Circuit, Run, engine_with, finish, greedy, start_run, step_runs
from support.models.tiny_models import VOCABULARY, greedy_references

from molink.shards.batching.engine import Engine
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import CacheFull
from molink.shards.kv.prefix import block_names
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

WHOLE = Span(0, 6)
SESSIONS = 50
MANY_SESSIONS = 500
LARGEST_BATCH = 12
BLOCK_BYTES = 16 * 6 * 2 * 2 * 16 * 4
"""Of tokens x layers x (keys, values) x heads x dimensions x float32."""


@dataclass(frozen=True)
class Wish:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """What transformers generates."""
    cancelled_after: int | None
    """Steps, or None."""


def wishes(folder: Path, count: int) -> list[Wish]:
    """Random lengths, some with a beginning in common; a third is cancelled somewhere."""
    draw = random.Random(4)
    texts = [tuple(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 90))) for _ in range(16)]
    texts += [texts[draw.randrange(8)] + text[:20] for text in texts]
    expected = greedy_references(folder, [list(text) for text in texts], 8)
    made = []
    for _ in range(count):
        at = draw.randrange(len(texts))
        stop = draw.randint(1, 8)
        cancelled = draw.randint(0, 8) if draw.random() < 1 / 3 else None
        made.append(Wish(texts[at], tuple(expected[at][:stop]), cancelled))
    return made


def begin(engine: Engine, wish: Wish, *, reserve: bool) -> Run:
    names = block_names(wish.prompt[:-1], KEY)
    cache = engine.new_cache(WHOLE, len(wish.prompt) + len(wish.tokens), names, reserve=reserve)
    return Run(wish.prompt, [cache], chunk=24, fed=cache.length)


def serve_all(engine: Engine, wanted: list[Wish], *, reserve: bool, watch: Callable[[int], None]) -> None:
    """Sessions wait until the pool takes them, step together, and end by themselves, by `close` or by being
    forgotten."""
    waiting = list(reversed(wanted))
    running: list[tuple[Wish, Run]] = []
    steps, most, ended = 0, LARGEST_BATCH, 0
    while waiting or running:
        while waiting and len(running) < 2 * LARGEST_BATCH:
            try:
                running.append((waiting[-1], begin(engine, waiting[-1], reserve=reserve)))
            except PoolFull:
                assert running, "not even one session fits"
                break
            waiting.pop()
        steps += 1
        try:
            going_on = step_some(engine, running[:most], steps)
        except PoolFull:
            assert most > 1, "not even one session fits"
            most = most // 2
            continue
        ended += len(running[:most]) - len(going_on)
        running = running[most:] + going_on
        most = LARGEST_BATCH
        watch(ended)
    assert ended == len(wanted)


def step_some(engine: Engine, batch: list[tuple[Wish, Run]], steps: int) -> list[tuple[Wish, Run]]:
    """One step; those of the batch that go on."""
    step_runs([(engine, WHOLE)], [run for _, run in batch])
    going_on = []
    for index, (wish, run) in enumerate(batch):
        assert tuple(run.tokens) == wish.tokens[: len(run.tokens)]
        cancelled = wish.cancelled_after is not None and steps % 9 == wish.cancelled_after
        if len(run.tokens) < len(wish.tokens) and not cancelled:
            going_on.append((wish, run))
        elif index % 2:
            run.caches[0].close()
    return going_on


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "reserve", "sessions"),
    [
        ("llama", True, SESSIONS),
        pytest.param("llama", True, MANY_SESSIONS, marks=pytest.mark.full),
        pytest.param("llama", False, MANY_SESSIONS, marks=pytest.mark.full),
        pytest.param("gemma3", True, MANY_SESSIONS, marks=pytest.mark.full),
        pytest.param("gemma3", False, MANY_SESSIONS, marks=pytest.mark.full),
    ],
)
def test_sessions_share_a_tenth_of_the_memory_that_they_want(
    tiny_model: TinyModel, architecture: str, reserve: bool, sessions: int
) -> None:
    folder = tiny_model(architecture)
    wanted = wishes(folder, sessions)
    engine = engine_with(folder, (0, 6))
    blocks = sorted(-(-(len(wish.prompt) + len(wish.tokens)) // 16) for wish in wanted)
    at_once = sum(blocks) * 2 * LARGEST_BATCH // sessions
    limit = max(at_once // 10, blocks[-1]) * BLOCK_BYTES
    assert engine.pool.limit(limit)
    held: list[int] = []

    def watch(ended: int) -> None:
        assert engine.pool.used_bytes <= limit
        if ended >= sessions // 5 * len(held):
            engine.pool.check_integrity()
            gc.collect()
            held.append(live_tensor_bytes())

    serve_all(engine, wanted, reserve=reserve, watch=watch)
    gc.collect()
    engine.pool.check_integrity()
    assert engine.pool.tables == 0
    engine.pool.forget(WHOLE)
    assert engine.pool.used_bytes == 0
    assert held[-1] - held[3] <= limit


@pytest.mark.parametrize(
    "architecture", ["gemma2", pytest.param("llama", marks=pytest.mark.full), "deepseek_v3"]
)
@pytest.mark.parametrize("reserve", [True, False])
def test_a_preempted_session_goes_on_as_if_nothing_had_been(
    tiny_model: TinyModel, architecture: str, reserve: bool
) -> None:
    engine = engine_with(tiny_model(architecture), (0, 6))
    circuit: Circuit = [(engine, Span(0, 3)), (engine, Span(3, 6))]
    prompt = tuple(range(40, 80))
    expected = greedy(circuit, prompt, 12)
    caches = [engine.new_cache(span, 60, reserve=reserve) for _, span in circuit]
    run = Run(prompt, caches, chunk=15)
    for _ in range(6):
        step_runs(circuit, [run])
        for cache in caches:
            cache.suspend()
        assert engine.pool.used_bytes == 0
    assert finish(circuit, [run], 12) == [expected]
    engine.pool.check_integrity()


def test_recomputing_a_preempted_session_gives_the_same_tokens(tiny_model: TinyModel) -> None:
    circuit: Circuit = [(engine_with(tiny_model("llama"), (0, 6)), WHOLE)]
    prompt = tuple(range(40, 80))
    expected = greedy(circuit, prompt, 12)
    run = start_run(circuit, prompt, 12)
    while len(run.tokens) < 5:
        step_runs(circuit, [run])
    run.caches[0].close()
    again = start_run(circuit, prompt + tuple(run.tokens), 7, chunk=16)
    (rest,) = finish(circuit, [again], 7)
    assert run.tokens + rest == expected


def test_a_step_takes_the_blocks_of_sessions_that_do_not_step(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, WHOLE)]
    prompts = [tuple(range(start, start + 40)) for start in (10, 60, 110)]
    expected = [greedy(circuit, prompt, 9) for prompt in prompts]
    runs = [Run(prompt, [engine.new_cache(WHOLE, 49, reserve=False)]) for prompt in prompts]
    engine.pool.limit(4 * BLOCK_BYTES)
    for _ in range(9):
        for run in runs:
            step_runs(circuit, [run])
            assert [one.caches[0].holds_blocks for one in runs].count(True) == 1
    assert [run.tokens for run in runs] == expected
    with pytest.raises(PoolFull):
        step_runs(circuit, [Run(prompt, [engine.new_cache(WHOLE, 49, reserve=False)]) for prompt in prompts])


@pytest.mark.parametrize("reserve", [True, False])
def test_a_window_that_has_passed_a_block_frees_it(tiny_model: TinyModel, reserve: bool) -> None:
    engine = engine_with(tiny_model("mistral"), (0, 6))
    circuit: Circuit = [(engine, WHOLE)]
    prompt = tuple(range(200))
    expected = greedy(circuit, prompt, 12)
    run = Run(prompt, [engine.new_cache(WHOLE, 212, reserve=reserve)], chunk=40)
    assert finish(circuit, [run], 12) == [expected]
    assert reserve or run.caches[0].nbytes <= 2 * BLOCK_BYTES
    run.caches[0].suspend()
    run.caches[0].require(1)
    with pytest.raises(ValueError, match="window"):
        run.caches[0].truncate(100)
    run.caches[0].truncate(0)
    assert finish(circuit, [Run(prompt, run.caches, chunk=40)], 12) == [expected]
    engine.pool.check_integrity()


def test_a_session_with_windows_goes_on_elsewhere(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("gemma2"), (0, 6))
    circuit: Circuit = [(engine, WHOLE)]
    prompt = tuple(range(60))
    run = start_run(circuit, prompt, 12)
    step_runs(circuit, [run])
    source, target = run.caches[0], engine.new_cache(WHOLE, 72)
    target.restore(0, 60, source.export(0, 60))
    step_runs(circuit, [run])
    target.restore(60, 1, source.export(60, 61))
    other = Run(prompt, [target], fed=61, tokens=list(run.tokens))
    assert finish(circuit, [run], 12) == finish(circuit, [other], 12)


def test_a_closed_session_cannot_step(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    run = start_run([(engine, WHOLE)], (1, 2, 3), 4)
    run.caches[0].close()
    run.caches[0].close()
    engine.pool.check_integrity()
    with pytest.raises(ValueError, match="ended"):
        step_runs([(engine, WHOLE)], [run])
    assert engine.pool.used_bytes == 0


def test_a_session_that_does_not_fit_leaves_nothing(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("gemma2"), (0, 6))
    engine.pool.limit(5 * BLOCK_BYTES)
    with pytest.raises(PoolFull):
        engine.new_cache(WHOLE, 81)
    engine.pool.check_integrity()
    assert engine.pool.used_bytes == 0
    cache = engine.new_cache(WHOLE, 80)
    with pytest.raises(CacheFull):
        cache.require(81)
    assert cache.nbytes == engine.pool.used_bytes
