"""What steps together: sessions whose tokens arrive together start their next steps in as many micro-batches as may
circulate."""

from types import SimpleNamespace
from typing import cast

import pytest
from support.links.data_plane import End, asynchronous, describe, hop_of, soon, until
from support.swarms.served_circuit import served_circuit
from support.swarms.served_peer import HIGH, LOW, model, served

from molink.peer.engine.sessions import ServedSession
from molink.peer.models.model import LocalModel
from molink.peer.scheduling.decode_watch import DecodeBatch
from molink.peer.scheduling.in_flight_rules import fixed
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

__all__ = ["model"]

SESSIONS = (1, 2, 3)


@asynchronous
async def test_what_cannot_be_done_keeps_nothing_behind_it_from_being_done(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core takes all that it has said for done: an engine that was not begun would never be."""
    done: list[str] = []
    async with served(model) as peer:
        stepper = peer.serving.stepper
        effects = [1, "first", "second"]
        with monkeypatch.context() as patch:
            patch.setattr(stepper, "_core", SimpleNamespace(handle=lambda _event, _now_s: effects))
            patch.setattr(stepper, "_actions", {int: _raise, str: done.append})
            with pytest.raises(ProtocolError):
                stepper.open_session(cast("ServedSession", None))
    assert done == ["first", "second"]


def _raise(_: int) -> None:
    raise ProtocolError("more than a message takes")


class Watch:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.batches: list[DecodeBatch] = []
        self.firsts: list[DecodeBatch] = []

    def computing(self, batch: DecodeBatch) -> None:
        self.batches.append(batch)

    def awaiting(self, first: DecodeBatch) -> None:
        self.firsts.append(first)


@asynchronous
async def test_who_watches_decode_is_told_of_each_step_and_of_each_iteration(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    async with served_circuit(model, (2, 4), kv_tokens=100) as circuit:
        middle = circuit.peers[1].serving.stepper
        monkeypatch.setattr(middle, "_watch", watch)
        await circuit.generate([(5, 6, 7)], new_tokens=5)
        tail = circuit.peers[2].identity.peer_id
        await until(lambda: len(watch.firsts) == 4)
    assert [(batch.tokens, batch.next_peer_ids, batch.hop) for batch in watch.batches] == [(1, {tail}, 1)] * 4
    assert [len(batch.stages) for batch in watch.firsts] == [3] * 4
    times = [
        at_s
        for pair in zip(watch.batches, watch.firsts, strict=True)
        for at_s in (pair[0].at_s, pair[1].at_s)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("micro_batches", "frames"), [(1, [[1, 2, 3]]), (2, [[1, 2], [3]]), (5, [[1], [2], [3]])]
)
@asynchronous
async def test_sessions_whose_tokens_come_in_one_frame_take_their_next_step_in_as_many_as_may_circulate(
    model: LocalModel, micro_batches: int, frames: list[list[int]]
) -> None:
    async with served(model, settings=DataPlaneSettings(rule=fixed(micro_batches))) as peer, End() as tail:
        hops = [peer.hop(LOW), hop_of(tail.identity, HIGH, tail.facts)]
        for session in SESSIONS:
            asked = describe(hops, session=session, spec=peer.spec)
            assert (await peer.reserve(asked)).HasField("reserved")
            assert (await peer.ready(asked)).readiness.ready
            assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        prefilled = 0
        while prefilled < len(SESSIONS):
            _, frame = await soon(tail.handler.frames.get())
            prefilled += len(frame.header.rows)
        tokens = [
            pb.Token(session=bytes([session]) * 16, epoch=1, step=0, position=5, token_id=3)
            for session in SESSIONS
        ]
        link = tail.links.find(peer.identity.peer_id)
        assert link is not None
        assert link.post(pb.Tokens(tokens=tokens))
        for sessions in frames:
            _, frame = await soon(tail.handler.frames.get())
            assert [(row.session[0], row.step) for row in frame.header.rows] == [(one, 1) for one in sessions]


@asynchronous
async def test_a_session_goes_on_alone_when_the_others_of_its_micro_batch_do_not_come_back(
    model: LocalModel,
) -> None:
    async with served(model, settings=DataPlaneSettings(rule=fixed(1))) as peer, End() as tail:
        hops = [peer.hop(LOW), hop_of(tail.identity, HIGH, tail.facts)]
        for session in SESSIONS:
            asked = describe(hops, session=session, spec=peer.spec)
            assert (await peer.reserve(asked)).HasField("reserved")
            assert (await peer.ready(asked)).readiness.ready
            assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        prefilled = 0
        while prefilled < len(SESSIONS):
            _, frame = await soon(tail.handler.frames.get())
            prefilled += len(frame.header.rows)
        link = tail.links.find(peer.identity.peer_id)
        assert link is not None
        for step, returning in enumerate([SESSIONS, (2,), (2,)]):
            tokens = [
                pb.Token(session=bytes([session]) * 16, epoch=1, step=step, position=5 + step, token_id=3)
                for session in returning
            ]
            assert link.post(pb.Tokens(tokens=tokens))
            _, frame = await soon(tail.handler.frames.get())
            assert [(row.session[0], row.step) for row in frame.header.rows] == [
                (session, step + 1) for session in returning
            ]
