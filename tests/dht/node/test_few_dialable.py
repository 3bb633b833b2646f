"""Swarms of which few can be dialled, in virtual time: all see all, and whom all the others dial is not overrun."""

import functools
import random
from dataclasses import dataclass, replace
from statistics import mean

import pytest
import trio
import trio.testing
from support.swarms.swarm_examples import state_of
from support.swarms.virtual_swarm import VirtualPeer, VirtualSwarm, at_once

from molink.dht.node import network
from molink.dht.records import announcement
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S

SEEN_S = 60.0
"""Within which all see a newcomer."""
CHANGES_S = 30.0
"""Between a peer's changes of state, on average."""
CRASHES = 0.2
"""The part of those that go without a word."""
LOOK_S = 10.0
AVERAGED_MINUTES = 10
MINUTE_KBIT_S = 2 * BUDGET_KBIT_S
"""In a single minute: newcomers do not come evenly, and where one of few goes, its links all begin anew: up to 56 were
seen."""
GONE_S = 150.0
"""Within which nobody shows any more who has crashed: the accusations, and a minute to refute them."""


@dataclass(frozen=True)
class Life:
    """How a swarm lives. The dialable ones stay, but for one that crashes halfway and another that comes then."""

    dialable: int
    undialable: int
    stay_s: float
    """Of those that nobody can dial, on average; as many come as go."""
    lasting_s: float


class Watch:
    """Runs a swarm's life, and looks at it."""

    def __init__(self, life: Life, swarm: VirtualSwarm) -> None:
        self._life = life
        self._swarm = swarm
        self._chance = random.Random(1)
        self._gone: dict[str, float] = {}
        """Who went, or has begun to say so, and when."""
        self.looks = 0

    async def run(self) -> None:
        life = self._life
        async with trio.open_nursery() as nursery:
            hubs = [await self._begin(nursery, dialable=True) for _ in range(life.dialable)]
            for _ in range(life.undialable):
                nursery.start_soon(self._one_after_another, nursery)
                await trio.sleep(1.0)
            await trio.sleep(SEEN_S)
            began_s = trio.current_time()
            replaced = False
            while trio.current_time() < began_s + life.lasting_s:
                await trio.sleep(LOOK_S)
                self._look()
                if not replaced and trio.current_time() > began_s + life.lasting_s / 2:
                    replaced = True
                    await self._end(hubs[0], told=False)
                    await self._begin(nursery, dialable=True)
            self._look_at_traffic(int(began_s // 60) + 1, int(trio.current_time() // 60))
            nursery.cancel_scope.cancel()

    async def _begin(self, nursery: trio.Nursery, *, dialable: bool) -> VirtualPeer:
        peer: VirtualPeer = await nursery.start(functools.partial(self._swarm.live, dialable=dialable))
        nursery.start_soon(self._change, peer)
        return peer

    async def _one_after_another(self, nursery: trio.Nursery) -> None:
        while True:
            peer = await self._begin(nursery, dialable=False)
            await trio.sleep(self._chance.expovariate(1 / self._life.stay_s))
            await self._end(peer, told=self._chance.random() > CRASHES)
            await trio.sleep(self._chance.uniform(0.0, 5.0))

    async def _end(self, peer: VirtualPeer, *, told: bool) -> None:
        self._gone[peer.peer_id] = trio.current_time()
        if told:
            await peer.leave()
        peer.scope.cancel()

    async def _change(self, peer: VirtualPeer) -> None:
        while not peer.scope.cancel_called:
            peer.announce(replace(state_of(peer.identity), sessions=self._chance.randrange(8)))
            await trio.sleep(self._chance.expovariate(1 / CHANGES_S))

    def _look(self) -> None:
        now_s, living = trio.current_time(), self._swarm.peers
        known = {one.peer_id for one in living.values() if now_s - one.since_s > SEEN_S} - self._gone.keys()
        dead = {peer_id for peer_id, gone_s in self._gone.items() if now_s - gone_s > GONE_S}
        for peer_id in known:
            seen = living[peer_id].sees()
            assert not known - seen, f"{peer_id} does not see {len(known - seen)} at {now_s:.0f} s"
            assert not dead & seen, f"{peer_id} shows {len(dead & seen)} who are gone at {now_s:.0f} s"
        self.looks += len(known)

    def _look_at_traffic(self, first: int, last: int) -> None:
        for peer_id in self._swarm.minutes:
            sent = [self._swarm.kbit_s(peer_id, minute) for minute in range(first, last)]
            assert max(sent) <= MINUTE_KBIT_S, f"{peer_id} sends {max(sent):.1f} kbit/s"
            for begin in range(max(1, len(sent) - AVERAGED_MINUTES + 1)):
                ten = mean(sent[begin : begin + AVERAGED_MINUTES])
                assert ten <= BUDGET_KBIT_S, f"{peer_id} sends {ten:.1f} kbit/s"


@pytest.mark.full
@pytest.mark.parametrize(
    "life",
    [
        Life(2, 16, 240.0, 140.0),
        pytest.param(Life(3, 60, 1800.0, 3600.0), marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
        pytest.param(Life(5, 95, 1800.0, 1200.0), marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
    ids=["few", "3 and 60 for an hour", "one in twenty"],
)
def test_all_see_all_who_came_more_than_a_minute_ago_and_nobody_sends_more_than_the_budget_on_average(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = VirtualSwarm()
    monkeypatch.setattr(network, "open_host", swarm.opens)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    # all peers are of this process: what one has verified is not verified again
    monkeypatch.setattr(announcement, "verify", functools.lru_cache(maxsize=100_000)(announcement.verify))
    random.seed(1)
    watch = Watch(life, swarm)
    trio.run(watch.run, clock=trio.testing.MockClock(autojump_threshold=0))
    assert watch.looks > life.dialable * life.lasting_s / LOOK_S
