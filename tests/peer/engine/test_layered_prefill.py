"""While sessions decode, a peer computes prompts in pieces, and a decode step comes after each."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from support.circuits.guesses import Chance, GuessingHead
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.models.tiny_models import VOCABULARY, greedy_references
from support.swarms.served_circuit import ServedCircuit, served_circuit
from support.swarms.served_peer import model
from torch import Tensor

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.engine import stepping
from molink.peer.engine.steps import StepInput, StepOutput, compute
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile, SliceLatency
from molink.peer.scheduling import prompt_gathering
from molink.peer.scheduling.prefill_slices import RemainingPrefill, SliceSize, SliceSizer
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.prefill_chunks import equal_chunks
from molink.shards.batching.engine import Engine
from molink.shards.batching.partial_step import PartialStep, SliceBatch

__all__ = ["model"]

SLOW = Profile((LayerLatency(1, 0.001),), 0.001, 0.001, 1e9, slice_latencies=(SliceLatency(16, 1e3, 1e3),))
"""Pieces are the smallest there are: 16 tokens through a layer."""

USUAL = Profile((LayerLatency(1, 1.0),), 0.1, 0.1, 1e9, slice_latencies=(SliceLatency(512, 100.0, 0.0),))
"""A layer of a piece takes as long as several decode steps."""

LONG_PASSES = replace(USUAL, prefill_latencies=(PrefillLatency(16, 1e6), PrefillLatency(512, 1e6)))
"""Two passes take so much longer than one that prompts wait for others as long as they may."""


def prompt_of(tokens: int) -> list[int]:
    return [(7 * position + tokens) % VOCABULARY for position in range(tokens)]


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engines compute from now on, in order: decode steps, steps with prefill, and pieces."""
    seen: list[str] = []
    advance = Engine.advance_slice

    def watched(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
        seen.append("prefill" if any(one.prefill for one in inputs) else "decode")
        return compute(engine, inputs)

    def advanced(
        engine: Engine, piece: SliceBatch, layers: int
    ) -> tuple[tuple[PartialStep, ...], Tensor | None]:
        seen.append("piece")
        return advance(engine, piece, layers)

    monkeypatch.setattr(stepping, "compute", watched)
    monkeypatch.setattr(Engine, "advance_slice", advanced)
    return seen


@pytest.mark.parametrize("cuts", [(2, 4), pytest.param((), marks=pytest.mark.full)])
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


@pytest.mark.full
@asynchronous
async def test_so_they_are_beside_sessions_that_guess(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, prompts = watch(monkeypatch), [prompt_of(tokens) for tokens in (3, 150, 5, 90)]
    expected = greedy_references(model.folder, prompts, 30)
    sequences = [[*prompt, *new] for prompt, new in zip(prompts, expected, strict=True)]
    head = GuessingHead(Chance, sequences)
    served = served_circuit(model, (3,), kv_tokens=2000, cut=equal_chunks(60), profile=SLOW, guesses=head)
    async with served as circuit:
        assert await circuit.generate(prompts, 30) == expected
    assert "piece" in seen
    assert 0 < head.accepted < head.guessed


@pytest.mark.full
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


@pytest.mark.full
@asynchronous
async def test_a_prompt_is_computed_in_pieces_where_none_was_measured_at_the_start(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, prompts = Profile((LayerLatency(1, 1.0),), 0.1, 0.1, 1e9), [prompt_of(4), prompt_of(200)]
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(100), profile=profile) as circuit:
        seen = watch(monkeypatch)
        tokens = await circuit.generate(prompts, 120)
    assert "piece" in seen
    assert tokens == greedy_references(model.folder, prompts, 120)


@asynchronous
async def test_a_prompt_alone_is_not_computed_in_pieces(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch(monkeypatch)
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(60), profile=SLOW) as circuit:
        await circuit.generate([prompt_of(200)], 3)
    assert seen == ["prefill"] * 4 + ["decode"] * 2


async def started(
    circuit: ServedCircuit,
    prompts: dict[int, list[int]],
    new_tokens: dict[int, int],
    first: Callable[[], bool],
) -> dict[int, pb.SessionDescriptor]:
    """Sessions of these prompts, the others once what the `first` one does is so far."""
    asked = {
        session: await circuit.reserve(session, len(prompt), new_tokens[session])
        for session, prompt in prompts.items()
    }
    for session, prompt in prompts.items():
        assert circuit.links[0].post(pb.Start(session=asked[session].session, epoch=1, token_ids=prompt))
        await until(first)
    return asked


async def received(
    circuit: ServedCircuit, counts: dict[bytes, int]
) -> tuple[dict[bytes, list[int]], set[bytes]]:
    """The tokens of sessions until each has so many, or has failed; and which failed."""
    handler = circuit.peers[0].client.handler
    handler.on_frame = lambda *came: handler.frames.put_nowait(came)  # type: ignore[method-assign]
    got: dict[bytes, list[int]] = {session: [] for session in counts}
    failed: set[bytes] = set()
    while any(len(got[session]) < count for session, count in counts.items() if session not in failed):
        _, frame = await soon(handler.frames.get())
        if isinstance(frame.header, pb.Failed):
            failed.add(frame.header.session)
        else:
            for token in frame.header.tokens:
                if token.session in got:
                    got[token.session].append(token.token_id)
    return got, failed


def a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All parts that wait go through one layer together from now on. Of how many sessions each piece was."""
    joined: list[int] = []
    advance = Engine.advance_slice

    def one_layer(
        sizes: SliceSizer,
        layers: int,
        parts: Sequence[RemainingPrefill],
        decoding: int,
        under_way: tuple[int, ...] = (),
    ) -> SliceSize:
        return SliceSize(under_way or tuple(part.tokens for part in parts), 1)

    def advanced(
        engine: Engine, piece: SliceBatch, layers: int
    ) -> tuple[tuple[PartialStep, ...], Tensor | None]:
        joined.append(len(piece.steps))
        return advance(engine, piece, layers)

    monkeypatch.setattr(SliceSizer, "next_slice", one_layer)
    monkeypatch.setattr(SliceSizer, "at_once", lambda *_: ())
    monkeypatch.setattr(Engine, "advance_slice", advanced)
    return joined


@pytest.mark.full
@pytest.mark.parametrize("cuts", [(3,), pytest.param((), marks=pytest.mark.full)])
@asynchronous
async def test_parts_of_prompts_that_wait_together_are_computed_together(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...]
) -> None:
    seen, joined = watch(monkeypatch), a_layer_at_a_time(monkeypatch)
    prompts = {1: prompt_of(3), **{session: prompt_of(10 * session) for session in (2, 3, 4, 5)}}
    new_tokens = {1: 150, 2: 20, 3: 20, 4: 20, 5: 20}
    async with served_circuit(model, cuts, kv_tokens=2000, cut=equal_chunks(60), profile=SLOW) as circuit:
        asked = await started(circuit, prompts, new_tokens, lambda: seen.count("decode") > 2)
        counts = {asked[session].session: count for session, count in new_tokens.items()}
        got, failed = await received(circuit, counts)
    assert not failed
    assert max(joined) > 1
    for session, prompt in prompts.items():
        expected = greedy_references(model.folder, [prompt], new_tokens[session])[0]
        assert got[asked[session].session] == expected


@pytest.mark.full
@asynchronous
async def test_prompts_are_computed_at_once_where_hardly_anybody_decodes(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four come while the first one's prompt is computed: none of them waits for pieces."""
    seen, began, came = watch(monkeypatch), threading.Event(), threading.Event()
    watched = stepping.compute

    def held_up(engine: Engine, inputs: tuple[StepInput, ...]) -> StepOutput:
        began.set()
        assert came.wait(DEADLINE_S)
        return watched(engine, inputs)

    monkeypatch.setattr(stepping, "compute", held_up)
    prompts = {1: prompt_of(3), **{session: prompt_of(10 * session) for session in (2, 3, 4, 5)}}
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(60), profile=USUAL) as circuit:
        asked = [await circuit.reserve(session, len(prompt), 60) for session, prompt in prompts.items()]
        for one, prompt in zip(asked, prompts.values(), strict=True):
            assert circuit.links[0].post(pb.Start(session=one.session, epoch=1, token_ids=prompt))
            await until(began.is_set)
        await until(lambda: circuit.peers[0].serving.stepper.queued == 4)
        came.set()
        got, _ = await received(circuit, {one.session: 60 for one in asked})
    assert list(got.values()) == greedy_references(model.folder, list(prompts.values()), 60)
    assert seen == ["prefill"] * 2 + ["decode"] * (len(seen) - 2)


@asynchronous
async def test_prompts_of_requests_that_come_at_once_are_one_step(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is idle when the first one starts, and waits for those whose leases are ready."""
    seen = watch(monkeypatch)
    monkeypatch.setattr(prompt_gathering, "MOST_WAIT_S", DEADLINE_S)
    prompts = {session: prompt_of(10 * session) for session in (3, 4, 5, 6)}
    async with served_circuit(model, (), kv_tokens=2000, profile=LONG_PASSES) as circuit:
        asked = await started(circuit, prompts, dict.fromkeys(prompts, 8), lambda: True)
        got, _ = await received(circuit, {one.session: 8 for one in asked.values()})
    assert list(got.values()) == greedy_references(model.folder, list(prompts.values()), 8)
    assert seen == ["prefill"] + ["decode"] * 7


@pytest.mark.full
@asynchronous
async def test_a_session_that_fails_in_a_piece_fails_alone(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, joined = watch(monkeypatch), a_layer_at_a_time(monkeypatch)
    advance = Engine.advance_slice

    def failing(
        engine: Engine, piece: SliceBatch, layers: int
    ) -> tuple[tuple[PartialStep, ...], Tensor | None]:
        if piece.layer == 3 and any(step.row.count == 33 for step in piece.steps):
            raise RuntimeError("a session that breaks the engine")
        return advance(engine, piece, layers)

    monkeypatch.setattr(Engine, "advance_slice", failing)
    prompts = {1: prompt_of(3), 2: prompt_of(31), 3: prompt_of(33), 4: prompt_of(35), 5: prompt_of(37)}
    new_tokens = {1: 150, 2: 20, 3: 20, 4: 20, 5: 20}
    async with served_circuit(model, (), kv_tokens=2000, cut=equal_chunks(60), profile=SLOW) as circuit:
        asked = await started(circuit, prompts, new_tokens, lambda: seen.count("decode") > 2)
        counts = {asked[session].session: count for session, count in new_tokens.items()}
        got, failed = await received(circuit, counts)
    assert failed == {asked[3].session}
    assert max(joined) > 1
    for session in (1, 2, 4, 5):
        expected = greedy_references(model.folder, [prompts[session]], new_tokens[session])[0]
        assert got[asked[session].session] == expected


@pytest.mark.full
@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.full)])
@asynchronous
async def test_a_session_that_ends_between_pieces_leaves_the_others_their_turns(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, *, together: bool
) -> None:
    seen = watch(monkeypatch)
    if together:
        a_layer_at_a_time(monkeypatch)
    async with served_circuit(model, (), kv_tokens=2500, cut=equal_chunks(300), profile=SLOW) as circuit:
        prompts = {1: prompt_of(3), 2: prompt_of(300), 3: prompt_of(40)}
        new_tokens = dict.fromkeys(prompts, 200)
        asked = await started(circuit, prompts, new_tokens, lambda: "decode" in seen)
        await until(lambda: seen.count("piece") >= 3)
        release = pb.Request(release=pb.Release(session=asked[2].session, epoch=1))
        await circuit.links[0].request(release, DEADLINE_S)
        got, _ = await received(circuit, {asked[session].session: 200 for session in (1, 3)})
    expected = await asyncio.to_thread(greedy_references, model.folder, [prompts[1], prompts[3]], 200)
    assert list(got.values()) == expected
