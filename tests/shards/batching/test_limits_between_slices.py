"""Sessions whose tokens are between layers keep their blocks, whatever the KV cache may take meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices.paged_reference import decoding_here
from support.models.circuit_runs import engine_with

from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.partial_step import SliceBatch
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

WHOLE = Span(0, 6)
BLOCK_BYTES = 16 * 6 * 2 * 2 * 16 * 4
"""Of tokens x layers x (keys, values) x heads x dimensions x float32."""
PROMPT = tuple(7 * at * at % 384 for at in range(34))
OTHER = tuple(5 * at * at % 384 for at in range(40))


def paged_engine(folder: Path) -> Engine:
    decoding, *_ = decoding_here(sizes=(1, 2), records=False)
    return engine_with(folder, (0, 6), decoding=decoding)


def growing(engine: Engine, tokens: tuple[int, ...] = OTHER) -> SequenceCache:
    """A session that has reserved nothing, behind these tokens."""
    cache = engine.new_cache(WHOLE, 80, reserve=False)
    engine.step(WHOLE, [Rows(cache, len(tokens), tokens, logit_rows=1)], None)
    return cache


def decoded(engine: Engine, cache: SequenceCache, token: int) -> torch.Tensor:
    return engine.step(WHOLE, [Rows(cache, 1, (token,), logit_rows=1)], None)


def between_layers(engine: Engine, tokens: int) -> tuple[SequenceCache, SliceBatch]:
    """The last tokens of a prompt, behind its first two layers; a session that has reserved nothing."""
    cache = engine.new_cache(WHOLE, 72, reserve=False)
    step = engine.begin_partial(WHOLE, Rows(cache, len(PROMPT), PROMPT, logit_rows=1), None)
    engine.advance_slice(engine.gather_slice([step], [len(PROMPT) - tokens]), 6)
    piece = engine.gather_slice([step], [tokens])
    engine.advance_slice(piece, 2)
    return cache, piece


@pytest.mark.parametrize("tokens", [1, 12])
def test_what_the_kv_cache_loses_is_not_of_a_session_between_layers(
    tiny_model: TinyModel, tokens: int
) -> None:
    folder, results = tiny_model("llama"), []
    for shrinks in (False, True):
        engine = paged_engine(folder)
        other = growing(engine)
        _, piece = between_layers(engine, tokens)
        decoded(engine, other, 9)
        if shrinks:
            assert engine.limit_kv(7 * BLOCK_BYTES)
            assert not other.holds_blocks, "it is the one that can wait in the host's memory"
        through, logits = engine.advance_slice(piece, 4)
        assert len(through) == 1
        assert logits is not None
        results.append([logits, *(decoded(engine, other, token) for token in range(3))])
        engine.pool.check_integrity()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_who_comes_back_takes_no_blocks_of_a_session_between_layers(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    back, idle = growing(engine), growing(engine)
    cache, piece = between_layers(engine, 12)
    back.suspend()
    decoded(engine, idle, 9)
    engine.pool.limit(engine.pool.used_bytes)
    engine.begin_behind(back, len(OTHER) - 1)
    assert (back.holds_blocks, idle.holds_blocks, cache.holds_blocks) == (True, False, True)
    assert engine.advance_slice(piece, 4)[1] is not None


def test_a_limit_is_kept_as_soon_as_nothing_is_between_layers(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama")
    expected = decoded(whole := engine_with(folder, (0, 6)), growing(whole), 9)
    engine = engine_with(folder, (0, 6))
    other = growing(engine)
    cache, piece = between_layers(engine, 12)
    assert not engine.limit_kv(2 * BLOCK_BYTES)
    assert (other.holds_blocks, cache.holds_blocks) == (False, True)
    torch.testing.assert_close(decoded(engine, other, 9), expected)  # others go on meanwhile
    assert engine.advance_slice(piece, 4)[1] is not None
    assert engine.pool.used_bytes <= 2 * BLOCK_BYTES
    assert engine.limit_kv(7 * BLOCK_BYTES)
    decoded(engine, cache, 9)
    engine.pool.check_integrity()


def test_a_limit_is_kept_at_the_next_step_where_the_slice_was_given_up(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    other = growing(engine)
    cache, piece = between_layers(engine, 12)
    assert not engine.limit_kv(3 * BLOCK_BYTES)
    del piece
    decoded(engine, other, 9)
    assert not cache.holds_blocks
    assert engine.pool.used_bytes <= 3 * BLOCK_BYTES


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_session_without_its_blocks_goes_through_no_layer(tiny_model: TinyModel, tokens: int) -> None:
    engine = paged_engine(tiny_model("llama"))
    cache, piece = between_layers(engine, tokens)
    cache.suspend()
    with pytest.raises(ValueError, match="without blocks"):
        engine.advance_slice(piece, 4)
    assert engine.paged.failure is None, "the way of all others is as good as before"
    assert piece.layer == 2


def test_rows_without_blocks_are_never_sent(tiny_model: TinyModel) -> None:
    """They would keep the addresses of the session whose row it was before."""
    engine = paged_engine(tiny_model("llama"))
    cache = growing(engine)
    decoded(engine, cache, 9)
    paged = engine.paged.get(WHOLE)
    assert paged is not None
    cache.suspend()
    with pytest.raises(ValueError, match="without blocks"):
        paged.batch([Rows(cache, 1, (9,), logit_rows=1)], torch.tensor)
