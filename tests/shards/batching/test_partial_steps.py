"""A step computed in pieces gives what it gives at once, whatever the pieces and whoever steps in between."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.circuit_runs import Circuit, engine_with, start_run, step_runs

from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.partial_step import PartialStep, SliceBatch, join_slice_batches
from molink.shards.sampling.prompt_scores import PromptScores
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

PROMPT = tuple(7 * at * at % 384 for at in range(70))
ARCHITECTURES = (
    "llama",
    "gemma2",
    "falcon",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "deepseek_v3")),
)
TOGETHER = (
    "llama",
    "qwen3_next",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("gemma2", "falcon", "falcon_alibi", "deepseek_v3")
    ),
)
sizes = st.lists(st.tuples(st.integers(6, 80), st.integers(1, 7)), min_size=1, max_size=6)


def begun(engine: Engine, span: Span, tokens: int = len(PROMPT)) -> PartialStep:
    cache = engine.new_cache(span, tokens + 8)
    return engine.begin_partial(span, Rows(cache, tokens, PROMPT[:tokens], logit_rows=1), None)


class Pieces:
    """Steps on their way, in one piece after the other."""

    def __init__(self, engine: Engine, steps: Sequence[PartialStep]) -> None:
        self.left = list(steps)
        self._engine = engine
        self._piece: SliceBatch | None = None

    def advance(
        self, tokens: Sequence[int], layers: int
    ) -> tuple[tuple[PartialStep, ...], torch.Tensor | None]:
        """What is under way goes on, or so many tokens of the first steps begin."""
        if self._piece is None:
            steps = self.left[: len(tokens)]
            counts = [min(step.left_tokens, count) for step, count in zip(steps, tokens, strict=False)]
            self._piece = self._engine.gather_slice(steps, counts)
        piece = self._piece
        through, result = self._engine.advance_slice(piece, layers)
        if piece.layer == piece.steps[0].span.stop:
            self._piece = None
        self.left = [step for step in self.left if step not in through]
        return through, result


def advanced(engine: Engine, step: PartialStep, tokens: int, layers: int) -> None:
    """Some tokens of a step through some layers, and no further."""
    engine.advance_slice(engine.gather_slice([step], [tokens]), layers)


def finished(engine: Engine, step: PartialStep, tokens: int = 9, layers: int = 2) -> torch.Tensor:
    pieces, result = Pieces(engine, [step]), None
    while result is None:
        _, result = pieces.advance([tokens], layers)
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
    expected = engine.step(span, [Rows(cache, len(PROMPT), PROMPT, logit_rows=1)], None)
    other, alone = (start_run(circuit, PROMPT[:5], 200) for _ in range(2))
    step = begun(engine, span)
    on_its_way, result = Pieces(engine, [step]), None
    while result is None:
        tokens, layers = pieces[len(other.tokens) % len(pieces)]
        _, result = on_its_way.advance([tokens], layers)
        step_runs(circuit, [other])
    while len(alone.tokens) < len(other.tokens):
        step_runs(circuit, [alone])
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-3)
    assert other.tokens == alone.tokens
    assert step.row.cache.length == len(PROMPT)
    engine.pool.check_integrity()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_a_prompt_is_scored_in_pieces_as_in_one_step(tiny_model: TinyModel, architecture: str) -> None:
    engine, span = engine_with(tiny_model(architecture), (0, 3), (3, 6)), Span(0, 6)

    def rows() -> Rows:
        scores = PromptScores(len(PROMPT), 3, engine.spec.vocabulary_size)
        scores.token_ids = PROMPT
        cache = engine.new_cache(span, len(PROMPT) + 8)
        return Rows(cache, len(PROMPT), PROMPT, logit_rows=1, scores=scores)

    whole, pieces = rows(), rows()
    engine.step(span, [whole], None)
    finished(engine, engine.begin_partial(span, pieces, None), 13, 2)
    assert whole.scores is not None
    assert pieces.scores is not None
    logprobs = [0, 4, 5, 6]  # ids of the likeliest may change places where these are equal but for rounding
    np.testing.assert_allclose(
        pieces.scores.found()[:, logprobs], whole.scores.found()[:, logprobs], atol=5e-4, rtol=1e-3
    )


def test_states_go_from_piece_to_piece_as_they_go_from_step_to_step(tiny_model: TinyModel) -> None:
    """Layers that keep states do so behind each piece, however few layers are computed at once."""
    engine, span = engine_with(tiny_model("qwen3_next"), (0, 3), (3, 6)), Span(0, 6)
    cache = engine.new_cache(span, len(PROMPT) + 8)
    for start in range(0, len(PROMPT), 30):
        chunk = PROMPT[start : start + 30]
        expected = engine.step(span, [Rows(cache, len(chunk), chunk, logit_rows=1)], None)
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
    pieces, lengths = Pieces(engine, [step]), []
    while pieces.left:
        pieces.advance([30], 4)
        lengths.append(step.row.cache.length)
    assert lengths == [0, 30, 30, 60, 60, 70]


def test_a_step_that_nobody_finishes_leaves_its_cache_as_far_as_it_came(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    expected = finished(engine, begun(engine, Span(0, 6)))
    step = begun(engine, Span(0, 6))
    advanced(engine, step, 30, 6)
    advanced(engine, step, 30, 2)
    cache = step.row.cache
    del step
    assert cache.length == 30
    rest = Rows(cache, 40, PROMPT[30:], logit_rows=1)
    torch.testing.assert_close(engine.step(Span(0, 6), [rest], None), expected, atol=2e-4, rtol=1e-3)


def test_a_session_that_ended_goes_no_further_and_its_memory_is_another_ones(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    step = begun(engine, Span(0, 6))
    piece = engine.gather_slice([step], [30])
    engine.advance_slice(piece, 2)
    step.row.cache.close()
    other = start_run(circuit, PROMPT[:40], 8)
    with pytest.raises(ValueError, match="has ended"):
        engine.advance_slice(piece, 1)
    del step, piece
    step_runs(circuit, [other])
    engine.pool.check_integrity()


@pytest.mark.parametrize("tokens", [0, -1, 71])
def test_a_piece_of_tokens_that_are_not_there_is_refused(tiny_model: TinyModel, tokens: int) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    step = begun(engine, Span(0, 6))
    with pytest.raises(ValueError, match="70 are left"):
        engine.gather_slice([step], [tokens])
    finished(engine, step)
    with pytest.raises(ValueError, match="0 are left"):
        engine.gather_slice([step], [1])


def test_a_piece_goes_through_layers_that_are_left_and_no_others(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    piece = engine.gather_slice([begun(engine, Span(0, 6))], [30])
    with pytest.raises(ValueError, match="0 layers"):
        engine.advance_slice(piece, 0)
    engine.advance_slice(piece, 9)
    with pytest.raises(ValueError, match="before layer 6"):
        engine.advance_slice(piece, 1)


@pytest.mark.parametrize("architecture", TOGETHER)
def test_parts_of_several_sessions_in_one_piece_give_what_each_gives_alone(
    tiny_model: TinyModel, architecture: str
) -> None:
    """Whole, but for the first; sessions decode in between."""
    engine = engine_with(tiny_model(architecture), (0, 3), (3, 6))
    other = start_run([(engine, Span(0, 6))], PROMPT[:5], 200)
    for stop, first_tokens, layers in ((6, 40, 2), (6, 7, 1), (4, 16, 6)):
        expected, steps = [], []
        for before, tokens in ((10, 20), (0, 30), (40, 7)):
            for in_pieces in (False, True):
                cache = engine.new_cache(Span(0, stop), before + tokens)
                if before:
                    ids = PROMPT[:before]
                    engine.step(cache.span, [Rows(cache, before, ids, logit_rows=0)], None)
                rows = Rows(cache, tokens, PROMPT[before : before + tokens], logit_rows=1)
                if in_pieces:
                    steps.append(engine.begin_partial(cache.span, rows, None))
                else:
                    expected.append(engine.step(cache.span, [rows], None))
        on_their_way = Pieces(engine, steps)
        got: dict[PartialStep, torch.Tensor] = {}
        while on_their_way.left:
            through, result = on_their_way.advance([first_tokens, 40, 40], layers)
            if result is not None:
                counts = [1 if stop == 6 else step.row.count for step in through]
                got.update(zip(through, result.split_with_sizes(counts), strict=True))
            step_runs([(engine, Span(0, 6))], [other])
        for step, alone in zip(steps, expected, strict=True):
            torch.testing.assert_close(got[step], alone, atol=2e-4, rtol=1e-3)
    engine.pool.check_integrity()


def test_sessions_leave_a_piece_between_its_layers_and_the_others_go_on(tiny_model: TinyModel) -> None:
    engine, span = engine_with(tiny_model("llama"), (0, 6)), Span(0, 6)
    expected = finished(engine, begun(engine, span, 40))
    steps = [begun(engine, span, tokens) for tokens in (20, 40, 30)]
    piece = engine.gather_slice(steps, [20, 40, 30])
    engine.advance_slice(piece, 2)
    steps[2].row.cache.close()
    one, other = piece.of([1]), piece.of([0])
    engine.advance_slice(one, 1)
    engine.advance_slice(other, 1)
    through, result = engine.advance_slice(join_slice_batches([one, other]), 3)
    assert through == (steps[1], steps[0])
    assert result is not None
    torch.testing.assert_close(result[:1], expected, atol=2e-4, rtol=1e-3)
    engine.pool.check_integrity()
