"""What an engine holds, what it refuses, and that a refused or failed step changes nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.circuit_runs import Circuit, engine_of, engine_with, greedy, start_run, step_runs

from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.held_stages import NotHeld
from molink.shards.kv.kv_cache import CacheFull
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

PROMPT = (5, 9, 200, 31, 7)


@pytest.fixture
def engine(tiny_model: TinyModel) -> Engine:
    return engine_with(tiny_model("llama"), (0, 6))


def test_held_spans_are_merged_and_detaching_a_part_keeps_the_rest(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    engine = engine_with(folder, (0, 2), (2, 6))
    expected = greedy([(engine, Span(0, 6))], PROMPT, 12)
    assert engine.held == (Span(0, 6),)
    before = engine.weight_bytes
    engine.detach(Span(1, 4))
    assert engine.held == (Span(0, 1), Span(4, 6))
    assert engine.weight_bytes < before
    with pytest.raises(NotHeld, match=r"\[1, 4\)"):
        engine.new_cache(Span(0, 6), 8)
    middle = engine_with(folder, (1, 4))
    circuit: Circuit = [(engine, Span(0, 1)), (middle, Span(1, 4)), (engine, Span(4, 6))]
    assert greedy(circuit, PROMPT, 12) == expected
    engine.attach(load_stage(folder, Span(1, 4), StageSettings("float32")))
    assert engine.held == (Span(0, 6),)
    assert engine.weight_bytes == before
    assert greedy([(engine, Span(0, 6))], PROMPT, 12) == expected


def test_detaching_what_is_not_held_is_refused(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 2))
    with pytest.raises(NotHeld):
        engine.detach(Span(1, 3))
    assert engine.held == (Span(0, 2),)


def test_overlapping_stages_and_stages_of_other_models_are_refused(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 3))
    with pytest.raises(ValueError, match="overlaps"):
        engine.attach(load_stage(tiny_model("llama"), Span(2, 4), StageSettings("float32")))
    with pytest.raises(ValueError, match="bfloat16"):
        engine.attach(load_stage(tiny_model("llama"), Span(3, 6), StageSettings("bfloat16")))


def test_a_full_cache_refuses_the_whole_step_and_stays_as_it_was(engine: Engine) -> None:
    span = Span(0, 6)
    roomy, full = engine.new_cache(span, 10), engine.new_cache(span, 3)
    rows = [Rows(roomy, 2, (1, 2), True), Rows(full, 4, (1, 2, 3, 4), True)]
    with pytest.raises(CacheFull) as caught:
        engine.step(span, rows, None)
    assert (caught.value.wanted_tokens, caught.value.capacity_tokens) == (4, 3)
    assert (roomy.length, full.length) == (0, 0)


def test_a_step_that_fails_in_the_middle_leaves_caches_and_later_tokens_untouched(
    tiny_model: TinyModel,
) -> None:
    stage = load_stage(tiny_model("llama"), Span(0, 6), StageSettings("float32", exact=True))
    engine = engine_of([stage])
    circuit: Circuit = [(engine, Span(0, 6))]
    expected = greedy(circuit, PROMPT, 6)
    run = start_run(circuit, PROMPT, 6)
    step_runs(circuit, [run])
    step_runs(circuit, [run])
    broken = stage.model.get_submodule("model.layers.3.mlp")
    hook = broken.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    length = run.caches[0].length
    with pytest.raises(RuntimeError, match="out of memory"):
        step_runs(circuit, [run])
    hook.remove()
    assert run.caches[0].length == length
    while len(run.tokens) < 6:
        step_runs(circuit, [run])
    assert run.tokens == expected


def test_truncating_a_cache_takes_the_session_back(engine: Engine) -> None:
    circuit: Circuit = [(engine, Span(0, 3)), (engine, Span(3, 6))]
    run = start_run(circuit, PROMPT, 10)
    while len(run.tokens) < 10:
        step_runs(circuit, [run])
    expected = list(run.tokens)
    for cache in run.caches:
        cache.truncate(len(PROMPT) + 3)
    del run.tokens[4:]
    while len(run.tokens) < 10:
        step_runs(circuit, [run])
    assert run.tokens == expected
    with pytest.raises(ValueError, match="truncate"):
        run.caches[0].truncate(run.caches[0].length + 1)


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_session_goes_on_elsewhere_from_exported_tokens(tiny_model: TinyModel, architecture: str) -> None:
    engine = engine_with(tiny_model(architecture), (0, 6))
    circuit: Circuit = [(engine, Span(0, 4)), (engine, Span(4, 6))]
    run = start_run(circuit, PROMPT, 8)
    for _ in range(4):
        step_runs(circuit, [run])
    other = start_run(circuit, PROMPT, 8)
    for source, target in zip(run.caches, other.caches, strict=True):
        target.restore(0, 3, bytes(source.export(0, 3)))
        target.restore(3, source.length - 3, source.export(3, source.length))
    other.fed, other.tokens = run.fed, list(run.tokens)
    while len(other.tokens) < 8:
        step_runs(circuit, [run])
        step_runs(circuit, [other])
    assert other.tokens == run.tokens
    assert all(torch.equal(a, b) for a, b in zip(run.logits[4:], other.logits, strict=True))


def test_exports_that_do_not_fit_are_refused(engine: Engine) -> None:
    cache, small = engine.new_cache(Span(0, 6), 8), engine.new_cache(Span(0, 6), 2)
    engine.step(Span(0, 6), [Rows(cache, 5, PROMPT, False)], None)
    exported = cache.export(0, 5)
    with pytest.raises(ValueError, match="bytes"):
        small.restore(0, 4, exported)
    with pytest.raises(ValueError, match="position 1"):
        small.restore(1, 5, exported)
    with pytest.raises(CacheFull):
        small.restore(0, 5, exported)
    assert small.length == 0


def test_a_cache_takes_the_memory_of_its_capacity_in_whole_blocks(engine: Engine) -> None:
    cache = engine.new_cache(Span(1, 4), 100)
    heads, dim = 2, 16
    assert cache.nbytes == engine.pool.used_bytes == 3 * 2 * heads * dim * 4 * 112
    assert sum(layout.bytes_per_token for layout in cache.layouts) * 112 == cache.nbytes


def test_sequences_longer_than_the_model_allows_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="1024"):
        engine.new_cache(Span(0, 6), 1025)
    with pytest.raises(ValueError, match="capacity_tokens"):
        engine.new_cache(Span(0, 6), 0)


def test_rows_that_do_not_fit_the_span_are_refused_before_anything_runs(engine: Engine) -> None:
    whole, tail = Span(0, 6), Span(3, 6)
    cache, other = engine.new_cache(whole, 8), engine.new_cache(tail, 8)
    hidden = torch.zeros(1, 64)
    attempts: list[tuple[Span, list[Rows], torch.Tensor | None, str]] = [
        (whole, [], None, "at least one session"),
        (whole, [Rows(cache, 1, (1,), True), Rows(cache, 1, (1,), True)], None, "twice"),
        (whole, [Rows(other, 1, (1,), True)], None, r"\[3, 6\)"),
        (whole, [Rows(cache, 0, (), True)], None, "at least one token"),
        (whole, [Rows(cache, 2, (1,), True)], None, "2 token ids"),
        (whole, [Rows(cache, 1, (384,), True)], None, "384"),
        (whole, [Rows(cache, 1, (-1,), True)], None, "384"),
        (whole, [Rows(cache, 1, (1,), True)], hidden, "no hidden states"),
        (tail, [Rows(other, 1, None, True)], None, "hidden states"),
        (tail, [Rows(other, 2, None, True)], hidden, "hidden states"),
    ]
    for span, rows, states, message in attempts:
        with pytest.raises(ValueError, match=message):
            engine.step(span, rows, states)
    assert (cache.length, other.length) == (0, 0)


def test_only_wanted_logits_are_computed(engine: Engine) -> None:
    span = Span(0, 6)
    caches = [engine.new_cache(span, 8) for _ in range(3)]
    rows = [Rows(cache, 2, (1, 2), index == 1) for index, cache in enumerate(caches)]
    assert engine.step(span, rows, None).shape == (1, 384)
    rows = [Rows(cache, 1, (3,), False) for cache in caches]
    assert engine.step(span, rows, None).shape == (0, 384)
    assert [cache.length for cache in caches] == [3, 3, 3]


def test_views_share_memory_with_their_stage(tiny_model: TinyModel) -> None:
    stage = load_stage(tiny_model("llama"), Span(0, 6), StageSettings("float32"))
    whole = {parameter.data_ptr() for parameter in stage.model.parameters()}
    part = stage.keep(Span(2, 4))
    assert {parameter.data_ptr() for parameter in part.model.parameters()} <= whole
    assert 0 < part.weight_bytes < stage.weight_bytes
    with pytest.raises(ValueError, match=r"\[2, 4\)"):
        part.view(Span(1, 3))
