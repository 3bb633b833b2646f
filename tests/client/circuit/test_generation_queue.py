"""Generations of one client that find a swarm full wait for their turn, and begin as others of it end."""

import asyncio
from typing import cast

import pytest
from support.circuits.generating import HIGH, LOW, PROMPT, rest
from support.links.data_plane import SPEC, asynchronous, soon, until
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest
from molink.client.epochs.turns import MOST_ASKING
from molink.client.errors import SwarmUnavailable
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import SamplingParams, Span

LONG_S = 20.0


class RoomyPeer(FakePeer):
    """Grants so many leases at once; others are refused, with when the first one would expire."""

    def __init__(self, span: Span, room: int) -> None:
        super().__init__(span)
        self.room = room
        self.leased: set[bytes] = set()
        self.refused = 0

    async def request(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, memoryview]:
        if request.HasField("reserve"):
            session = request.reserve.descriptor.session
            if session not in self.leased and len(self.leased) >= self.room:
                self.refused += 1
                refusal = pb.Refusal(code="busy", detail="all are taken", retry_after_ms=30_000)
                return pb.Response(refusal=refusal), memoryview(b"")
            self.leased.add(session)
        return await super().request(request, timeout_s)

    def post(self, frame: pb.Request | pb.Start | pb.Move | pb.History, **options: object) -> bool:
        if isinstance(frame, pb.Request) and frame.HasField("release"):
            self.leased.discard(frame.release.session)
        return super().post(frame, **options)


class AskingCrowd:
    """Generations of one token of one client, over two peers that have room for so many."""

    def __init__(self, room: int) -> None:
        self.low, self.high = RoomyPeer(LOW, room), RoomyPeer(HIGH, room)
        self.connection = FakeConnection(self.low, self.high)
        self.builder = CircuitBuilder(cast("SwarmConnection", self.connection), SPEC)
        self.runs: list[asyncio.Task[list[int]]] = []

    async def __aenter__(self) -> "AskingCrowd":
        return self

    async def __aexit__(self, *_: object) -> None:
        for run in self.runs:
            run.cancel()
        await asyncio.gather(*self.runs, return_exceptions=True)

    def begin(self, count: int, patience_s: float = LONG_S) -> None:
        for first_token in range(len(self.runs), len(self.runs) + count):
            asked = SessionRequest([first_token, *PROMPT], SamplingParams(max_new_tokens=1), partners=False)
            session = ClientSession(self.builder, asked)
            self.runs.append(asyncio.create_task(rest(session.tokens(patience_s))))

    @property
    def begun(self) -> list[int]:
        """The generations that have begun, by number, in order."""
        return [start.token_ids[0] for start in self.low.starts]

    async def end(self, number: int) -> None:
        """That generation, which has begun, gets its token, which is its last."""
        start = self.low.starts[self.begun.index(number)]
        token = pb.Token(
            session=start.session, position=len(PROMPT) + 1, token_id=7, finish=pb.LENGTH, epoch=start.epoch
        )
        cast("ClientSession", self.connection.sinks[start.session]).on_tokens(self.low.peer_id, token)
        assert await soon(self.runs[number]) == [7]


@asynchronous
async def test_generations_that_find_a_swarm_full_begin_in_order_as_others_of_the_client_end() -> None:
    async with AskingCrowd(room=2) as crowd:
        crowd.begin(2)
        await until(lambda: len(crowd.begun) == 2)
        crowd.begin(2 * MOST_ASKING)
        await until(lambda: crowd.builder.queue.waiting == 2 * MOST_ASKING)
        for place in range(2 + 2 * MOST_ASKING):
            await until(lambda place=place: len(crowd.begun) > place)  # type: ignore[misc]
            await crowd.end(crowd.begun[place])
        # one that looks for room now and then may come upon it first
        assert max(abs(number - place) for place, number in enumerate(crowd.begun)) <= 2
        assert (crowd.low.leased, crowd.high.leased, crowd.builder.queue.waiting) == (set(), set(), 0)


@asynchronous
async def test_who_waits_asks_nobody_until_room_may_be_there() -> None:
    async with AskingCrowd(room=1) as crowd:
        crowd.begin(1)
        await until(lambda: crowd.begun == [0])
        crowd.begin(3 * MOST_ASKING)
        await until(lambda: crowd.builder.queue.waiting == 3 * MOST_ASKING)
        refused = max(crowd.low.refused, crowd.high.refused)
        assert refused < 2 * MOST_ASKING, "the others were not asked for at all"
        await crowd.end(0)
        await until(lambda: len(crowd.begun) == 2)


@asynchronous
async def test_room_that_others_have_made_is_found() -> None:
    async with AskingCrowd(room=0) as crowd:
        crowd.begin(3)
        await until(lambda: crowd.builder.queue.waiting == 3)
        crowd.low.room = crowd.high.room = 2
        await until(lambda: len(crowd.begun) == 2)
        await crowd.end(crowd.begun[0])
        await until(lambda: len(crowd.begun) == 3)


@asynchronous
async def test_who_waits_while_nothing_moves_is_told_that_the_swarm_is_busy() -> None:
    async with AskingCrowd(room=1) as crowd:
        crowd.begin(1)
        await until(lambda: crowd.begun == [0])
        crowd.begin(2, patience_s=0.6)
        for run in crowd.runs[1:]:
            with pytest.raises(SwarmUnavailable) as caught:
                await soon(run)
            assert caught.value.busy
        await crowd.end(0)
        crowd.begin(1)
        await until(lambda: crowd.begun == [0, 3])


@asynchronous
async def test_whose_client_goes_away_takes_nobodys_turn() -> None:
    async with AskingCrowd(room=1) as crowd:
        crowd.begin(1)
        await until(lambda: crowd.begun == [0])
        crowd.begin(3)
        await until(lambda: crowd.builder.queue.waiting == 3)
        crowd.runs[1].cancel()
        await asyncio.gather(crowd.runs[1], return_exceptions=True)
        await crowd.end(0)
        await until(lambda: len(crowd.begun) == 2)
        assert 1 not in crowd.begun
