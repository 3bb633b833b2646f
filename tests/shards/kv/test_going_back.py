"""A cache goes back to where its latest step began, and what it gives then is what it would have given."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.models.circuit_runs import engine_with
from support.models.tiny_models import VOCABULARY, greedy_reference
from support.pairwise import usually

from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

WHOLE = Span(0, 6)
PROMPT = tuple((7 * at * at + 3) % VOCABULARY for at in range(45))
TOKENS = 40
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3")


def feed(engine: Engine, cache: SequenceCache, ids: tuple[int, ...]) -> int:
    """The token behind these."""
    (logits,) = engine.step(WHOLE, [Rows(cache, len(ids), ids, logit_rows=1)], None)
    return int(logits.argmax())


def wrong(ids: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((one + 1) % VOCABULARY for one in ids)


@pytest.mark.parametrize(
    ("architecture", "reserve"),
    usually(
        [("llama", False), *((name, True) for name in ARCHITECTURES[1:])],
        [("llama", True), *((name, False) for name in ARCHITECTURES[1:])],
    ),
)
def test_tokens_that_were_tried_and_cut_off_leave_no_trace(
    tiny_model: TinyModel, architecture: str, reserve: bool
) -> None:
    folder = tiny_model(architecture)
    engine = engine_with(folder, (0, 6))
    expected = tuple(greedy_reference(folder, list(PROMPT), TOKENS))
    history = (*PROMPT, *expected)
    cache = engine.new_cache(WHOLE, len(history) + 8, reserve=reserve)
    assert feed(engine, cache, PROMPT[:30]) is not None
    feed(engine, cache, wrong(PROMPT[:15]))
    cache.truncate(30, same_tokens=True)
    assert feed(engine, cache, PROMPT[30:]) == expected[0]
    at, tried = len(PROMPT), 0
    while at < len(history) - 1:
        tried = (tried + 1) % 6
        kept = min(1 + tried // 2, len(history) - 1 - at)
        feed(engine, cache, (*history[at : at + kept], *wrong(history[:tried])))
        assert cache.least_length <= at
        cache.truncate(at + kept - 1, same_tokens=True)
        assert feed(engine, cache, history[at + kept - 1 : at + kept]) == history[at + kept]
        at += kept
        if not reserve and tried == 3:
            cache.suspend()
            assert cache.least_length <= at - 1
    engine.pool.check_integrity()


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_a_suspended_cache_can_go_back_as_far_as_one_that_is_not(
    tiny_model: TinyModel, architecture: str
) -> None:
    folder = tiny_model(architecture)
    engine = engine_with(folder, (0, 6))
    expected = greedy_reference(folder, list(PROMPT), 1)
    for step in (1, 5, 20, 45):
        cache = engine.new_cache(WHOLE, 60, reserve=False)
        if step < len(PROMPT):
            feed(engine, cache, PROMPT[:-step])
        feed(engine, cache, PROMPT[-step:])
        least = cache.least_length
        assert least <= len(PROMPT) - step
        cache.suspend()
        assert cache.least_length == least
        cache.truncate(len(PROMPT) - step, same_tokens=True)
        assert [feed(engine, cache, PROMPT[-step:])] == expected


def test_a_window_drops_what_the_step_before_the_latest_saw_and_not_sooner(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("mistral"), (0, 6))
    cache = engine.new_cache(WHOLE, 400, reserve=False)
    feed(engine, cache, PROMPT * 4)
    held = cache.nbytes
    assert cache.least_length == 0
    feed(engine, cache, PROMPT[:1])
    assert cache.nbytes < held
    assert 0 < cache.least_length <= len(PROMPT) * 4
    with pytest.raises(ValueError, match="a sliding window has passed"):
        cache.truncate(cache.least_length - 1)
