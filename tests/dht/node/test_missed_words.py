"""What gossip does not bring is found out otherwise, in virtual time: by probes, and by tables."""

import functools
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import trio
import trio.testing
from support.swarms.swarm_examples import facts_of, state_of
from support.swarms.virtual_swarm import VirtualPeer, VirtualSwarm, at_once, wall_clock

from molink.dht.gossip.table_reader import TableReader
from molink.dht.host.framing import StreamEndedError
from molink.dht.identity.identity import Identity
from molink.dht.membership.directory import Accepted
from molink.dht.membership.membership import Membership, tag_of
from molink.dht.node import network
from molink.dht.node.maintenance import ANTI_ENTROPY_S
from molink.dht.records.announcement import sign_facts, sign_loss, sign_state
from molink.dht.records.records import PeerFacts, PeerLoss, RelayAt

DIALABLE, UNDIALABLE = 2, 4
STILL_SHOWN_S = 240
"""By its own last word, if nobody calls it gone."""

Scenario = Callable[[VirtualSwarm, list[VirtualPeer]], Awaitable[None]]


def in_a_swarm(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Runs a scenario once all peers of a small swarm see each other."""
    swarm = VirtualSwarm()
    monkeypatch.setattr(network, "open_host", swarm.opens)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            peers = [
                await nursery.start(functools.partial(swarm.live, dialable=number < DIALABLE))
                for number in range(DIALABLE + UNDIALABLE)
            ]
            await trio.sleep(60.0)
            assert all(one.sees() == {peer.peer_id for peer in peers} for one in peers)
            await scenario(swarm, peers)
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.full
def test_whom_one_alone_calls_gone_is_probed_by_others_and_forgotten_if_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(_: VirtualSwarm, peers: list[VirtualPeer]) -> None:
        ghost, witness = Identity.generate(), peers[-1].identity
        sequence = int(1000 * wall_clock())
        facts = replace(facts_of(ghost), sequence=sequence - 1, addresses=(), grpc_addresses=())
        state = state_of(ghost, sequence=sequence, facts_sequence=sequence - 1, ttl_s=STILL_SHOWN_S)
        lost = PeerLoss(tag_of(witness.peer_id), tag_of(ghost.peer_id), sequence)
        for peer in peers:  # all have heard of it, and nobody has lost a link to it
            for record in (sign_facts(facts, ghost), sign_state(state, ghost), sign_loss(lost, witness)):
                peer.membership.receive(record)
        assert all(ghost.peer_id in peer.sees() for peer in peers)
        await trio.sleep(150.0)
        assert not any(ghost.peer_id in peer.sees() for peer in peers)

    in_a_swarm(monkeypatch, scenario)


@pytest.mark.full
def test_whom_one_alone_calls_gone_and_who_answers_gets_no_second_accuser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(_: VirtualSwarm, peers: list[VirtualPeer]) -> None:
        accused, witness = peers[-2], peers[-1].identity
        tag = tag_of(accused.peer_id)
        lost = PeerLoss(tag_of(witness.peer_id), tag, int(1000 * wall_clock()) + 20_000)
        others = [peer for peer in peers if peer is not accused]
        for peer in others:  # it does not hear of it at once, and says nothing that is new enough for 20 s
            peer.membership.receive(sign_loss(lost, witness))
        for _ in range(150):
            await trio.sleep(1.0)
            assert all(peer.membership.witnesses(tag) < 2 for peer in others)
            assert all(accused.peer_id in peer.sees() for peer in others)

    in_a_swarm(monkeypatch, scenario)


@pytest.mark.full
def test_who_speaks_while_it_is_asked_in_vain_is_shown_and_accused_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a peer that has just come back."""
    ghost = Identity.generate()
    asked: list[Callable[[], object]] = []

    async def answers(_: VirtualSwarm, facts: PeerFacts) -> bool:
        if facts.peer_id == ghost.peer_id:
            asked[0]()
            asked.append(asked[0])
        return facts.peer_id != ghost.peer_id

    async def scenario(swarm: VirtualSwarm, peers: list[VirtualPeer]) -> None:
        witness, sequences = peers[-1].identity, itertools.count(int(1000 * wall_clock()))
        relays = tuple(RelayAt(one, "192.0.2.7:4003") for one in sorted(swarm.dialable))
        facts = replace(facts_of(ghost), sequence=next(sequences), addresses=(), grpc_addresses=())
        facts = replace(facts, relays=relays)

        def speak() -> int:
            said = next(sequences)
            state = state_of(ghost, sequence=said, facts_sequence=facts.sequence, ttl_s=STILL_SHOWN_S)
            for peer in peers:
                peer.membership.receive(sign_state(state, ghost))
            return said

        for peer in peers:
            peer.membership.receive(sign_facts(facts, ghost))
        lost = PeerLoss(tag_of(witness.peer_id), tag_of(ghost.peer_id), speak())
        for peer in peers:
            peer.membership.receive(sign_loss(lost, witness))
        asked.append(speak)
        for _ in range(100):
            await trio.sleep(1.0)
            assert all(ghost.peer_id in peer.sees() for peer in peers)
            assert not any(peer.membership.witnesses(tag_of(ghost.peer_id)) > 1 for peer in peers)
        assert len(asked) > 1

    monkeypatch.setattr(VirtualSwarm, "_answers", answers)
    in_a_swarm(monkeypatch, scenario)


@pytest.mark.full
def test_a_comparison_of_tables_that_failed_is_made_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[TableReader, list[float]] = {}
    compare = TableReader.compare_with

    async def fails_once(self: TableReader, peer_id: str) -> None:
        begun.setdefault(self, []).append(trio.current_time())
        if len(begun[self]) == 1:
            raise StreamEndedError(f"{peer_id} has closed the stream")
        await compare(self, peer_id)

    async def scenario(_: VirtualSwarm, __: list[VirtualPeer]) -> None:
        monkeypatch.setattr(TableReader, "compare_with", fails_once)
        await trio.sleep(150.0)
        assert len(begun) == DIALABLE + UNDIALABLE
        assert all(times[1] - times[0] < 5.0 for times in begun.values())

    in_a_swarm(monkeypatch, scenario)


@pytest.mark.full
def test_a_comparison_of_tables_that_does_not_end_keeps_a_peer_from_nothing_else_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: dict[TableReader, list[float]] = {}
    looked: dict[Membership, list[float]] = {}
    expire = Membership.expire

    async def does_not_end(self: TableReader, _: str) -> None:
        begun.setdefault(self, []).append(trio.current_time())
        await trio.sleep_forever()

    def noted(self: Membership) -> tuple[tuple[bytes, Accepted], ...]:
        looked.setdefault(self, []).append(trio.current_time())
        return expire(self)

    async def scenario(_: VirtualSwarm, __: list[VirtualPeer]) -> None:
        monkeypatch.setattr(TableReader, "compare_with", does_not_end)
        monkeypatch.setattr(Membership, "expire", noted)
        await trio.sleep(300.0)
        assert len(begun) == len(looked) == DIALABLE + UNDIALABLE
        assert all(len(times) > 1 for times in begun.values())
        for times in looked.values():
            assert max(later - before for before, later in itertools.pairwise(times)) < 1.5 * ANTI_ENTROPY_S

    in_a_swarm(monkeypatch, scenario)
