"""While sessions decode, a peer computes prompts in pieces, and a decode step comes after each."""

import asyncio
from itertools import groupby

import pytest
from data_plane import DEADLINE_S, asynchronous, soon, until
from served_circuit import served_circuit
from served_peer import model
from tiny_models import VOCABULARY, greedy_references
from torch import Tensor

from molink.dht.records import LayerLatency
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import PieceLatency, Profile
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.scheduling.prefill_chunks import equal_chunks
from molink.peer.serving import stepping
from molink.peer.serving.steps import StepInput, StepOutput, compute
from molink.shards.engine import Engine
from molink.shards.unfinished_step import Piece, UnfinishedStep

__all__ = ["model"]

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, piece_latencies=(PieceLatency(16, 1e3, 1e3),))
"""Pieces are the smallest there are: 16 tokens through a layer."""


def prompt_of(tokens: int) -> list[int]:
    return [(7 * position + tokens) % VOCABULARY for position in range(tokens)]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engines compute from now on, in order: decode steps, steps with prefill, and pieces."""
    seen: list[str] = []
    advance = Engine.advance

    def watched(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
        seen.append("prefill" if any(one.prefill for one in inputs) else "decode")
        return compute(engine, inputs)

    def advanced(
        engine: Engine, piece: Piece, layers: int
    ) -> tuple[tuple[UnfinishedStep, ...], Tensor | None]:
        seen.append("piece")
        return advance(engine, piece, layers)

    monkeypatch.setattr(stepping, "compute", watched)
    monkeypatch.setattr(Engine, "advance", advanced)
    return seen


@pytest.mark.parametrize("cuts", [(), (2, 4)])
@asynchronous
async def test_tokens_are_those_of_transformers_when_prompts_are_computed_in_pieces(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    seen = watch(monkeypatch)
    prompts = [prompt_of(tokens) for tokens in (3, 150, 5, 90)]
    served = served_circuit(model, cuts, kv_tokens=2000, cut=equal_chunks(60), profile=SLOW)
    async with served as circuit:
        tokens = await circuit.generate(prompts, 30)
    assert tokens == greedy_references(model.folder, prompts, 30)
    assert "piece" in seen


@asynchronous
async def test_a_decode_step_comes_after_each_piece(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(100), profile=SLOW) as circuit:
        seen = watch(monkeypatch)
        await circuit.generate([prompt_of(4), prompt_of(200)], 120)
    first, last = seen.index("decode"), len(seen) - seen[::-1].index("piece")
    between = [(what, len(list(group))) for what, group in groupby(seen[first:last])]
    assert {what for what, _ in between} == {"decode", "piece"}
    assert {count for what, count in between if what == "piece"} == {1}


@asynchronous
async def test_a_prompt_alone_is_not_computed_in_pieces(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(60), profile=SLOW) as circuit:
        await circuit.generate([prompt_of(200)], 3)
    assert seen == ["prefill"] * 4 + ["decode"] * 2


@asynchronous
async def test_a_session_that_ends_between_pieces_leaves_the_others_their_turns(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    async with served_circuit(model, (), kv_tokens=2500, cut=equal_chunks(300), profile=SLOW) as circuit:
        prompts = {1: prompt_of(3), 2: prompt_of(300), 3: prompt_of(40)}
        asked = {
            session: await circuit.reserve(session, len(prompt), 200) for session, prompt in prompts.items()
        }
        peer = circuit.peers[0]
        for session, prompt in prompts.items():
            assert circuit.links[0].post(pb.Start(session=asked[session].session, epoch=1, token_ids=prompt))
            if session == 1:
                await until(lambda: "decode" in seen)
        await until(lambda: seen.count("piece") >= 3)
        release = pb.Request(release=pb.Release(session=asked[2].session, epoch=1))
        await circuit.links[0].request(release, DEADLINE_S)
        got: dict[bytes, list[int]] = {asked[session].session: [] for session in (1, 3)}
        while any(len(tokens) < 200 for tokens in got.values()):
            _, frame = await soon(peer.client.handler.frames.get())
            for token in frame.header.tokens:
                got[token.session].append(token.token_id)
    expected = await asyncio.to_thread(greedy_references, model.folder, [prompts[1], prompts[3]], 200)
    assert list(got.values()) == expected
