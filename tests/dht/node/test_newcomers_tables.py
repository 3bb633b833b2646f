"""A newcomer copies the swarm's table from others, too, than those to whom it was invited, in virtual time."""

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio
import trio.testing
from support.swarms.swarm_examples import facts_of, state_of
from support.swarms.virtual_swarm import VirtualPeer, VirtualSwarm, at_once, wall_clock

from molink.dht.gossip.copy_claims import FIRST
from molink.dht.gossip.table import PullResult
from molink.dht.gossip.table_reader import TableReader
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import tag_of
from molink.dht.node import network
from molink.dht.node.joining import HELPERS
from molink.dht.records.announcement import sign_facts, sign_state

DIALABLE, UNDIALABLE = 4, 40
SETTLED_S = 60.0
"""Within which all see each other."""
MUCH_BYTES = 100_000
"""More than a control plane may send at once."""


class Founded(VirtualSwarm):
    """A swarm to which all are invited by its founder."""

    founder = ""

    def addresses(self) -> tuple[str, ...]:
        return tuple(address for address in super().addresses() if address.endswith(self.founder))


def hear_of_others(peers: list[VirtualPeer]) -> frozenset[int]:
    """Has them hear of many that nobody can dial; returns the tags of these."""
    sequence, ghosts = int(1000 * wall_clock()), [Identity.generate() for _ in range(UNDIALABLE)]
    for ghost in ghosts:
        facts = replace(facts_of(ghost, sequence=sequence), addresses=(), grpc_addresses=())
        state = state_of(ghost, sequence=sequence + 1, facts_sequence=sequence, ttl_s=600)
        for peer in peers:
            for record in (sign_facts(facts, ghost), sign_state(state, ghost)):
                peer.membership.receive(record)
    return frozenset(tag_of(ghost.peer_id) for ghost in ghosts)


@pytest.mark.parametrize("busy", [True, False])
def test_a_newcomer_copies_each_record_once_and_from_others_than_a_founder_who_has_sent_much(
    *, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = Founded()
    monkeypatch.setattr(network, "open_host", swarm.opens)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    asked, ghosts = Counter[str](), set[int]()
    pull = TableReader.pull

    async def counting(
        self: TableReader,
        peer_id: str,
        *,
        tags: Iterable[int] = (),
        states_only: bool = False,
        **more: object,
    ) -> PullResult:
        asked[peer_id] += len(ghosts.intersection(tags))
        return await pull(self, peer_id, tags=tags, states_only=states_only, **more)  # type: ignore[arg-type]

    async def run() -> None:
        async with trio.open_nursery() as nursery:

            async def begin(*, dialable: bool) -> VirtualPeer:
                peer: VirtualPeer = await nursery.start(functools.partial(swarm.live, dialable=dialable))
                return peer

            founder = await begin(dialable=True)
            swarm.founder = founder.peer_id
            hubs = [founder, *[await begin(dialable=True) for _ in range(DIALABLE - 1)]]
            await trio.sleep(SETTLED_S)
            ghosts.update(hear_of_others(hubs))
            if busy:
                assert founder.network is not None
                founder.network.traffic.count_sent("gossip", MUCH_BYTES)
            monkeypatch.setattr(TableReader, "pull", counting)
            newcomer = await begin(dialable=False)
            assert len(newcomer.sees()) >= DIALABLE + UNDIALABLE
            nursery.cancel_scope.cancel()
        assert asked.total() == UNDIALABLE
        assert len(+asked) <= 1 + HELPERS
        if busy:
            assert asked[founder.peer_id] == FIRST - DIALABLE

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
