"""A long prompt passes through the circuit in chunks: stages overlap, and no token depends on how it was cut."""

import asyncio
import threading
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.links.data_plane import DEADLINE_S, asynchronous
from support.models.tiny_models import VOCABULARY, greedy_references
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import model

from molink.peer.engine import stepping
from molink.peer.engine.steps import StepInput, StepOutput, compute
from molink.peer.hop import session as hop_session
from molink.peer.models.model import LocalModel
from molink.peer.scheduling.in_flight_rules import fixed
from molink.peer.scheduling.prompt_order import due_s
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.routing.cost.pipeline import PipelineStage
from molink.routing.cost.prefill_chunks import Cut, chunk_lengths
from molink.shards.batching.engine import Engine

__all__ = ["model"]

NEW_TOKENS = 6


def prompt_of(tokens: int) -> tuple[int, ...]:
    return tuple((7 * position + tokens) % VOCABULARY for position in range(tokens))


def cut_as(cuts: Mapping[int, Sequence[int]]) -> Cut:
    """Heads cut a prompt of so many tokens into these lengths."""
    return lambda _, prompt_tokens, __: tuple(cuts[prompt_tokens])


@asynchronous
async def test_the_second_hop_computes_a_chunk_before_the_first_hop_has_computed_the_last(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = (40, 40, 40, 40)
    begun: list[tuple[int, int]] = []
    two_are_there = threading.Event()

    def watched(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
        for one in inputs:
            if one.session.is_head and one.step == len(chunks) - 1:
                assert two_are_there.wait(DEADLINE_S), "the second hop waits for the whole prompt"
            begun.append((one.session.place.hop, one.step))
            if (one.session.place.hop, one.step) == (1, 1):
                two_are_there.set()
        return compute(engine, inputs)

    monkeypatch.setattr(stepping, "compute", watched)
    prompt = prompt_of(sum(chunks))
    cut = cut_as({len(prompt): chunks})
    async with served_circuit(model, (2, 4), kv_tokens=400, cut=cut) as circuit:
        (tokens,) = await circuit.generate([prompt], NEW_TOKENS)
    assert [tokens] == greedy_references(model.folder, [list(prompt)], NEW_TOKENS)
    assert begun.index((1, 1)) < begun.index((0, 3))
    prefills = [(hop, step) for hop, step in begun if step < len(chunks)]
    assert sorted(prefills) == [(hop, step) for hop in range(3) for step in range(4)]


@asynchronous
async def test_every_hop_decides_once_when_a_prompt_is_due_whatever_chunks_it_comes_in(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def watched(stages: Sequence[PipelineStage], prompt_tokens: int, arrived_s: float) -> float:
        asked.append((len(stages), prompt_tokens))
        return due_s(stages, prompt_tokens, arrived_s)

    monkeypatch.setattr(hop_session, "due_s", watched)
    cuts = {70: (40, 30), 90: (30, 30, 30)}
    async with served_circuit(model, (2, 4), kv_tokens=400, cut=cut_as(cuts)) as circuit:
        await circuit.generate([prompt_of(tokens) for tokens in cuts], NEW_TOKENS)
    assert sorted(asked) == sorted((3, tokens) for tokens in cuts for _ in range(3))


@st.composite
def cut_prompts(draw: st.DrawFn) -> dict[int, list[int]]:
    """By length of prompt, the chunks it is cut into."""
    cuts = draw(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=1, max_size=4))
    return {sum(lengths): lengths for lengths in cuts}


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cut_prompts(), st.sets(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4))
def test_tokens_are_those_of_transformers_however_prompts_are_cut_and_sessions_grouped(
    model: LocalModel,
    cuts: dict[int, list[int]],
    spans: set[int],
    micro_batches: int,
) -> None:
    prompts = [prompt_of(tokens) for tokens in cuts]

    async def generated() -> list[list[int]]:
        plane = DataPlaneSettings(rule=fixed(micro_batches), copies=True)
        served = served_circuit(model, sorted(spans), kv_tokens=2500, cut=cut_as(cuts), settings=plane)
        async with served as circuit:
            return await circuit.generate(prompts, NEW_TOKENS)

    expected = greedy_references(model.folder, [list(prompt) for prompt in prompts], NEW_TOKENS)
    assert asyncio.run(generated()) == expected


@asynchronous
async def test_a_long_prompt_is_cut_as_its_head_predicts_from_the_profiles_in_the_descriptor(
    model: LocalModel,
) -> None:
    asked: list[tuple[int, int]] = []
    chosen: list[tuple[int, ...]] = []

    def watched(stages: Sequence[PipelineStage], prompt_tokens: int, most_tokens: int) -> tuple[int, ...]:
        asked.append((len(stages), prompt_tokens))
        chosen.append(chunk_lengths(stages, prompt_tokens, most_tokens))
        return chosen[-1]

    prompt = prompt_of(700)
    async with served_circuit(model, (2, 4), kv_tokens=1600, cut=watched) as circuit:
        (tokens,) = await circuit.generate([prompt], NEW_TOKENS)
    assert asked == [(3, 700)]
    assert len(chosen[0]) > 2
    assert [tokens] == greedy_references(model.folder, [list(prompt)], NEW_TOKENS)
