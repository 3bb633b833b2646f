"""What a neighbour answers that makes things up costs whoever compares tables with it no more than an honest answer."""

import logging
from typing import cast

import pytest
import trio
import trio.testing
from support.swarms.swarm_examples import facts_of, state_of
from support.swarms.virtual_swarm import stream_pair

from molink.dht.gossip.table import DIGESTS, MAX_TAGS
from molink.dht.gossip.table_reader import TableReader
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream
from molink.dht.host.host import Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import sign_facts, sign_state
from molink.dht.refusals import RefusalLog

LIAR = Identity.generate()
MADE_UP = 3 * MAX_TAGS


class Liar:
    """A host that is connected to one other: this has newer words of all that it is told of, and answers each question
    with states of peers that nobody knows."""

    def __init__(self, known: Membership, nursery: trio.Nursery) -> None:
        self._newer = [(tag, sequence + 1) for tag, sequence in known.digests()]
        self._nursery = nursery
        strangers = [Identity.generate() for _ in range(MADE_UP)]
        states = [sign_state(state_of(stranger), stranger) for stranger in strangers]
        self._made_up = [pb.TableEntry(state=state).SerializeToString() for state in states]
        self.questions = 0

    async def open_stream(self, peer_id: str, *_: object, **__: object) -> FrameStream:
        self.questions += 1
        near, far = stream_pair(lambda _: None, lambda _: None)
        self._nursery.start_soon(self._answer, CompressedStream(FrameStream(far, "ours")))
        return FrameStream(near, peer_id)

    async def _answer(self, stream: CompressedStream) -> None:
        request = pb.TableRequest.FromString(await stream.receive(10_000))
        if request.digests:
            for at in range(0, len(self._newer), DIGESTS):
                tags, sequences = zip(*self._newer[at : at + DIGESTS], strict=True)
                await stream.send([pb.Digest(peer_tags=tags, sequences=sequences).SerializeToString()])
            await stream.send([b""])
        else:
            await stream.send([*self._made_up, b""])


@pytest.mark.parametrize(("peers", "questions"), [(1, 1), (MAX_TAGS + 1, 3)])
def test_who_answers_with_states_of_strangers_is_not_asked_for_their_facts(
    peers: int, questions: int
) -> None:
    """One question for all that are known, or one for digests and one for each part of those that are newer."""
    ours = Membership(None, lambda: None, clock=lambda: 0.0, wall_clock=lambda: 0.0)
    for one in (Identity.generate() for _ in range(peers)):
        ours.receive(sign_facts(facts_of(one), one))
        ours.receive(sign_state(state_of(one), one))
    assert ours.peers() == peers

    async def compare() -> int:
        async with trio.open_nursery() as nursery:
            liar = Liar(ours, nursery)
            tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger(__name__)))
            reader = TableReader(cast("Host", liar), ours, DiscoveryTiming(), TrafficCounters(), tasks)
            await reader.compare_with(LIAR.peer_id)
            nursery.cancel_scope.cancel()
        return liar.questions

    assert trio.run(compare, clock=trio.testing.MockClock(autojump_threshold=0)) == questions
