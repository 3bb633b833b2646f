"""Tokens that were prefilled once are shared, and nobody can tell from the text."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.circuit_runs import (
    KEY,
    Circuit,
    engine_with,
    finish,
    greedy,
    ready_tokens,
    start_run,
    start_sharing,
    step_runs,
)
from support.models.tiny_models import VOCABULARY

from molink.shards.kv.prefix import NAME_BYTES, block_names, common_position, split_names
from molink.shards.spec import KV_BLOCK_TOKENS, Span

TinyModel = Callable[[str], Path]

TEXT = tuple((7 * i * i + 3 * i) % VOCABULARY for i in range(90))
TOKENS = 12


def check(circuit: Circuit) -> None:
    for engine, _ in circuit:
        engine.pool.check_integrity()


SPLITS: dict[int, list[tuple[int, int]]] = {1: [(0, 6)], 2: [(0, 2), (2, 6)], 3: [(0, 1), (1, 4), (4, 6)]}
QUICK = (("llama", 3), ("deepseek_v3", 2))


@pytest.mark.parametrize(
    ("architecture", "hops"),
    [
        pytest.param(architecture, hops, marks=() if (architecture, hops) in QUICK else pytest.mark.full)
        for architecture in ("llama", "gemma2", "deepseek_v3", "gpt_oss", "mistral")
        for hops in SPLITS
    ],
)
def test_a_hit_gives_the_tokens_of_a_miss(tiny_model: TinyModel, architecture: str, hops: int) -> None:
    folder = tiny_model(architecture)
    circuit: Circuit = [(engine_with(folder, span), Span(*span)) for span in SPLITS[hops]]
    prompts = [TEXT[:50], TEXT[:50], TEXT, TEXT[:32] + TEXT[60:80], TEXT[:33], TEXT[50:]]
    expected = [greedy(circuit, prompt, TOKENS) for prompt in prompts]
    ready, found, held = [], [], []
    for prompt in prompts:
        run = start_sharing(circuit, prompt, TOKENS, chunk=20)
        ready.append(run.fed)
        held.append(run)
        found += finish(circuit, [run], TOKENS)
        check(circuit)
    assert found == expected
    if architecture not in ("mistral", "gemma2", "gpt_oss"):
        assert ready == [0, 48, 48, 32, 32, 0]
    together = [start_sharing(circuit, prompt, TOKENS, chunk=20) for prompt in prompts]
    assert [run.fed for run in together[:3]] == [48, 48, 80]
    assert finish(circuit, together, TOKENS) == expected
    check(circuit)


def test_sharing_sessions_store_what_they_share_once(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    runs = [start_sharing(circuit, TEXT, 6)]
    alone = engine.pool.used_bytes
    finish(circuit, runs, 1)
    runs += [start_sharing(circuit, TEXT, 6) for _ in range(4)]
    assert alone == runs[0].caches[0].nbytes == 6 * engine.pool.used_bytes // 10
    assert len({tuple(tokens) for tokens in finish(circuit, runs, 6)}) == 1


def test_a_session_that_goes_back_into_what_it_shares_leaves_it_to_the_others(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    first = start_sharing(circuit, TEXT, TOKENS)
    step_runs(circuit, [first])
    second = start_sharing(circuit, TEXT, TOKENS)
    for length in (70, 64, 40):
        second.caches[0].truncate(length)
        second.prompt, second.fed, second.tokens = TEXT[:length] + TEXT[:9], length, []
        (tokens,) = finish(circuit, [second], 4)
        assert tokens == greedy(circuit, second.prompt, 4)
    assert finish(circuit, [first], TOKENS) == [greedy(circuit, TEXT, TOKENS)]
    assert ready_tokens(engine, Span(0, 6), block_names(TEXT, KEY)) == 80
    check(circuit)


@pytest.mark.full
def test_other_layers_share_nothing_and_layers_that_are_dropped_forget(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    names = block_names(TEXT, KEY)
    circuit: Circuit = [(engine, Span(0, 6))]
    finish(circuit, [start_sharing(circuit, TEXT, 2)], 2)
    assert ready_tokens(engine, Span(0, 6), names) == 80
    assert engine.new_cache(Span(0, 3), 100, names).length == 0
    engine.detach(Span(5, 6))
    assert engine.pool.used_bytes == 0
    check(circuit)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_only_blocks_of_valid_tokens_get_names_whatever_the_length(
    tiny_model: TinyModel, architecture: str
) -> None:
    engine = engine_with(tiny_model(architecture), (0, 6))
    span = Span(0, 6)
    for valid in range(TOKENS, TOKENS + 2 * KV_BLOCK_TOKENS + 1):
        history = tuple((token + valid) % VOCABULARY for token in TEXT[: 4 * KV_BLOCK_TOKENS])
        run = start_run([(engine, span)], history, 1)
        step_runs([(engine, span)], [run])
        names = block_names(history, KEY)
        run.caches[0].close(names, valid)
        assert ready_tokens(engine, span, names) == valid // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        engine.pool.limit(0)
        engine.pool.limit(None)
    engine.pool.check_integrity()


@pytest.mark.full
def test_a_block_whose_last_row_was_refused_gets_no_name(tiny_model: TinyModel) -> None:
    """What a refused guess has left behind would otherwise be taken for the token that was drawn in its place."""
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    for length in range(KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS + 1):
        history = TEXT[:length]
        guessed = (*history[:-1], (history[-1] + 1) % VOCABULARY)
        run = start_run(circuit, guessed, 1)
        step_runs(circuit, [run])
        run.caches[0].close(block_names(history, KEY), length - 1)
        again = start_sharing(circuit, (*history, 5, 6), TOKENS)
        assert again.fed == (length - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        assert finish(circuit, [again], TOKENS) == [greedy(circuit, (*history, 5, 6), TOKENS)]
        engine.pool.limit(0)
        engine.pool.limit(None)


def test_the_least_recently_used_prefix_goes_first(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    span = Span(0, 6)
    circuit: Circuit = [(engine, span)]
    texts = [tuple((token + shift) % VOCABULARY for token in TEXT) for shift in range(3)]
    for text in texts[:2]:
        finish(circuit, [start_sharing(circuit, text, 2)], 2)
    finish(circuit, [start_sharing(circuit, texts[0], 2)], 2)
    engine.pool.limit(engine.pool.used_bytes)
    finish(circuit, [start_sharing(circuit, texts[2], 2)], 2)
    ready = [ready_tokens(engine, span, block_names(text, KEY)) for text in texts]
    assert ready[0] == ready[2] == 80
    assert ready[1] < 80


@given(
    first=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    second=st.lists(st.integers(0, 2**32 - 1), max_size=70),
    common=st.integers(0, 70),
    key=st.binary(max_size=80),
)
def test_names_agree_exactly_as_far_as_the_tokens_do(
    first: list[int], second: list[int], common: int, key: bytes
) -> None:
    second = first[:common] + second[common:]
    ours, theirs = block_names(first, key), block_names(second, key)
    assert len(ours) == len(first) // KV_BLOCK_TOKENS
    assert all(len(name) == NAME_BYTES for name in ours)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * KV_BLOCK_TOKENS
        assert (one == other) == (first[:end] == second[:end])
    assert not set(ours) & set(block_names(first, key + b"x"))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)).map(sorted), min_size=1, max_size=6))
def test_a_circuit_begins_where_every_hop_can(held: list[list[int]]) -> None:
    begins = common_position([(least, most) for least, most in held])
    can = [at for at in range(201) if all(at == 0 or least <= at <= most for least, most in held)]
    assert begins == max(can)


@given(joined=st.binary(max_size=100), most=st.integers(0, 5))
def test_names_are_whole_and_not_too_many_or_refused(joined: bytes, most: int) -> None:
    if len(joined) % NAME_BYTES or len(joined) > most * NAME_BYTES:
        with pytest.raises(ValueError, match="names of blocks"):
            split_names(joined, most)
    else:
        names = split_names(joined, most)
        assert b"".join(names) == joined
        assert all(len(name) == NAME_BYTES for name in names)


def test_what_a_session_generated_is_shared_when_it_has_got_names(tiny_model: TinyModel) -> None:
    engine = engine_with(tiny_model("llama"), (0, 6))
    circuit: Circuit = [(engine, Span(0, 6))]
    run = start_sharing(circuit, TEXT[:40], 30)
    (answer,) = finish(circuit, [run], 30)
    history = TEXT[:40] + tuple(answer)
    run.caches[0].close(block_names(history, KEY), len(history) - 1)
    assert ready_tokens(engine, Span(0, 6), block_names(history, KEY)) == 64
    second = start_sharing(circuit, history + TEXT[:5], 6)
    assert second.fed == 64
    assert finish(circuit, [second], 6) == [greedy(circuit, history + TEXT[:5], 6)]
    check(circuit)
