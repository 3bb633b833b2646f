"""A step computed in pieces gives what it gives at once, whatever the pieces and whoever steps in between."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from circuit_runs import Circuit, engine_with, start_run, step_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molink.shards.engine import Engine, Rows
from molink.shards.spec import Span
from molink.shards.unfinished_step import UnfinishedStep

TinyModel = Callable[[str], Path]

PROMPT = tuple(7 * at * at % 384 for at in range(70))
ARCHITECTURES = (
    "llama",
    "gemma2",
    "falcon",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "deepseek_v3")),
)
sizes = st.lists(st.tuples(st.integers(6, 80), st.integers(1, 7)), min_size=1, max_size=6)


def begun(engine: Engine, span: Span, tokens: int = len(PROMPT)) -> UnfinishedStep:
    cache = engine.new_cache(span, tokens + 8)
    return engine.begin(span, Rows(cache, tokens, PROMPT[:tokens], want_logits=True), None)


def finished(engine: Engine, step: UnfinishedStep, tokens: int = 9, layers: int = 2) -> torch.Tensor:
    result = None
    while result is None:
        result = engine.advance(step, tokens, layers)
    return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(pieces=sizes, ends=st.booleans())
def test_pieces_give_what_one_step_gives_and_so_do_the_sessions_in_between(
    tiny_model: TinyModel, architecture: str, pieces: list[tuple[int, int]], ends: bool
) -> None:
    span = Span(0, 6 if ends else 4)
    engine = engine_with(tiny_model(architecture), (0, 3), (3, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    cache = engine.new_cache(span, len(PROMPT))
    expected = engine.step(span, [Rows(cache, len(PROMPT), PROMPT, want_logits=True)], None)
    other, alone = (start_run(circuit, PROMPT[:5], 200) for _ in range(2))
    step = begun(engine, span)
    result = None
    while result is None:
        result = engine.advance(step, *pieces[len(other.tokens) % len(pieces)])
        step_runs(circuit, [other])
    while len(alone.tokens) < len(other.tokens):
        step_runs(circuit, [alone])
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-3)
    assert other.tokens == alone.tokens
    assert step.row.cache.length == len(PROMPT)
    engine.pool.check_integrity()


def test_states_go_from_piece_to_piece_as_they_go_from_step_to_step(tiny_model: TinyModel) -> None:
    """Layers that keep states do so behind each piece, however few layers are computed at once."""
    engine, span = engine_with(tiny_model("qwen3_next"), (0, 3), (3, 6)), Span(0, 6)
    cache = engine.new_cache(span, len(PROMPT) + 8)
    for start in range(0, len(PROMPT), 30):
        chunk = PROMPT[start : start + 30]
        expected = engine.step(span, [Rows(cache, len(chunk), chunk, want_logits=True)], None)
    for layers in (1, 2, 6):
        step = begun(engine, span)
        torch.testing.assert_close(finished(engine, step, 30, layers), expected, atol=2e-4, rtol=1e-3)
        ours, theirs = step.row.cache.states, cache.states
        assert ours is not None
        assert theirs is not None
        for layer, states in theirs.items():
            torch.testing.assert_close(ours[layer], states, atol=2e-4, rtol=1e-3)


def test_a_cache_grows_by_what_is_through_all_layers(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    step = begun(engine, Span(0, 6))
    lengths = []
    while engine.advance(step, 30, 4) is None:
        lengths.append(step.row.cache.length)
    assert lengths == [0, 30, 30, 60, 60]
    assert step.row.cache.length == 70


def test_a_step_that_nobody_finishes_leaves_its_cache_as_far_as_it_came(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    expected = finished(engine, begun(engine, Span(0, 6)))
    step = begun(engine, Span(0, 6))
    engine.advance(step, 30, 6)
    engine.advance(step, 30, 2)
    cache = step.row.cache
    del step
    assert cache.length == 30
    rest = Rows(cache, 40, PROMPT[30:], want_logits=True)
    torch.testing.assert_close(engine.step(Span(0, 6), [rest], None), expected, atol=2e-4, rtol=1e-3)


def test_a_session_that_ended_goes_no_further_and_its_memory_is_another_ones(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    step = begun(engine, Span(0, 6))
    engine.advance(step, 30, 2)
    step.row.cache.close()
    other = start_run(circuit, PROMPT[:40], 8)
    with pytest.raises(ValueError, match="has ended"):
        engine.advance(step, 30, 1)
    del step
    step_runs(circuit, [other])
    engine.pool.check_integrity()


@pytest.mark.parametrize(("tokens", "layers"), [(0, 1), (1, 0), (-1, 3)])
def test_a_piece_of_nothing_is_refused(tiny_model: TinyModel, tokens: int, layers: int) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    step = begun(engine, Span(0, 6))
    with pytest.raises(ValueError, match="70 are left"):
        engine.advance(step, tokens, layers)
    finished(engine, step)
    with pytest.raises(ValueError, match="0 are left"):
        engine.advance(step, 1, 1)
