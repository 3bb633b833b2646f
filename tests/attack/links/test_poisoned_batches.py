"""What is wrong with one session of a micro-batch is that session's alone."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from support.attackers.bystander import bystander
from support.links.data_plane import DEADLINE_S, End, asynchronous, describe, hop_of, soon, until
from support.links.raw_links import facts_of
from support.swarms.live_swarms import References
from support.swarms.served_peer import HIGH, LOW, Served, model, served

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.peer.engine.arrivals import MOST_ACTIVATION, is_sound
from molink.peer.models.model import LocalModel
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.extents import PoolFull
from molink.shards.spec import ModelSpec, Span

__all__ = ["model"]

ROWS = 5
GUILTY = 2
WAIT_MS = 30_000
SESSIONS = (1, 2, 3, 4)
POISONS = {
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "beyond any model": 2 * MOST_ACTIVATION,
}


def hidden_of(session: int, spec: ModelSpec) -> torch.Tensor:
    return torch.randn(ROWS, spec.hidden_size, generator=torch.Generator().manual_seed(session))


async def formed(peer: Served, head: End, session: int) -> pb.SessionDescriptor:
    """A ready session in which the peer is the tail and the other end the head."""
    asked = describe(
        [hop_of(head.identity, LOW, head.facts), peer.hop(HIGH)], session=session, spec=peer.spec
    )
    asked.sampling.logprobs = 5
    assert (await peer.reserve(asked, 1)).HasField("reserved")
    assert (await peer.ready(asked)).readiness.ready
    await head.linked(peer.identity.peer_id)
    return asked


def rows_of(sessions: Sequence[int], spec: ModelSpec) -> pb.Activations:
    rows = [
        pb.ActivationRow(session=bytes([session]) * 16, epoch=1, rows=ROWS, sample=True)
        for session in sessions
    ]
    return pb.Activations(rows=rows, hidden_size=spec.hidden_size, dtype="float32")


def link_of(head: End, peer: Served) -> Link:
    link = head.links.find(peer.identity.peer_id)
    assert link is not None
    return link


async def tokens_of(head: End, sessions: Sequence[int]) -> dict[int, bytes]:
    """What the tail draws for each session, to the last bit."""
    drawn: dict[int, bytes] = {}
    while set(drawn) != set(sessions):
        _, frame = await soon(head.handler.frames.get())
        if isinstance(frame.header, pb.Tokens):
            drawn.update((one.session[0], one.SerializeToString()) for one in frame.header.tokens)
    return drawn


async def stepped_together(
    model: LocalModel, sessions: Sequence[int], poison: float | None = None
) -> dict[int, bytes]:
    """One frame with rows of all sessions, those of the guilty one with the poison in a single number."""
    async with served(model) as peer, End() as head:
        failures: list[pb.Failed] = []
        peer.client.handler.on_frame = lambda _, frame: failures.append(frame.header)  # type: ignore[method-assign]
        for session in sessions:
            await formed(peer, head, session)
        hidden = [hidden_of(session, peer.spec) for session in sessions]
        if poison is not None:
            hidden[sessions.index(GUILTY)][3, 7] = poison
        assert link_of(head, peer).post(rows_of(sessions, peer.spec), torch.cat(hidden).numpy().tobytes())
        honest = [one for one in sessions if one != GUILTY] if poison is not None else sessions
        drawn = await tokens_of(head, honest)
        if poison is not None:
            await until(lambda: bool(failures))
            assert [(one.session[0], one.code, one.peer_id) for one in failures] == [
                (GUILTY, "protocol", head.peer_id)
            ]
        assert link_of(head, peer).closed_because is None
        assert len(failures) == (poison is not None)
        return drawn


@pytest.mark.parametrize("poison", POISONS)
@asynchronous
async def test_one_sessions_poison_leaves_the_others_rows_as_they_are_bit_for_bit(
    model: LocalModel, poison: str
) -> None:
    alone = await stepped_together(model, [one for one in SESSIONS if one != GUILTY])
    beside = await stepped_together(model, SESSIONS, POISONS[poison])
    assert beside == alone


class Breaking:
    """An engine's step that fails whenever the guilty session is in it: before, or after the others have advanced."""

    def __init__(self, engine: Engine, error: Exception, *, late: bool) -> None:
        self._step = engine.step
        self._error = error
        self._late = late
        self.guilty: object = None

    def step(self, span: Span, rows: Sequence[Rows], hidden: torch.Tensor | None) -> torch.Tensor:
        guilty = any(row.cache is self.guilty for row in rows)
        if guilty and not self._late:
            raise self._error
        result = self._step(span, rows, hidden)
        if guilty:
            raise self._error
        return result


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("device error"), MemoryError(), PoolFull(1, 0)],
    ids=lambda one: type(one).__name__,
)
@asynchronous
async def test_whatever_the_engine_raises_for_one_session_fails_that_one_alone(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
) -> None:
    async with served(model) as peer, End() as head:
        failures: list[pb.Failed] = []
        peer.client.handler.on_frame = lambda _, frame: failures.append(frame.header)  # type: ignore[method-assign]
        for session in SESSIONS:
            await formed(peer, head, session)
        engine = peer.engine
        assert isinstance(engine, Engine)
        breaking = Breaking(engine, error, late=late)
        guilty = peer.serving.sessions.get(bytes([GUILTY]) * 16, 1)
        assert guilty is not None
        breaking.guilty = guilty.cache
        monkeypatch.setattr(engine, "step", breaking.step)
        hidden = torch.cat([hidden_of(session, peer.spec) for session in SESSIONS])
        assert link_of(head, peer).post(rows_of(SESSIONS, peer.spec), hidden.numpy().tobytes())
        honest = [one for one in SESSIONS if one != GUILTY]
        drawn = await tokens_of(head, honest)
        await until(lambda: bool(failures))
        assert [(one.session[0], one.code, one.peer_id) for one in failures] == [
            (GUILTY, "engine", peer.identity.peer_id)
        ]
        lengths = [
            one.cache.length
            for one in peer.serving.sessions
            if one.cache is not None and one.key.session[0] != GUILTY
        ]
        assert lengths == [ROWS] * len(honest)
    alone = await stepped_together(model, honest)
    ids = {session: pb.Token.FromString(token).token_id for session, token in drawn.items()}
    assert ids == {session: pb.Token.FromString(token).token_id for session, token in alone.items()}


@asynchronous
async def test_poison_again_and_again_is_told_in_one_line(
    model: LocalModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with served(model) as peer, End() as head:
            failures: list[pb.Failed] = []
            peer.client.handler.on_frame = lambda _, frame: failures.append(frame.header)  # type: ignore[method-assign]
            hidden = torch.full((ROWS, peer.spec.hidden_size), float("nan")).numpy().tobytes()
            for session in range(1, 31):
                asked = await formed(peer, head, session)
                assert link_of(head, peer).post(rows_of([session], peer.spec), hidden)
                await until(lambda: len(failures) == session)  # noqa: B023 - awaited at once
                await peer.release(asked)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert len(caplog.text) < 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_single_number_anywhere_is_found(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 96).to(dtype)
    assert is_sound(hidden)
    assert is_sound(torch.empty(0, 96, dtype=dtype))
    for at in range(hidden.numel()):
        for poison in (float("nan"), float("inf"), float("-inf")):
            poisoned = hidden.clone()
            poisoned.view(-1)[at] = poison
            assert not is_sound(poisoned)


async def poison(client: AsyncSwarm, spec: ModelSpec, times: int) -> int:
    """A stranger that is head of circuits whose tail is an honest peer, and sends NaN; how often the tail said so."""
    facts = facts_of(client, "back")
    told = 0
    async with End() as head:
        link = await head.links.to(facts)
        failed: asyncio.Queue[pb.Failed] = asyncio.Queue()
        head.handler.on_frame = lambda _, frame: failed.put_nowait(frame.header)  # type: ignore[method-assign]
        connection = client.connection
        record = next(one.facts_record for one in connection.snapshot() if one.peer_id == facts.peer_id)
        tail = pb.Hop(peer_id=facts.peer_id, start=6, stop=12, quantization="none", facts=record)
        hops = [hop_of(head.identity, Span(0, 6), head.facts), tail]
        for number in range(times):
            asked = describe(hops, session=1 + number % 250, epoch=1 + number // 250, spec=spec)
            key = {"session": asked.session, "epoch": asked.epoch}
            with suppress(LinkError):
                await link.request(pb.Request(reserve=pb.Reserve(descriptor=asked, hop=1)), DEADLINE_S)
                answer, _ = await link.request(
                    pb.Request(await_ready=pb.AwaitReady(**key, wait_ms=WAIT_MS)), DEADLINE_S
                )
                if answer.readiness.ready:
                    row = pb.ActivationRow(**key, rows=ROWS, sample=True)
                    header = pb.Activations(rows=[row], hidden_size=spec.hidden_size, dtype=spec.dtype)
                    link.post(header, torch.full((ROWS, spec.hidden_size), float("nan")).numpy().tobytes())
                    told += (await soon(failed.get())).peer_id == head.peer_id
                await link.request(pb.Request(release=pb.Release(**key)), DEADLINE_S)
    return told


@pytest.mark.real
@pytest.mark.full
@pytest.mark.anyio
async def test_a_stranger_that_sends_nan_to_a_peer_harms_only_itself(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    spec = client.model
    async with bystander(attacked, client, references) as honest:
        before = honest.generations
        assert await poison(client, spec, 20) > 0
        await until(lambda: honest.generations > before)


@pytest.mark.attack
@pytest.mark.anyio
async def test_minutes_of_nan_harm_only_their_sender(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    spec = client.model
    back = next(peer for peer in attacked.peers if peer.name == "back")
    written = back.log.stat().st_size
    async with bystander(attacked, client, references):
        assert await poison(client, spec, 400) > 0
    assert back.log.stat().st_size - written < 20_000
