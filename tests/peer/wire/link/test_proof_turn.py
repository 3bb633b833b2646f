"""Of the connections that are to resume one link, one at a time gives its proof."""

import asyncio

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, soon
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.dialled_connection import DialledConnection, GrpcStream, Knock, ProofTurn
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

FACTS = facts_of(Identity.generate())
ASKED = pb.Proof(resumes=True)


class Channel:
    """Stands for gRPC's call and channel."""

    def __init__(self) -> None:
        self.closed = False

    def cancel(self) -> bool:
        return True

    async def close(self) -> None:
        self.closed = True


class Knocks:
    """Knocks at an end that answers proofs when it is told to."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[asyncio.Future[pb.Welcome]] = asyncio.Queue()
        """What answers the proofs, in the order in which they are given."""

    def one(self, took_s: float = 0.0) -> tuple[Knock, Channel]:
        channel = Channel()
        connection = DialledConnection(channel, channel)  # type: ignore[arg-type]
        return Knock(connection, FACTS, pb.Challenge(), self._prove, took_s, DEADLINE_S), channel

    async def _prove(self, *_: GrpcStream | PeerFacts | pb.Challenge | pb.Proof) -> pb.Welcome:
        answer: asyncio.Future[pb.Welcome] = asyncio.get_running_loop().create_future()
        self.given.put_nowait(answer)
        return await answer


@asynchronous
async def test_while_one_proof_is_on_its_way_no_other_is_given_and_after_its_welcome_none() -> None:
    turn, knocks = ProofTurn(DEADLINE_S), Knocks()
    (first, used), (second, left) = knocks.one(), knocks.one()
    resuming, waiting = (asyncio.create_task(turn.finish(knock, ASKED)) for knock in (first, second))
    answer = await soon(knocks.given.get())
    answer.set_result(pb.Welcome(resumed=True, received=7))
    assert (await soon(resuming)).received == 7
    await asyncio.sleep(0)
    assert knocks.given.empty()
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert knocks.given.empty()
    assert (used.closed, left.closed) == (False, True)


@pytest.mark.parametrize("refused", [False, True])
def test_a_proof_that_is_refused_or_not_answered_makes_room_for_the_next(*, refused: bool) -> None:
    """A dialler that does not answer is given as long as the challenge took."""

    @asynchronous
    async def run() -> None:
        turn, knocks = ProofTurn(0.0), Knocks()
        (first, left), (second, used) = knocks.one(3600.0 if refused else 0.01), knocks.one(3600.0)
        failing = asyncio.create_task(turn.finish(first, ASKED))
        answer = await soon(knocks.given.get())
        resuming = asyncio.create_task(turn.finish(second, ASKED))
        if refused:
            answer.set_exception(asyncio.InvalidStateError)
        with pytest.raises(LinkError):
            await soon(failing)
        assert left.closed
        (await soon(knocks.given.get())).set_result(pb.Welcome(resumed=True))
        assert (await soon(resuming)).connection is second.connection
        assert not used.closed

    run()
