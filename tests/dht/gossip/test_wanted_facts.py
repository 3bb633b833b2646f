"""Facts that are missing are asked for of whoever spoke of their peer, of each neighbour apart, in virtual time."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import cast

import pytest
import trio
import trio.testing
from support.swarms.swarm_examples import state_of
from support.swarms.virtual_swarm import stream_pair

from molink.dht.gossip.gossip import Gossip, GossipObserver
from molink.dht.gossip.table import MAX_TAGS, PullResult
from molink.dht.gossip.table_reader import TableReader
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream, StreamEndedError
from molink.dht.host.host import Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import Membership
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.announcement import sign_state
from molink.dht.refusals import RefusalLog

SLOW_S = 9.9
"""A question of which the answer takes no longer is none that failed."""


class Noting(TableReader):
    """Notes what would be asked of whom and when; `slow` answers late, `deaf` fails then, `refusing` at once."""

    def __init__(self, nursery: trio.Nursery) -> None:
        tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger(__name__)))
        membership = Membership(None, lambda: None)
        super().__init__(cast("Host", None), membership, DiscoveryTiming(), TrafficCounters(), tasks)
        self.asked: list[tuple[str, tuple[int, ...], float]] = []

    async def pull(
        self,
        peer_id: str,
        *,
        tags: Iterable[int] = (),
        **_: object,
    ) -> PullResult:
        self.asked.append((peer_id, tuple(sorted(tags)), trio.current_time()))
        await trio.sleep(SLOW_S if peer_id in ("slow", "deaf") else 0.1)
        if peer_id in ("deaf", "refusing"):
            raise StreamEndedError("it did not answer")
        return PullResult(0, 0, ())


async def noted(wanted: Iterable[tuple[float, str, int]]) -> list[tuple[str, tuple[int, ...], float]]:
    """What was asked, of whom and after how long, where facts were wanted after so many seconds."""
    async with trio.open_nursery() as nursery:
        reader, began_at = Noting(nursery), trio.current_time()
        for after_s, peer_id, tag in wanted:
            await trio.sleep_until(began_at + after_s)
            reader.facts_wanted(peer_id, tag)
    return [(peer_id, tags, round(at - began_at, 6)) for peer_id, tags, at in reader.asked]


def questions(*wanted: tuple[float, str, int]) -> list[tuple[str, tuple[int, ...], float]]:
    asked = trio.run(noted, wanted, clock=trio.testing.MockClock(autojump_threshold=0))
    return sorted(asked, key=lambda question: (question[2], question[0]))


def test_each_neighbour_is_asked_for_all_that_it_spoke_of_and_for_nothing_else() -> None:
    at_once = questions((0.0, "a", 1), (0.0, "b", 2), (0.0, "c", 3), (0.0, "a", 4))
    assert {(peer_id, tags) for peer_id, tags, _ in at_once} >= {("b", (2,)), ("c", (3,))}
    assert sorted(tag for peer_id, tags, _ in at_once if peer_id == "a" for tag in tags) == [1, 4]


def test_a_neighbour_that_is_slow_to_answer_and_names_ever_more_keeps_nobody_waiting() -> None:
    flood = [(0.0, "slow", number) for number in range(2 * MAX_TAGS)]
    assert ("honest", (7,), 1.0) in questions(*flood, (1.0, "honest", 7))


def test_of_a_slow_neighbour_one_question_is_asked_at_a_time_and_the_rest_with_the_next() -> None:
    asked = questions((0.0, "slow", 1), (1.0, "slow", 2), (2.0, "slow", 3), (2.5, "slow", 3))
    assert asked == [("slow", (1,), 0.0), ("slow", (2, 3), SLOW_S)]


def test_a_neighbour_that_speaks_of_strangers_without_end_is_asked_once_in_two_seconds() -> None:
    asked = questions(*((number / 10, "quick", number) for number in range(100)))
    assert [at for _, _, at in asked] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert sorted(tag for _, tags, _ in asked for tag in tags) == list(range(100))


def test_a_neighbour_that_refuses_each_question_is_asked_once_in_two_seconds_and_for_what_it_names_later() -> (
    None
):
    asked = questions(*((number / 10, "refusing", number) for number in range(40)))
    assert [at for _, _, at in asked] == [0.0, 2.0, 4.0]
    assert sorted(tag for _, tags, _ in asked for tag in tags) == list(range(40))


def test_what_is_wanted_of_one_neighbour_is_bounded() -> None:
    asked = questions((0.0, "slow", 0), *((1.0, "slow", number) for number in range(1, 3 * MAX_TAGS)))
    assert [len(tags) for _, tags, _ in asked] == [1, MAX_TAGS]


def test_who_failed_once_is_asked_again_for_what_it_speaks_of_later() -> None:
    asked = questions((0.0, "deaf", 1), (20.0, "deaf", 2))
    assert asked == [("deaf", (1,), 0.0), ("deaf", (2,), 20.0)]


def test_so_many_neighbours_are_asked_at_once() -> None:
    asked = questions(*((0.0, f"neighbour {number}", number) for number in range(100)))
    assert len(asked) == 64


@pytest.mark.parametrize("most_incoming", [0, 1])
def test_facts_are_wanted_of_those_only_that_have_a_link(most_incoming: int) -> None:
    """Whoever gets none is heard out all the same, and many may come at once."""
    wanted: list[str] = []
    observer = GossipObserver(lambda peer_id, _: wanted.append(peer_id), lambda: None, lambda _: None)
    stranger = Identity.generate()

    async def spoken() -> None:
        membership, refusals = Membership(None, lambda: None), RefusalLog(logging.getLogger(__name__))
        gossip = Gossip("own", membership, DiscoveryTiming(), TrafficCounters(), refusals, observer)
        gossip.most_incoming = most_incoming
        near, far = stream_pair(lambda _: None, lambda _: None)
        async with trio.open_nursery() as nursery:
            stream = CompressedStream(FrameStream(near, "neighbour"))
            nursery.start_soon(partial(gossip.run_link, stream, "192.0", dialled=False))
            await CompressedStream(FrameStream(far, "own")).send([sign_state(state_of(stranger), stranger)])
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    trio.run(spoken, clock=trio.testing.MockClock(autojump_threshold=0))
    assert wanted == ["neighbour"] * most_incoming
