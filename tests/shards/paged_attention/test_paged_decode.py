"""Decode rows that attend together by address, in recorded steps, give what sessions by themselves give."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices.paged_reference import WatchedLatents, WrittenLatents, decoding_here
from support.models.circuit_runs import (
    DEVICE,
    Circuit,
    Run,
    engine_with,
    finish,
    start_run,
    start_sharing,
    step_runs,
)
from support.models.tiny_models import VOCABULARY
from support.pairwise import usually

from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Rows
from molink.shards.spec import KV_BLOCK_TOKENS, Span

TinyModel = Callable[[str], Path]

SIZES = (1, 2, 4, 8)
BY_ADDRESS = ("llama", "qwen2_sliding", "gemma2", "gpt_oss")
ALSO_BY_ADDRESS = ("mistral", "mixtral", "gemma3", "gpt2", "qwen3")
BY_LATENTS = ("deepseek_v3", "deepseek_v2")
UNRECORDED = () if DEVICE == "cpu" else ("gpt_oss", "mixtral", *BY_LATENTS)
"""On a card, experts in float32 are asked how many tokens each of them has: their steps are launched."""
BY_SESSION = ("bloom", "falcon")
"""Linear biases, and attention of the model's own."""


def prompts(count: int, seed: int = 5) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [
        tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 3, 15, 16, 17, 40))))
        for _ in range(count)
    ]


def split(folder: Path, decoding: Decoding | None = None) -> Circuit:
    """Two hops: one that starts the model, one that takes hidden states and ends it."""
    engine = engine_with(folder, (0, 6), decoding=decoding)
    return [(engine, Span(0, 2)), (engine, Span(2, 6))]


def joining(circuit: Circuit, texts: list[tuple[int, ...]], tokens: int) -> list[Run]:
    """One more session in every second step, so that batches are of all sizes, with prompts and without."""
    runs = [start_run(circuit, text, tokens, chunk=9) for text in texts]
    step = 0
    while waiting := [run for run in runs[: 1 + step // 2] if len(run.tokens) < tokens]:
        step_runs(circuit, waiting)
        step += 1
    return runs


def assert_same(ours: list[Run], theirs: list[Run]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", usually(["llama", "gpt_oss"], (*BY_ADDRESS, *ALSO_BY_ADDRESS)))
def test_ragged_batches_by_address_are_those_session_by_session(
    tiny_model: TinyModel, architecture: str
) -> None:
    decoding, attention, tapes = decoding_here(sizes=SIZES)
    folder = tiny_model(architecture)
    ours = joining(split(folder, decoding=decoding), prompts(7), 24)
    assert_same(ours, joining(split(folder), prompts(7), 24))
    if architecture not in UNRECORDED:
        assert tapes.sizes == [*SIZES, *SIZES], "all sizes of both spans, before the first step"
        assert tapes.replays > 20
    assert {3, 5} & set(attention.rows), "rows beside prompts attend together too"


@pytest.mark.full
@pytest.mark.parametrize(
    "architecture", [BY_LATENTS[0], *(pytest.param(name, marks=pytest.mark.full) for name in BY_LATENTS[1:])]
)
def test_ragged_batches_attend_to_latents_as_sessions_do_to_what_these_expand_to(
    tiny_model: TinyModel, architecture: str
) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    folder = tiny_model(architecture)
    ours = joining(split(folder, decoding=decoding), prompts(7), 24)
    assert_same(ours, joining(split(folder), prompts(7), 24))
    assert isinstance(decoding.latents, WrittenLatents | WatchedLatents)
    assert {3, 5} & set(decoding.latents.rows), "rows beside prompts attend together too"
    assert tapes.replays > 20 or architecture in UNRECORDED


@pytest.mark.parametrize("architecture", BY_SESSION)
def test_layers_with_rules_of_their_own_attend_session_by_session(
    tiny_model: TinyModel, architecture: str
) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    folder = tiny_model(architecture)
    ours = joining(split(folder, decoding=decoding), prompts(4), 12)
    assert_same(ours, joining(split(folder), prompts(4), 12))
    assert tapes.replays == 0


def test_rows_attend_together_where_steps_cannot_be_recorded(tiny_model: TinyModel) -> None:
    decoding, attention, _ = decoding_here(records=False)
    folder = tiny_model("llama")
    ours = joining(split(folder, decoding=decoding), prompts(5), 12)
    assert_same(ours, joining(split(folder), prompts(5), 12))
    assert max(attention.rows) == 5


@pytest.mark.parametrize(
    "architecture",
    ["qwen2_sliding", *(pytest.param(one, marks=pytest.mark.full) for one in ("llama", *BY_LATENTS))],
)
def test_guesses_of_one_session_are_rows_with_bounds_of_their_own(
    tiny_model: TinyModel, architecture: str
) -> None:
    """In recorded steps, and beside a prompt in one that is not; what is refused is cut off."""
    decoding, _, tapes = decoding_here(sizes=SIZES)
    folder, span = tiny_model(architecture), Span(0, 6)
    found = []
    for way in (decoding, None):
        engine = engine_with(folder, (0, 6), decoding=way)
        caches = [engine.new_cache(span, 80) for _ in range(4)]
        for cache, length in zip(caches[:3], (17, 3, 30), strict=True):
            engine.step(span, [Rows(cache, length, tuple(range(2, 2 + length)), logit_rows=0)], None)
        logits = []
        for step in range(8):
            rows = []
            for cache, length, count in zip(caches[:3], (17, 3, 30), (1, 5, 2), strict=True):
                engine.begin_behind(cache, length + step)
                ids = tuple((7 * step + 3 * place) % VOCABULARY for place in range(count))
                rows.append(Rows(cache, count, ids, logit_rows=count))
            if step == 5:
                rows.append(Rows(caches[3], 9, tuple(range(9)), logit_rows=1))
            logits.append(engine.step(span, rows, None))
        found.append(torch.cat(logits))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    assert tapes.replays >= 7 or architecture in UNRECORDED


@pytest.mark.parametrize("sessions", usually([1, 8], [2]))
def test_a_full_recorded_step_is_equal_bit_for_bit(tiny_model: TinyModel, sessions: int) -> None:
    decoding, _, tapes = decoding_here(sizes=(sessions,))
    launched, _, _ = decoding_here(sizes=(sessions,), records=False)
    results = []
    for way in (decoding, launched):
        circuit = split(tiny_model("llama"), decoding=way)
        runs = [start_run(circuit, text, 12) for text in prompts(sessions)]
        finish(circuit, runs, 12)
        results.append(torch.stack([torch.stack(run.logits[1:]) for run in runs]))
    assert torch.equal(*results)
    assert tapes.sizes == [sessions, sessions]


def test_more_sessions_than_the_largest_recorded_step_run_without_it(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    many = [(token,) for token in range(SIZES[-1] + 1)]
    results = []
    for circuit in (split(tiny_model("llama"), decoding=decoding), split(tiny_model("llama"))):
        runs = [start_run(circuit, text, 2) for text in many]
        finish(circuit, runs, 2)
        results.append(runs)
    assert_same(*results)
    assert tapes.replays == 0


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_sessions_that_share_a_prefix_attend_to_the_same_blocks(
    tiny_model: TinyModel, architecture: str
) -> None:
    prefix = tuple(range(50, 50 + 3 * KV_BLOCK_TOKENS))
    decoding, _, tapes = decoding_here(sizes=SIZES)
    results = []
    for circuit in (split(tiny_model(architecture), decoding=decoding), split(tiny_model(architecture))):
        runs = []
        for own in prompts(4):
            runs.append(start_sharing(circuit, prefix + own, 20))
            step_runs(circuit, runs[-1:])
        finish(circuit, runs, 20)
        assert (
            any(run.caches[0].tables[0].blocks[0].references > 1 for run in runs) or architecture != "llama"
        )
        results.append(runs)
    assert_same(*results)
    assert tapes.replays > 20


@pytest.mark.full
def test_blocks_may_move_between_recorded_steps(tiny_model: TinyModel) -> None:
    """Sessions grow, are suspended to the host's memory and come back at other places."""
    decoding, _, tapes = decoding_here(sizes=SIZES)
    results = []
    for circuit in (split(tiny_model("llama"), decoding=decoding), split(tiny_model("llama"))):
        texts = prompts(4)
        runs = [
            Run(text, [engine.new_cache(span, 64, reserve=False) for engine, span in circuit])
            for text in texts
        ]
        step_runs(circuit, runs)
        for turn in range(12):
            moved = runs[turn % 4]
            for cache in moved.caches:
                cache.suspend()
            step_runs(circuit, [run for run in runs if run is not moved])
            step_runs(circuit, [moved])
        results.append(runs)
    assert_same(*results)
    assert tapes.replays > 20


def test_a_failed_step_leaves_the_caches_as_they_were(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    engine = engine_with(tiny_model("llama"), (0, 6), decoding=decoding)
    span = Span(0, 6)
    cache = engine.new_cache(span, 32)
    engine.step(span, [Rows(cache, 3, (1, 2, 3), logit_rows=0)], None)
    first = engine.step(span, [Rows(cache, 1, (9,), logit_rows=1)], None)
    with pytest.raises(ValueError, match="token ids"):
        engine.step(span, [Rows(cache, 1, (VOCABULARY,), logit_rows=1)], None)
    assert cache.length == 4
    cache.truncate(3)
    assert torch.equal(first, engine.step(span, [Rows(cache, 1, (9,), logit_rows=1)], None))
    assert tapes.replays == 2


def test_logits_come_only_for_the_sessions_that_want_them(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    span = Span(0, 6)
    engine = engine_with(tiny_model("llama"), (0, 6), decoding=decoding)
    caches = [engine.new_cache(span, 8) for _ in range(3)]
    wants = (True, False, True)
    rows = [
        Rows(cache, 1, (7 + index,), want)
        for index, (cache, want) in enumerate(zip(caches, wants, strict=True))
    ]
    logits = engine.step(span, rows, None)
    assert logits.shape == (2, VOCABULARY)
    for cache in caches:
        cache.truncate(0)
    everything = engine.step(span, [Rows(row.cache, 1, row.token_ids, logit_rows=1) for row in rows], None)
    assert torch.equal(logits, everything[[0, 2]])
    assert tapes.replays == 2


def test_steps_are_recorded_when_layers_come_and_not_in_a_step(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=SIZES)
    engine = engine_with(tiny_model("llama"), (0, 3), (3, 6), decoding=decoding)
    recorded = 0
    while engine.record_next():
        recorded += 1
    assert recorded == len(tapes.sizes) == 4 * len(SIZES), "two spans, and two drawings behind the last layer"
    caches = {span: engine.new_cache(span, 8) for span in (Span(0, 3), Span(0, 6))}
    assert len(tapes.sizes) == 5 * len(SIZES), "a session opens on a span that is no stage's"
    for span, cache in caches.items():
        engine.step(span, [Rows(cache, 1, (7,), logit_rows=0)], None)
    assert len(tapes.sizes) == 5 * len(SIZES)
    assert tapes.replays == 2


@pytest.mark.full
def test_recordings_outlive_other_layers_and_not_their_own(tiny_model: TinyModel) -> None:
    decoding, _, tapes = decoding_here(sizes=(1,))
    engine = engine_with(tiny_model("llama"), (0, 3), (3, 6), decoding=decoding)
    span, kept = Span(0, 3), Span(0, 2)
    cache, other = engine.new_cache(span, 8), engine.new_cache(kept, 8)
    first = engine.step(kept, [Rows(other, 1, (7,), logit_rows=0)], None)
    while (paged := engine.to_record()) is not None:
        paged.record_next()
    assert tapes.sizes == [1, 1, 1]
    engine.detach(Span(3, 6))
    engine.step(span, [Rows(cache, 1, (7,), logit_rows=0)], None)
    assert not engine.record_next()
    del cache
    engine.detach(Span(2, 3))
    assert engine.record_next(), "another stage holds these layers now"
    other.truncate(0)
    again = engine.step(kept, [Rows(other, 1, (7,), logit_rows=0)], None)
    assert torch.equal(first, again)
    assert tapes.sizes == [1, 1, 1, 1]
    assert tapes.replays == 3


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_parts_of_prompts_go_through_some_layers_after_the_others(
    tiny_model: TinyModel, architecture: str
) -> None:
    """As pieces do: a batch of its own for each group of layers, of two prompts, behind what they have already."""
    decoding, _, _ = decoding_here(sizes=SIZES)
    engine, span = engine_with(tiny_model(architecture), (0, 6), decoding=decoding), Span(0, 6)
    both = [[engine.new_cache(span, 64) for _ in range(2)] for _ in range(2)]
    counts, first = (1, 9), tuple(range(20))
    for caches in both:
        engine.step(span, [Rows(cache, 20, first, logit_rows=0) for cache in caches], None)
    ids = [tuple(range(40, 40 + count)) for count in counts]
    theirs, rows = (
        [Rows(cache, len(own), own, logit_rows=1) for cache, own in zip(caches, ids, strict=True)]
        for caches in both
    )
    expected = engine.step(span, theirs, None)
    paged, caches = engine.paged.get(span), both[1]
    assert paged is not None
    hidden = torch.tensor([[token for own in ids for token in own]], device=DEVICE)
    positions = torch.tensor([[20, *range(20, 29)]], device=DEVICE)
    with torch.inference_mode():
        for cache, count in zip(caches, counts, strict=True):
            cache.require(count)
        for part in (Span(0, 2), Span(2, 6)):
            batch = paged.batch(rows, lambda numbers: torch.tensor(numbers, dtype=torch.long, device=DEVICE))
            for view in engine._stages.route(part):
                hidden = view.run(hidden, positions, batch)
        batch.commit()
        logits = engine._stages.route(span)[-1].logits(hidden[:, [0, 9]])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert [cache.length for cache in caches] == [21, 29]
