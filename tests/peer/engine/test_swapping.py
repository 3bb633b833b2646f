"""Sessions that want more KV cache than a peer's device has, with swap space in the host's memory."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from support.links.data_plane import DEADLINE_S, asynchronous, describe, soon, until
from support.models.tiny_models import VOCABULARY, greedy_references, make_tiny_model
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import Served, model, opened, served

from molink.dht.records.records import LayerLatency
from molink.peer.engine.sessions import ServedSession
from molink.peer.engine.slice_executor import SliceExecutor
from molink.peer.engine.steps import StepInput, StepPayload, compute
from molink.peer.hop.layered_prefill import PrefillSlice
from molink.peer.hop.session import HopStep
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.scheduling.prefill_slices import SliceSize
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.batching.engine import Engine
from molink.shards.kv.prefix import block_names

__all__ = ["model"]

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Slices are the smallest there are: 16 tokens through a layer."""
SESSIONS = 16
NEW_TOKENS = 24
KEY = b"client"


def engine_of(peer: Served) -> Engine:
    engine = peer.engine
    assert isinstance(engine, Engine)
    return engine


def swapped_bytes(engine: Engine) -> int:
    """KV cache that is in the host's memory."""
    return sum(states.nbytes for cache in engine._growing._caches for states in cache._stored or ())


def watch(peer: Served) -> list[tuple[int, int]]:
    """What the pool and the swap space held after each step."""
    engine, seen = engine_of(peer), []
    step = engine.step

    def watched(*args: object) -> torch.Tensor:
        result: torch.Tensor = step(*args)  # type: ignore[arg-type]
        engine.pool.check_integrity()
        seen.append((engine.pool.used_bytes, swapped_bytes(engine)))
        return result

    engine.step = watched  # type: ignore[method-assign]
    return seen


async def release(circuit: ServedCircuit, session: bytes) -> None:
    asked = pb.Request(release=pb.Release(session=session, epoch=1))
    await asyncio.gather(*(link.request(asked, DEADLINE_S) for link in circuit.links))


async def serve_all(
    circuit: ServedCircuit, prompts: list[list[int]], draw: random.Random
) -> dict[bytes, list[int]]:
    """All start together; every third one is cancelled somewhere. Their tokens."""
    started: dict[bytes, list[int]] = {}
    lengths: dict[bytes, int] = {}
    for number, prompt in enumerate(prompts, 1):
        names = b"".join(block_names(prompt[:-1], KEY)) if number % 2 else b""
        descriptor = await circuit.reserve(number, len(prompt), NEW_TOKENS, names)
        begins = min(circuit.held[number])
        start = pb.Start(session=descriptor.session, epoch=1, token_ids=prompt, position=begins)
        assert circuit.links[0].post(start)
        started[descriptor.session] = []
        lengths[descriptor.session] = NEW_TOKENS if number % 3 else draw.randint(1, NEW_TOKENS - 1)
    left = set(started)
    while left:
        _, frame = await soon(circuit.peers[0].client.handler.frames.get())
        for token in frame.header.tokens:
            started[token.session].append(token.token_id)
            if len(started[token.session]) >= lengths[token.session] and token.session in left:
                left.remove(token.session)
                await release(circuit, token.session)
    return started


@pytest.mark.full
@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.full), "gemma3"])
def test_all_sessions_finish_in_a_tenth_of_the_memory_that_they_want(
    architecture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = make_tiny_model(architecture, tmp_path_factory.mktemp("swapping"))
    draw = random.Random(11)
    texts = [[draw.randrange(60) for _ in range(draw.randint(20, 80))] for _ in range(8)]
    prompts = [texts[draw.randrange(8)][: draw.randint(15, 80)] for _ in range(SESSIONS)]
    expected = greedy_references(folder, prompts, NEW_TOKENS)
    run_all(folder, prompts, expected, draw)


@asynchronous
async def run_all(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], draw: random.Random
) -> None:
    wanted = sum(len(prompt) + NEW_TOKENS for prompt in prompts)
    async with served_circuit(opened(folder), (3,), kv_tokens=wanted // 10, swap_bytes=1 << 23) as circuit:
        seen = [watch(peer) for peer in circuit.peers]
        found = await serve_all(circuit, prompts, draw)
        for number, (tokens, whole) in enumerate(zip(found.values(), expected, strict=True)):
            assert tokens == whole[: len(tokens)], number
        assert sum(len(tokens) == NEW_TOKENS for tokens in found.values()) > SESSIONS // 2
        for peer, states in zip(circuit.peers, seen, strict=True):
            engine = engine_of(peer)
            await until(lambda: not peer.serving.stepper.queued)  # noqa: B023 - it ends in this turn
            assert max(used for used, _ in states) <= peer.leases.kv_limit_bytes
            assert 0 < max(swapped for _, swapped in states) <= peer.leases.memory.swap_bytes
            assert (engine.pool.tables, swapped_bytes(engine)) == (0, 0)
            engine.pool.check_integrity()
            engine.pool.forget(peer.spec.whole)
            engine.pool.forget(engine.held[0])
            assert engine.pool.used_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("cuts", "tokens"),
    [((), (90, 162)), pytest.param((3,), (20, 60, 61, 162), marks=pytest.mark.full)],
)
@asynchronous
async def test_who_decodes_gets_room_from_prompts_that_are_between_layers(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    finish, answers = SliceExecutor.finish, []

    def watched(executor: SliceExecutor) -> bool:
        answers.append(there := finish(executor))
        return there

    monkeypatch.setattr(SliceExecutor, "finish", watched)
    prompts = [[(7 * at + length) % VOCABULARY for at in range(length)] for length in tokens]
    cut = equal_chunks(95)
    async with served_circuit(
        model, cuts, kv_tokens=260, swap_bytes=1 << 23, cut=cut, profile=SLOW
    ) as circuit:
        assert await circuit.generate(prompts, 60) == greedy_references(model.folder, prompts, 60)
    assert any(answers), "there was no room but theirs"


@asynchronous
async def test_tokens_between_layers_of_an_epoch_that_is_over_leave_the_next_ones_cache_alone(
    model: LocalModel,
) -> None:
    prompts = [[(7 * at + length) % VOCABULARY for at in range(length)] for length in (40, 50)]
    (expected,) = greedy_references(model.folder, prompts[1:], 2)
    async with served(model, kv_tokens=260, swap_bytes=1 << 23) as peer:
        engine = engine_of(peer)
        executor = SliceExecutor(engine)
        asked = describe([peer.hop(peer.spec.whole)], spec=peer.spec)
        asked.prompt_tokens, asked.capacity_tokens = 60, 96
        assert (await peer.reserve(asked)).HasField("reserved")
        assert (await peer.ready(asked)).readiness.ready
        before = peer.serving.sessions.get(asked.session, asked.epoch)
        assert before is not None
        after = ServedSession(before.plan, 0, before.owner)
        after.cache = before.cache
        part = step_of(before, 0, 0, prompts[0])
        through = PrefillSlice((part,), (), SliceSize((40,), 3), 6, begins=True)
        assert executor.compute(through).layers_left == 3
        before.ended = True
        first = compute(engine, (step_of(after, 0, 0, prompts[1]),)).sampled[0][0].token_id
        assert executor.finish()
        assert after.cache is not None
        assert after.cache.length == 50
        second = compute(engine, (step_of(after, 1, 50, [first]),)).sampled[0][0].token_id
        assert [first, second] == expected


def step_of(session: ServedSession, step: int, position: int, token_ids: list[int]) -> StepInput:
    payload = StepPayload(tuple(token_ids))
    count = len(token_ids)
    return HopStep(
        session, step, session.span, count, 0.0, count > 1, draws=1, payload=payload, position=position,
        left_tokens=count,
    )  # fmt: skip


@asynchronous
async def test_what_neither_memory_nor_swap_space_takes_is_refused_for_a_while(model: LocalModel) -> None:
    async with served(model, kv_tokens=160, swap_bytes=model.spec.kv_bytes(model.spec.whole, 160)) as peer:
        answers = []
        for session in range(1, 5):
            asked = describe([peer.hop(model.spec.whole)], session=session, spec=peer.spec)
            asked.prompt_tokens, asked.capacity_tokens = 60, 96
            answers.append(await peer.reserve(asked))
        assert [answer.WhichOneof("body") for answer in answers] == ["reserved"] * 2 + ["refusal"] * 2
        assert answers[-1].refusal.code == "memory"
        assert answers[-1].refusal.retry_after_ms > 0
        asked.capacity_tokens = 170
        assert (await peer.reserve(asked)).refusal.code == "memory"
