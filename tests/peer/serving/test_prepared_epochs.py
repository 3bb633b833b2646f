"""What comes for epochs that have not begun waits within bounds, and is told of the epoch that it belongs to alone."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.links.data_plane import DEADLINE_S, SPEC, asynchronous, until
from support.swarms.served_peer import PATIENT, model, served

from molink.peer.engine.arrivals import of_activations
from molink.peer.engine.guessing import MOST_PREDICTION_TOKENS, SessionGuessing
from molink.peer.hop.events import HopEvent, RowsArrived
from molink.peer.memory.leases import LeaseKey
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.serving.prepared_epochs import PreparedEpochs
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError, decode, encode
from molink.shards import codec
from molink.shards.spec import Span

__all__ = ["model"]

CAPACITY = 100
EPOCH = 2
LAYERS = Span(2, 4)


class Tail:
    """A peer that is the second hop of two, and gets sessions ready when it is told to."""

    def __init__(self) -> None:
        self.client: Any = SimpleNamespace(peer_id="client", closed_because=None, remote=None)
        self.head: Any = SimpleNamespace(peer_id="head", closed_because=None, remote=None)
        self.sessions: dict[bytes, Any] = {}
        self.ready = {name: asyncio.Event() for name in (b"first", b"other")}
        self.told: list[HopEvent[Any, Any]] = []
        self.released: list[tuple[bytes, int, str]] = []
        table: Any = SimpleNamespace(find=self.sessions.get, get=self._get)
        leases: Any = SimpleNamespace(
            reserve=self._reserve,
            await_ready=self._await_ready,
            timeouts=PATIENT,
            release=lambda asked, asker: self.released.append((asked.session, asked.epoch, asker)),
        )
        self._table = table
        stepper: Any = SimpleNamespace(
            tell_moves=lambda _: None,
            on_activations=self.on_activations,
            guessing=SessionGuessing(SPEC, lambda _: None),
        )
        neighbours: Any = SimpleNamespace()
        links: Any = SimpleNamespace()
        self.epochs = PreparedEpochs("tail", table, leases, stepper, neighbours, links)

    async def prepare(self, name: bytes) -> None:
        plan: Any = SimpleNamespace(
            key=LeaseKey(name, EPOCH),
            capacity_tokens=CAPACITY,
            hops=[SimpleNamespace(peer_id="head"), SimpleNamespace(peer_id="tail")],
            span_of=lambda _: LAYERS,
            neighbours_of=lambda _: [],
            speculates=True,
        )
        self.sessions[name] = SimpleNamespace(
            span=LAYERS, plan=plan, owner=self.client, key=LeaseKey(name, EPOCH - 1), ended=False
        )
        assert (await self.epochs.prepare(self.client, plan, 1, 0.0)).ready

    def on_activations(self, link: Link, frame: Frame, header: pb.Activations) -> None:
        self.told += of_activations(link.peer_id, frame, header, self._table, SPEC)

    def _get(self, name: bytes, epoch: int) -> Any:  # noqa: ANN401 - as much of a session as is asked for
        found = self.sessions.get(name)
        return found if found is not None and found.key.epoch == epoch else None

    def _reserve(self, owner: Link, plan: Any, _: int, *, advances: bool) -> None:  # noqa: ANN401
        assert advances
        self.sessions[plan.key.session] = SimpleNamespace(
            owner=owner, key=plan.key, ended=False, inputs=None, is_head=False, previous_peer_id="head",
            receives_in=SPEC.dtype, cache=None, place=SimpleNamespace(hop=1),
        )  # fmt: skip

    async def _await_ready(self, key: LeaseKey, _: str, __: float) -> pb.Readiness:
        await self.ready[key.session].wait()
        self.sessions[key.session].cache = object()
        return pb.Readiness(ready=True, held_tokens=CAPACITY)


@asynchronous
async def test_sessions_that_go_over_in_one_frame_begin_each_when_it_is_ready_itself() -> None:
    tail = Tail()
    header = pb.Activations(hidden_size=SPEC.hidden_size, dtype=SPEC.dtype)
    for name in tail.ready:
        await tail.prepare(name)
        header.rows.add(session=name, epoch=EPOCH, step=0, rows=1, sample=True, position=9)
    payload = codec.encode(torch.randn(2, SPEC.hidden_size), SPEC.dtype)
    frame = decode(memoryview(bytearray(encode(header, payload))))
    tail.on_activations(tail.head, frame, header)
    assert not tail.told
    tail.epochs.on_activations(tail.head, frame, header)
    for told, name in enumerate(tail.ready, 1):
        tail.ready[name].set()
        await until(lambda: len(tail.told) == told)  # noqa: B023
        event = tail.told[-1]
        assert isinstance(event, RowsArrived)
        assert [session.key for session, *_ in event.rows] == [(name, EPOCH)]


@asynchronous
async def test_an_epoch_that_is_given_up_while_it_begins_gives_its_lease_back() -> None:
    tail = Tail()
    await tail.prepare(b"first")
    header = pb.Activations(hidden_size=SPEC.hidden_size, dtype=SPEC.dtype)
    header.rows.add(session=b"first", epoch=EPOCH, step=0, rows=1, sample=True, position=9)
    payload = codec.encode(torch.randn(1, SPEC.hidden_size), SPEC.dtype)
    frame = decode(memoryview(bytearray(encode(header, payload))))
    tail.epochs.on_activations(tail.head, frame, header)
    await until(lambda: tail.sessions[b"first"].key.epoch == EPOCH)
    assert tail.epochs.forget(LeaseKey(b"first", EPOCH), "client")
    await until(lambda: bool(tail.released))
    assert tail.released == [(b"first", EPOCH, "client")]
    assert not tail.told


def predicting(count: int) -> pb.History:
    return pb.History(session=b"first", epoch=EPOCH, token_ids=[1], prediction=[1] * count)


@pytest.mark.parametrize(
    "wrong",
    [
        predicting(MOST_PREDICTION_TOKENS + 1),
        pb.History(session=b"first", epoch=EPOCH, token_ids=[1], prediction=[10**6]),
        pb.History(session=b"first", epoch=EPOCH, token_ids=[1], guess_scope=bytes(17)),
    ],
    ids=["too long", "beyond the vocabulary", "scope"],
)
@asynchronous
async def test_hints_that_cannot_be_are_refused_before_the_epoch_begins(wrong: pb.History) -> None:
    tail = Tail()
    await tail.prepare(b"first")
    with pytest.raises(ProtocolError):
        tail.epochs.on_history(tail.client, wrong)


@asynchronous
async def test_predictions_that_wait_for_an_epoch_are_no_more_than_one() -> None:
    tail = Tail()
    await tail.prepare(b"first")
    tail.epochs.on_history(tail.client, predicting(MOST_PREDICTION_TOKENS))
    with pytest.raises(ProtocolError):
        tail.epochs.on_history(tail.client, predicting(MOST_PREDICTION_TOKENS))


@asynchronous
async def test_an_epoch_that_does_not_begin_in_time_is_forgotten_though_nobody_says_anything(
    model: LocalModel,
) -> None:
    forgets = DataPlaneSettings(timeouts=replace(PATIENT, prepared_s=-1.0, expiry_check_s=0.01))
    async with served(model, settings=forgets) as peer:
        assert (await peer.reserve(peer.alone())).HasField("reserved")
        assert (await peer.ready(peer.alone())).readiness.ready
        upcoming = pb.Reserve(descriptor=peer.alone(epoch=EPOCH), hop=0, prepare=True)
        response, _ = await peer.link.request(pb.Request(reserve=upcoming), DEADLINE_S)
        assert response.readiness.ready, response
        assert (await peer.readiness(peer.alone(epoch=EPOCH))).HasField("readiness")
        running = asyncio.create_task(peer.serving.run())
        async with asyncio.timeout(DEADLINE_S):
            while (answer := await peer.readiness(peer.alone(epoch=EPOCH))).HasField("readiness"):
                pass
        assert answer.refusal.code == "epoch"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
