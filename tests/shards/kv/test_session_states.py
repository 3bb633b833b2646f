"""States of layers: a session owns them, a failed step leaves them as they were, and they count as memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.architecture_table import OVERRIDES, find, store_tiny
from support.models.circuit_runs import engine_with, greedy
from support.models.tiny_models import greedy_reference
from support.pairwise import usually
from transformers import CONFIG_MAPPING

from molink.shards.batching import rows
from molink.shards.batching.accepted_rows import AcceptedRows
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.store import describe
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.prefix import block_names
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Batching
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

WHOLE = Span(0, 6)
PROMPT = tuple(range(7, 47))
CHUNKED = ("qwen3_next", "qwen3_5_text", "mamba2", "falcon_h1", "lfm2")
SERIAL = ("mamba", "jamba")
QUICK = ("qwen3_next", "lfm2", "mamba")
KEEPING_STATES = (
    *CHUNKED,
    *SERIAL,
    *("qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "bamba", "granitemoehybrid"),
    *("falcon_mamba", "lfm2_moe", "lfm3", "inkling_text"),
)


@pytest.fixture
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3_next")


@pytest.fixture
def engine(folder: Path) -> Engine:
    return engine_with(folder, (0, 6))


def feed(engine: Engine, cache: SequenceCache, ids: tuple[int, ...]) -> torch.Tensor:
    return engine.step(WHOLE, [Rows(cache, len(ids), ids, logit_rows=1)], None)


def states_of(cache: SequenceCache) -> list[torch.Tensor]:
    return [state.clone() for states in (cache.states or {}).values() for state in states]


@pytest.mark.parametrize(
    ("architecture", "batching"),
    [
        ("lfm2", Batching.ROWS),
        ("mamba", Batching.SERIAL_ROWS),
        ("deepseek_v32", Batching.LONE),
        *(pytest.param(name, Batching.ROWS, marks=pytest.mark.full) for name in CHUNKED if name != "lfm2"),
    ],
)
def test_how_layers_that_keep_states_are_run_is_found_out(architecture: str, batching: Batching) -> None:
    assert find(architecture).batching == batching.value


@pytest.mark.parametrize("chunk", usually([3, 16], [1, 64]))
def test_chunks_of_any_length_give_the_tokens_of_transformers(folder: Path, chunk: int) -> None:
    circuit = [(engine_with(folder, cut), Span(*cut)) for cut in ((0, 2), (2, 5), (5, 6))]
    assert greedy(circuit, PROMPT, 12, chunk) == greedy_reference(folder, list(PROMPT), 12)


def test_a_step_that_fails_leaves_states_as_they_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = engine.new_cache(WHOLE, 64), engine.new_cache(WHOLE, 64)
    for one in (cache, other):
        feed(engine, one, PROMPT)
    before = states_of(cache)

    keep = rows.RowsCache.keep_states

    def keep_some(self: rows.RowsCache) -> None:
        keep(self)
        if self._lengths == [1]:
            raise RuntimeError("no memory")

    both = [
        Rows(cache, 2, (5, 6), logit_rows=1),
        Rows(engine.new_cache(WHOLE, 64), 1, (7,), logit_rows=1),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(rows.RowsCache, "keep_states", keep_some)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.step(WHOLE, both, None)
    assert cache.length == len(PROMPT)
    assert all(torch.equal(*pair) for pair in zip(states_of(cache), before, strict=True))
    assert torch.equal(feed(engine, cache, (9,)), feed(engine, other, (9,)))


def test_states_go_with_exported_keys_and_values(engine: Engine) -> None:
    cache, moved = engine.new_cache(WHOLE, 64), engine.new_cache(WHOLE, 64)
    feed(engine, cache, PROMPT)
    moved.restore(0, len(PROMPT), cache.export(0, len(PROMPT)))
    assert torch.equal(feed(engine, moved, (9,)), feed(engine, cache, (9,)))


def test_states_are_suspended_and_come_back(engine: Engine) -> None:
    cache, other = (engine.new_cache(WHOLE, 64, reserve=False) for _ in range(2))
    for one in (cache, other):
        feed(engine, one, PROMPT)
    used_bytes = engine.pool.used_bytes
    cache.suspend()
    assert engine.pool.used_bytes == used_bytes // 2
    assert torch.equal(feed(engine, cache, (9,)), feed(engine, other, (9,)))
    engine.pool.check_integrity()


@pytest.mark.parametrize(
    ("architecture", "reserve"),
    usually(
        [("qwen3_next", True), ("lfm2", False), ("mamba", True)],
        [("qwen3_next", False), ("lfm2", True), ("mamba", False)],
    ),
)
def test_a_session_with_states_goes_back_to_where_its_latest_step_began(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, reserve: bool
) -> None:
    store_tiny(CONFIG_MAPPING[architecture](**OVERRIDES.get(architecture, {})), tmp_path)
    layers = describe(tmp_path, "float32").layers
    whole, engine = Span(0, layers), engine_with(tmp_path, (0, layers))

    def step(cache: SequenceCache, ids: tuple[int, ...]) -> torch.Tensor:
        return engine.step(whole, [Rows(cache, len(ids), ids, logit_rows=1)], None)

    cache, other = (engine.new_cache(whole, 64, reserve=reserve) for _ in range(2))
    for begin, stop in ((0, 16), (16, 17), (17, 21), (21, 22), (22, 23)):
        tried = tuple(token + 1 for token in PROMPT[begin:stop])
        step(cache, tried)
        assert cache.least_length == (begin if stop - begin == 1 else stop)
        if not reserve and begin % 2:
            cache.suspend()
            assert cache.least_length == (begin if stop - begin == 1 else stop)
        cache.truncate(begin, same_tokens=True)
        assert cache.length == begin
        assert torch.equal(step(cache, PROMPT[begin:stop]), step(other, PROMPT[begin:stop]))
    with pytest.raises(ValueError, match="states"):
        cache.truncate(21)
    engine.pool.check_integrity()


@pytest.mark.parametrize(
    "architecture",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in KEEPING_STATES],
)
def test_of_a_step_with_guesses_what_was_accepted_is_computed_again(
    architecture: str, tmp_path: Path
) -> None:
    store_tiny(CONFIG_MAPPING[architecture](**OVERRIDES.get(architecture, {})), tmp_path)
    layers = describe(tmp_path, "float32").layers
    whole, engine = Span(0, layers), engine_with(tmp_path, (0, layers))
    cache, other = (engine.new_cache(whole, 64, reserve=reserve) for reserve in (True, False))
    for one in (cache, other):
        engine.step(whole, [Rows(one, 16, PROMPT[:16], logit_rows=1)], None)
    at = 16
    for accepted in (0, 3, 4, 1, 2):
        guesses = PROMPT[at + 1 : at + 1 + accepted] + (3,) * (4 - accepted)
        found = engine.step(whole, [Rows(cache, 5, (PROMPT[at], *guesses), logit_rows=5)], None)
        if accepted == 1:
            cache.suspend()
        for row in range(accepted + 1):
            (expected,) = engine.step(whole, [Rows(other, 1, PROMPT[at : at + 1], logit_rows=1)], None)
            torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=1e-3)
            at += 1
        assert cache.certain_tokens == at - accepted  # nobody has said what was accepted
        engine.begin_behind(cache, at)
        assert cache.length == at
    engine.pool.check_integrity()


def test_of_a_step_with_guesses_no_rows_of_other_sessions_are_kept(engine: Engine) -> None:
    """A step may have a prompt beside it."""
    cache, accepted = engine.new_cache(WHOLE, 64), AcceptedRows()
    feed(engine, cache, PROMPT[:4])
    row = Rows(cache, 3, PROMPT[4:7], logit_rows=3)
    engine.step(WHOLE, [row], None)
    hidden = torch.arange(512.0 * 8).reshape(512, 8)
    accepted.keep([Rows(cache, 509, None, logit_rows=0), row], hidden)
    again = accepted.until(cache, cache.length - 1)
    assert again is not None
    assert again[1] is not None
    assert torch.equal(again[1], hidden[509:511])
    assert again[1].untyped_storage().nbytes() == 3 * 8 * 4


def test_a_session_with_states_goes_back_to_its_beginning(engine: Engine) -> None:
    cache = engine.new_cache(WHOLE, 64)
    first = feed(engine, cache, PROMPT)
    with pytest.raises(ValueError, match="states"):
        cache.truncate(len(PROMPT) - 1)
    with pytest.raises(ValueError, match="cannot export"):
        cache.export(0, len(PROMPT) - 1)
    cache.truncate(len(PROMPT))
    cache.truncate(0)
    assert torch.equal(feed(engine, cache, PROMPT), first)


def test_beginnings_are_not_shared_where_layers_keep_states(engine: Engine) -> None:
    names = block_names(PROMPT, b"key")
    cache = engine.new_cache(WHOLE, 64, names)
    feed(engine, cache, PROMPT)
    assert engine.new_cache(WHOLE, 64, names).length == 0


def test_states_count_as_memory_from_the_beginning(folder: Path) -> None:
    spec = describe(folder, "float32")
    engine = engine_with(folder, (0, 6))
    session_bytes = spec.kv_bytes(WHOLE, 64)
    assert sum(spec.state_bytes) > 0
    engine.limit_kv(2 * session_bytes)
    caches = [engine.new_cache(WHOLE, 64) for _ in range(2)]
    assert engine.pool.used_bytes == 2 * session_bytes == sum(cache.nbytes for cache in caches)
    with pytest.raises(PoolFull):
        engine.new_cache(WHOLE, 1)
    caches.pop().close()
    engine.new_cache(WHOLE, 64)
    engine.pool.check_integrity()


@pytest.mark.parametrize(
    "architecture",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in KEEPING_STATES],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_as_large_as_described(architecture: str, dtype: str, tmp_path: Path) -> None:
    store_tiny(CONFIG_MAPPING[architecture](**OVERRIDES.get(architecture, {})), tmp_path)
    spec = describe(tmp_path, dtype)
    layouts = load_stage(tmp_path, spec.whole, StageSettings(dtype)).layouts
    assert spec.state_bytes == tuple(layouts[layer].state_bytes for layer in range(spec.layers))
    assert spec.kv_bytes_per_token == tuple(layouts[layer].bytes_per_token for layer in range(spec.layers))
