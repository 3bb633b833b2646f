"""A machine that only takes time computes prompts in slices as the engine does, without the numbers."""

import torch

from molink.peer.compute.backend import SlicingEngine
from molink.shards.batching.engine import Engine
from molink.shards.batching.partial_step import Rows
from molink.shards.spec import Span
from molink.simnet.core.generations import GenerationTape
from molink.simnet.devices.devices import DEVICES
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.emulate.processes.timed_backend import TimedEngine

LAYERS = QWEN2_7B.layers


def timed_engine(span: Span) -> TimedEngine:
    engine = TimedEngine(QWEN2_7B, DEVICES["h100"])
    engine.attach(span)
    return engine


def test_engines_that_compute_and_those_that_take_time_can_both_compute_slices() -> None:
    assert isinstance(timed_engine(Span(0, 2)), SlicingEngine)
    assert isinstance(Engine(QWEN2_7B.spec(), "cpu"), SlicingEngine)


def test_tokens_count_in_the_cache_when_they_are_through_the_last_layer() -> None:
    span = Span(2, 5)
    engine = timed_engine(span)
    cache, hidden = engine.new_cache(span, 64), torch.zeros(40, QWEN2_7B.spec().hidden_size)
    step = engine.begin_partial(span, Rows(cache, 40, None, logit_rows=1), hidden)
    first = engine.gather_slice([step], [24])
    assert engine.advance_slice(first, 2) == ((), None)
    assert cache.length == 0
    assert engine.advance_slice(first, 1) == ((), None)
    assert (cache.length, step.left_tokens) == (24, 16)
    through, result = engine.advance_slice(engine.gather_slice([step], [16]), 3)
    assert through == (step,)
    assert cache.length == 40
    assert result is not None
    assert result.shape == hidden.shape


def test_the_end_of_the_model_gives_logits_for_the_parts_that_are_through_and_draw_a_token() -> None:
    span = Span(LAYERS - 1, LAYERS)
    engine = timed_engine(span)
    steps = [
        engine.begin_partial(span, Rows(engine.new_cache(span, 64), 20, None, logit_rows=int(asks)), None)
        for asks in (True, False, True)
    ]
    through, result = engine.advance_slice(engine.gather_slice(steps, [20, 20, 10]), 1)
    assert through == tuple(steps[:2])
    assert result is not None
    assert result.argmax(1).tolist() == [GenerationTape(0).token(20)]


def test_behind_each_guess_the_tapes_next_token_is_likeliest() -> None:
    span, tape = Span(LAYERS - 1, LAYERS), GenerationTape(0)
    engine = timed_engine(span)
    caches = [engine.new_cache(span, 64) for _ in range(2)]
    prompts = [Rows(cache, count, None, logit_rows=1) for cache, count in zip(caches, (20, 9), strict=True)]
    assert engine.step(span, prompts, None).argmax(1).tolist() == [tape.token(20), tape.token(9)]
    rows = [Rows(caches[0], 4, None, logit_rows=4), Rows(caches[1], 1, None, logit_rows=1)]
    expected = [*tape.tokens(21, 4), tape.token(10)]
    assert engine.step(span, rows, None).argmax(1).tolist() == expected
