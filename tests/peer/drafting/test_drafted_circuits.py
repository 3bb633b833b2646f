"""With a draft on the head's device tokens are those without guesses, in fewer trips; without it, if it fails, too."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, until
from support.models.tiny_models import greedy_references, make_tiny_model
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model

from molink.peer.drafting.draft_engine import DraftEngine
from molink.peer.drafting.draft_thread import DraftThread
from molink.peer.drafting.opening import load_draft, plan_draft
from molink.peer.engine.guessing import HeadGuesses
from molink.peer.models.model import LocalModel
from molink.peer.speculation.told_draft import DraftTimes
from molink.peer.wire.protocol import molink_pb2 as pb

__all__ = ["model"]

NEW_TOKENS = 30
PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(9 + 4 * one)] for one in range(4)]
MANY_PROMPTS = [[(7 * at + 3 * one + 1) % 60 for at in range(5 + 4 * one)] for one in range(8)]
SAMPLED = pb.Sampling(temperature=0.8, top_p=0.9, seed=7)
FIXED = 4
"""Guesses of each trip: so that trips do not depend on what this machine takes."""


@asynccontextmanager
async def drafted(
    model: LocalModel, draft: DraftEngine, late_s: float = DEADLINE_S, hung_s: float = DEADLINE_S
) -> AsyncIterator[tuple[ServedCircuit, HeadGuesses]]:
    """A circuit of two peers whose head has that draft and looks nothing up in generations before."""
    async with DraftThread(draft, DraftTimes(1.0), 8, late_s, hung_s) as thread:
        head = HeadGuesses(tables=False, draft=thread, fixed=FIXED)
        async with served_circuit(model, (3,), kv_tokens=1000, guesses=head) as circuit:
            yield circuit, head


def opened(folder: Path, sequences: int = 8) -> DraftEngine:
    """A draft whose prompts are short enough to be computed when it is asked, whatever this machine takes."""
    draft = load_draft(plan_draft(folder, "draft", "float32", None, sequences), "cpu", 1 << 20)[0]
    draft.part_tokens = 256
    return draft


@pytest.mark.parametrize("prompts", [PROMPTS, pytest.param(MANY_PROMPTS, marks=pytest.mark.full)])
@asynchronous
async def test_with_the_served_model_itself_nearly_every_guess_is_right(
    model: LocalModel, prompts: list[list[int]]
) -> None:
    expected = greedy_references(model.folder, prompts, NEW_TOKENS)
    draft = opened(model.folder)
    async with drafted(model, draft) as (circuit, head):
        assert await circuit.generate(prompts, NEW_TOKENS) == expected
        await until(lambda: draft.engine.pool.tables == 0)
        draft.engine.pool.check_integrity()
    # the first token of each comes of its prompt, and a prompt that is being computed is not guessed for
    assert len(prompts) * NEW_TOKENS / head.counts.trips > FIXED


@asynchronous
async def test_sampled_tokens_are_those_of_the_seed_and_are_guessed(model: LocalModel) -> None:
    async with served_circuit(model, (3,), kv_tokens=1000) as circuit:
        circuit.sampling = SAMPLED
        expected = await circuit.generate(PROMPTS, NEW_TOKENS)
    async with drafted(model, opened(model.folder)) as (circuit, head):
        circuit.sampling = SAMPLED
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
    assert len(PROMPTS) * NEW_TOKENS / head.counts.trips > FIXED


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["gpt2", pytest.param("qwen2", marks=pytest.mark.full)])
@asynchronous
async def test_an_unrelated_draft_of_another_architecture_changes_no_token(
    model: LocalModel, architecture: str, tmp_path: Path
) -> None:
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    async with drafted(model, opened(make_tiny_model(architecture, tmp_path))) as (circuit, head):
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
    assert head.counts.guessed["draft"] > 4 * head.counts.accepted.get("draft", 0)


@pytest.mark.full
@asynchronous
async def test_while_it_rests_it_holds_nothing_and_then_it_guesses_again(model: LocalModel) -> None:
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    draft = opened(model.folder)
    async with drafted(model, draft) as (circuit, head):
        head.rest("cpu")
        head.rest("cpu")
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
        await until(lambda: not draft.engine.held)
        assert draft.engine.weight_bytes == draft.engine.pool.used_bytes == 0
        assert "draft" not in head.counts.guessed
        head.wake()
        assert isinstance(head.draft, DraftThread)
        times = head.draft.times
        await until(lambda: times.answers)
        assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
    assert head.counts.accepted["draft"] > NEW_TOKENS


@pytest.mark.full
@asynchronous
async def test_a_draft_that_raises_costs_its_guesses_alone(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    draft, steps = opened(model.folder), iter(range(6))
    guess_next = draft.guess_next
    monkeypatch.setattr(draft, "guess_next", lambda: guess_next() if next(steps) < 5 else 1 / 0)
    with caplog.at_level(logging.WARNING):
        async with drafted(model, draft) as (circuit, head):
            assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
            assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
    assert [one.message for one in caplog.records if "left out" in one.message] == [
        "the draft model is left out until this peer starts again: ZeroDivisionError: division by zero"
    ]
    assert head.counts.guessed.get("draft", 0) < 4 * 8


@pytest.mark.full
@asynchronous
async def test_a_late_answer_costs_its_guesses_and_the_next_ones_are_waited_for(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy_references(model.folder, PROMPTS[:1], NEW_TOKENS)
    draft, steps, over = opened(model.folder), iter(range(3)), threading.Event()
    guess_next = draft.guess_next
    monkeypatch.setattr(
        draft, "guess_next", lambda: (next(steps, 0) == 2 and over.wait(DEADLINE_S), guess_next())[1]
    )
    async with drafted(model, draft, late_s=0.3) as (circuit, head):
        assert isinstance(head.draft, DraftThread)
        times = head.draft.times
        generating = asyncio.create_task(circuit.generate(PROMPTS[:1], NEW_TOKENS))
        await until(lambda: times.is_late)
        head.draft.least_late_s = DEADLINE_S
        over.set()
        assert await generating == expected
        await until(lambda: times.answers)  # with the next sign of life
        assert times.slowness > 1
        assert await circuit.generate(PROMPTS[:1], NEW_TOKENS) == expected
    assert head.counts.accepted["draft"] > 8


@pytest.mark.full
@asynchronous
async def test_a_draft_that_hangs_is_waited_for_once(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = greedy_references(model.folder, PROMPTS, NEW_TOKENS)
    draft, over = opened(model.folder), threading.Event()
    monkeypatch.setattr(draft, "guess_next", lambda: over.wait(DEADLINE_S) and [])
    with caplog.at_level(logging.WARNING):
        async with drafted(model, draft, late_s=0.05, hung_s=0.1) as (circuit, head):
            assert await circuit.generate(PROMPTS, NEW_TOKENS) == expected
            assert isinstance(head.draft, DraftThread)
            times = head.draft.times
            await until(lambda: times.is_left_out)
            over.set()
    assert "it gave no sign of life" in caplog.text
    assert "draft" not in head.counts.guessed
