"""Digests of a table: what is newer is asked for, and nothing that is no digest is taken for one."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import TypeVar, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of, state_of
from support.swarms.virtual_swarm import stream_pair
from trio.testing import MockClock

from molink.dht.gossip import table
from molink.dht.gossip.table import (
    DIGESTS,
    HOT_S,
    MAX_TAGS,
    REGAINED_S,
    TableAllowances,
    TableService,
    digests_in,
    pull,
)
from molink.dht.gossip.table_reader import TableReader
from molink.dht.gossip.traffic import TrafficCounters
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.framing import FrameStream, StreamEndedError
from molink.dht.host.host import DialError, Host
from molink.dht.host.neighbour_tasks import NeighbourTasks
from molink.dht.identity.identity import Identity
from molink.dht.membership.announcing_core import farewell
from molink.dht.membership.entries import DirectoryEntries
from molink.dht.membership.held import PeerEntry
from molink.dht.membership.membership import Membership, tag_of
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import sign_facts, sign_state
from molink.dht.records.bounds import MAX_SEQUENCE
from molink.dht.refusals import RefusalLog

ADA, BOB, EVE = Identity.generate(), Identity.generate(), Identity.generate()
AnswerT = TypeVar("AnswerT")
digests = st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, MAX_SEQUENCE)), max_size=DIGESTS + 3)


def frame_of(pairs: list[tuple[int, int]]) -> bytes:
    return pb.Digest(
        peer_tags=[tag for tag, _ in pairs], sequences=[sequence for _, sequence in pairs]
    ).SerializeToString()


@given(digests)
def test_digests_come_out_as_they_went_in_or_are_too_many(pairs: list[tuple[int, int]]) -> None:
    if 1 <= len(pairs) <= DIGESTS:
        assert list(digests_in(frame_of(pairs))) == pairs
    else:
        with pytest.raises(ValueError, match="digests"):
            digests_in(frame_of(pairs))


@given(st.binary(max_size=300))
def test_any_bytes_are_digests_within_bounds_or_refused(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        pairs = digests_in(body)
        assert 1 <= len(pairs) <= DIGESTS
        assert all(0 <= sequence <= MAX_SEQUENCE for _, sequence in pairs)


def test_tags_without_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="as many"):
        digests_in(pb.Digest(peer_tags=[1, 2], sequences=[3]).SerializeToString())


def test_a_membership_tells_of_its_living_peers_and_of_the_newest_that_it_knows() -> None:
    membership = Membership(None, lambda: None, clock=lambda: 0.0)
    membership.receive(sign_facts(facts_of(ADA), ADA))
    membership.receive(sign_state(state_of(ADA, sequence=7), ADA))
    membership.receive(sign_facts(facts_of(BOB), BOB))
    assert membership.digests() == ((tag_of(ADA.peer_id), 7),)
    assert membership.sequence_of(tag_of(BOB.peer_id)) == -1
    assert membership.sequence_of(12345) == -1


def test_who_asks_for_a_few_peers_has_the_others_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    membership = Membership(None, lambda: None, clock=lambda: now_s)
    for identity in (ADA, BOB, EVE):
        now_s += 1.0
        membership.receive(sign_facts(facts_of(identity), identity))
    for identity in (ADA, BOB):
        now_s += 1.0
        membership.receive(sign_state(state_of(identity), identity))
    tags = tuple(tag_of(identity.peer_id) for identity in (ADA, BOB, EVE))
    everybody = membership.table()
    assert {record.peer_tag for record in everybody} == set(tags[:2])
    whole_tables: list[DirectoryEntries] = []

    everyone = DirectoryEntries.__iter__

    def count(entries: DirectoryEntries) -> Iterator[PeerEntry]:
        whole_tables.append(entries)
        return everyone(entries)

    monkeypatch.setattr(DirectoryEntries, "__iter__", count)
    assert membership.table(tags) == everybody
    for tag in (*tags, 12345):
        assert membership.table((tag,)) == tuple(one for one in everybody if one.peer_tag == tag)
    known = [membership.facts_of(identity.peer_id) for identity in (ADA, BOB, EVE)]
    assert known == [
        facts_of(ADA),
        facts_of(BOB),
        None,
    ]  # of whom there is no state, that one is not known to live
    assert membership.facts_of("nobody") is None
    assert whole_tables == []


def test_who_asks_for_what_is_newer_hears_who_has_left() -> None:
    theirs = Membership(None, lambda: None, clock=lambda: 0.0)
    ours = Membership(None, lambda: None, clock=lambda: 0.0)
    for held in (theirs, ours):
        for one in (ADA, BOB):
            held.receive(sign_facts(facts_of(one), one))
            held.receive(sign_state(state_of(one, sequence=7), one))
    theirs.receive(sign_state(farewell(state_of(BOB, sequence=8)), BOB))
    answer_of(theirs, lambda stream: pull(stream, ours, held=ours.digests(), timeout_s=5.0))
    assert [view.peer_id for view in ours.snapshot()] == [ADA.peer_id]
    # who has only lost sight of a peer says no goodbye in its name
    again = answer_of(
        theirs, lambda stream: pull(stream, ours, held=((tag_of(BOB.peer_id), 8),), timeout_s=5.0)
    )
    assert again.news == 0


def test_what_a_pull_brings_goes_on_only_if_it_was_said_lately() -> None:
    now_s = 0.0
    theirs = Membership(None, lambda: None, clock=lambda: now_s)
    ours = Membership(None, lambda: None, clock=lambda: now_s)
    said = {
        one: (sign_facts(facts_of(one), one), sign_state(state_of(one, ttl_s=300), one)) for one in (ADA, BOB)
    }
    for record in said[ADA]:
        theirs.receive(record)
    now_s = 1.5 * HOT_S
    for record in said[BOB]:
        theirs.receive(record)
    now_s = 2 * HOT_S

    pulled = answer_of(theirs, lambda stream: pull(stream, ours, timeout_s=5.0))
    assert pulled.news == 4
    assert tuple(record for record, _ in pulled.hot) == said[BOB]


def test_who_says_what_it_holds_gets_what_is_newer_and_the_facts_of_those_only_whom_it_lacks() -> None:
    theirs = Membership(None, lambda: None, clock=lambda: 0.0)
    ours = Membership(None, lambda: None, clock=lambda: 0.0, wall_clock=lambda: 0.0)
    others = (ADA, BOB, EVE)
    for one in others:
        theirs.receive(sign_facts(facts_of(one), one))
        theirs.receive(sign_state(state_of(one, sequence=7), one))
    for one, sequence in ((ADA, 7), (BOB, 6)):
        ours.receive(sign_facts(facts_of(one), one))
        ours.receive(sign_state(state_of(one, sequence=sequence), one))
    pulled = answer_of(theirs, lambda stream: pull(stream, ours, held=ours.digests(), timeout_s=5.0))
    assert (pulled.entries, pulled.news, pulled.wanted) == (2, 3, ())
    assert sorted(ours.digests()) == sorted((tag_of(one.peer_id), 7) for one in others)
    again = answer_of(theirs, lambda stream: pull(stream, ours, held=ours.digests(), timeout_s=5.0))
    assert again.entries == 0


def test_a_question_with_fewer_sequences_than_peers_or_more_peers_than_may_be_is_not_answered() -> None:
    theirs = Membership(None, lambda: None, clock=lambda: 0.0)
    for request in (
        pb.TableRequest(peer_tags=[1, 2], sequences=[3]),
        pb.TableRequest(sequences=[3]),
        pb.TableRequest(peer_tags=range(MAX_TAGS + 1)),
    ):

        async def ask(stream: CompressedStream, asked: bytes = request.SerializeToString()) -> None:
            await stream.send([asked])
            with pytest.raises(StreamEndedError):
                await stream.receive(1000)

        answer_of(theirs, ask)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.0, 100.0)), max_size=60), st.integers(0, 3000))
def test_an_identity_gets_two_whole_tables_and_further_ones_as_time_passes(
    asked: list[tuple[str, float]], peers: int
) -> None:
    allowances, now = TableAllowances(), 0.0
    got = {"a": 0, "b": 0}
    for peer_id, waited_s in asked:
        now += waited_s
        if may := allowances.has_left(peer_id, peers, now):
            got[peer_id] += peers
            allowances.spend(peer_id, peers, peers, now)
        assert may or got[peer_id] > 2 * peers
        assert got[peer_id] <= (2 * peers + 1024) * (1 + now / REGAINED_S) + peers


def test_of_so_many_identities_and_no_more_it_is_known_what_they_got() -> None:
    allowances = TableAllowances()
    for number in range(5000):
        allowances.spend(str(number), 10_000, 10, 0.0)
    assert len(allowances) == 4096
    assert not allowances.has_left("4999", 10, 0.0)


def test_who_asks_for_a_table_again_and_again_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_FREE_ENTRIES", 0)
    theirs = Membership(None, lambda: None, clock=lambda: 0.0)
    for one in (ADA, EVE):
        theirs.receive(sign_facts(facts_of(one), one))
        theirs.receive(sign_state(state_of(one, sequence=7), one))
    service = service_of(theirs)

    async def copy(asker: Identity) -> int:
        near, far = stream_pair(lambda _: None, lambda _: None)
        ours = Membership(None, lambda: None, clock=lambda: 0.0, wall_clock=lambda: 0.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.serve, CompressedStream(FrameStream(far, asker.peer_id)))
            with contextlib.suppress(StreamEndedError):
                return (
                    await pull(CompressedStream(FrameStream(near, BOB.peer_id)), ours, timeout_s=5.0)
                ).entries
        return 0

    async def scenario() -> list[int]:
        return [await copy(asker) for asker in (ADA, ADA, ADA, ADA, ADA, EVE)]

    assert trio.run(scenario, clock=MockClock(autojump_threshold=0)) == [2, 2, 2, 0, 0, 2]


def service_of(theirs: Membership) -> TableService:
    return TableService(
        theirs, TrafficCounters(), timeout_s=5.0, host_of=lambda _: "", is_member=lambda _: True
    )


def answer_of(
    theirs: Membership,
    ask: Callable[[CompressedStream], Awaitable[AnswerT]],
    service: TableService | None = None,
) -> AnswerT:
    """What a question brings that is asked of a table over a stream of its own."""

    async def asked() -> AnswerT:
        near, far = stream_pair(lambda _: None, lambda _: None)
        answering = service or service_of(theirs)
        with trio.fail_after(10.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answering.serve, CompressedStream(FrameStream(far, ADA.peer_id)))
                return await ask(CompressedStream(FrameStream(near, BOB.peer_id)))

    return trio.run(asked, clock=MockClock(autojump_threshold=0))


class OneTable:
    """A host that is connected to one other, which serves that table; its second stream does not open."""

    def __init__(self, theirs: Membership, nursery: trio.Nursery) -> None:
        self._service = service_of(theirs)
        self._nursery = nursery
        self._streams = 0

    async def open_stream(self, peer_id: str, *_: object, **__: object) -> FrameStream:
        self._streams += 1
        if self._streams == 2:
            raise DialError("its connection broke")
        near, far = stream_pair(lambda _: None, lambda _: None)
        self._nursery.start_soon(self._service.serve, CompressedStream(FrameStream(far, BOB.peer_id)))
        return FrameStream(near, peer_id)


def test_who_came_back_is_shown_by_the_next_comparison_where_one_broke_off_between_states_and_facts() -> None:
    theirs, ours = (
        Membership(None, lambda: None, clock=lambda: 0.0, wall_clock=lambda: 0.0) for _ in range(2)
    )
    for held in (theirs, ours):
        held.receive(sign_facts(facts_of(ADA), ADA))
        held.receive(sign_state(state_of(ADA), ADA))
    before = facts_of(ADA).sequence
    facts, state = facts_of(ADA, sequence=before + 10), state_of(ADA, sequence=before + 11)
    theirs.receive(sign_facts(facts, ADA))
    theirs.receive(sign_state(replace(state, facts_sequence=before + 10), ADA))

    async def compare_twice() -> None:
        with trio.fail_after(10.0):
            async with trio.open_nursery() as nursery:
                host = cast("Host", OneTable(theirs, nursery))
                tasks = NeighbourTasks(nursery, RefusalLog(logging.getLogger(__name__)))
                reader = TableReader(host, ours, DiscoveryTiming(), TrafficCounters(), tasks)
                with pytest.raises(DialError):
                    await reader.compare_with(BOB.peer_id)
                assert [view.facts.sequence for view in ours.snapshot()] == [before]
                await reader.compare_with(BOB.peer_id)

    trio.run(compare_twice, clock=MockClock(autojump_threshold=0))
    assert [view.facts.sequence for view in ours.snapshot()] == [before + 10]
