"""However often sessions go over from one peer to another and back, neither process grows."""

import asyncio
import operator
import os
from dataclasses import dataclass, field

import psutil
import pytest
from support.links.data_plane import DEADLINE_S, End
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import ModelSpec

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

WARM_UP, MOVES = 20, 200
GROWTH_BYTES = 8 * 1024**2
"""A session's KV cache takes 3 MB here when it is full."""
PROMPT = tuple(place % 900 + 2 for place in range(60))
CAPACITY_TOKENS = 1000
SESSION_MOVES = 20
TOKENS_BETWEEN = 3


@dataclass
class Mover:
    """A client that has its sessions go to and fro between two peers that hold all layers."""

    spec: ModelSpec
    views: list[PeerView]
    links: list[Link]
    tokens: "asyncio.Queue[pb.Token]" = field(default_factory=asyncio.Queue)

    async def session(self, moves: int) -> int:
        """One session; returns how often it has moved."""
        self.tokens = asyncio.Queue()
        descriptor = pb.SessionDescriptor(
            session=os.urandom(16),
            epoch=1,
            model_hash=self.spec.model_hash,
            sampling=pb.Sampling(max_new_tokens=CAPACITY_TOKENS - len(PROMPT), top_p=1.0),
            prompt_tokens=len(PROMPT),
            capacity_tokens=CAPACITY_TOKENS,
        )
        at = moved = 0
        self._place(descriptor, at)
        ready = await self._ask(at, pb.Reserve(descriptor=descriptor, ready_within_ms=5000))
        assert ready.readiness.ready, ready
        start = pb.Start(session=descriptor.session, epoch=1, token_ids=PROMPT, position=0)
        assert self.links[at].post(start)
        while moved < moves and await self._take(descriptor, TOKENS_BETWEEN):
            await self._move(descriptor, at)
            at, moved = 1 - at, moved + 1
        for epoch in range(max(1, descriptor.epoch - 1), descriptor.epoch + 1):
            for link in self.links:
                released = pb.Release(session=descriptor.session, epoch=epoch)
                await link.request(pb.Request(release=released), DEADLINE_S)
        return moved

    def _place(self, descriptor: pb.SessionDescriptor, at: int, *, standby: bool = False) -> None:
        """The one hop is at that peer; with `standby` the other one keeps its copy."""
        view, other = self.views[at], self.views[1 - at]
        hop = pb.Hop(
            peer_id=view.peer_id,
            start=0,
            stop=self.spec.layers,
            quantization=self.spec.quantization,
            facts=view.facts_record,
            standby_facts=other.facts_record if standby else b"",
        )
        del descriptor.hops[:]
        descriptor.hops.append(hop)

    async def _move(self, descriptor: pb.SessionDescriptor, at: int) -> None:
        """The session goes over to the other peer, which has its first token from there."""
        self._place(descriptor, at, standby=True)
        await self._ask(at, pb.Reserve(descriptor=descriptor))
        await self._ask(1 - at, pb.Reserve(descriptor=descriptor, copy=True))
        await self._ask(at, pb.Reserve(descriptor=descriptor, hand_over=True))
        before = descriptor.epoch
        descriptor.epoch += 1
        self._place(descriptor, 1 - at)
        ready = await self._ask(1 - at, pb.Reserve(descriptor=descriptor, prepare=True, ready_within_ms=5000))
        assert ready.readiness.ready, ready
        peer_id = self.views[1 - at].peer_id
        move = pb.Move(session=descriptor.session, epoch=before, next_epoch=descriptor.epoch, peer_id=peer_id)
        assert self.links[at].post(move)
        assert await self._take(descriptor, 1), "it ended before it had moved"
        released = pb.Release(session=descriptor.session, epoch=before)
        await self.links[at].request(pb.Request(release=released), DEADLINE_S)

    async def _take(self, descriptor: pb.SessionDescriptor, count: int) -> bool:
        """Whether so many more tokens of its epoch have come, and there is room for the next move."""
        last = CAPACITY_TOKENS // 4 * 3
        while count:
            async with asyncio.timeout(DEADLINE_S):
                token = await self.tokens.get()
            count -= token.epoch == descriptor.epoch
        return token.position < last

    async def _ask(self, at: int, asked: pb.Reserve) -> pb.Response:
        response, _ = await self.links[at].request(pb.Request(reserve=asked), DEADLINE_S)
        assert response.WhichOneof("body") != "refusal", response
        return response


def resident_bytes(swarm: LocalSwarm) -> list[int]:
    """Of the peers' processes."""
    return [psutil.Process(peer.process.pid).memory_info().rss for peer in swarm.peers]


@pytest.mark.timeout(400)
async def test_two_hundred_moves_leave_no_memory_behind(anyio_backend: str) -> None:
    async with ForkedSwarm() as swarm:
        for name in "ab":
            await swarm.join(name, "--model", BUNDLED, "--layers", "0:12")
        async with (
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client,
            End(is_client=True) as end,
        ):
            views = list(client.connection.snapshot(client.model.model_hash))
            mover = Mover(client.model, views, [await end.links.to(view.facts) for view in views])

            def note(_: Link, frame: object) -> None:
                header = getattr(frame, "header", None)
                assert not isinstance(header, pb.Failed), header
                for token in header.tokens if isinstance(header, pb.Tokens) else ():
                    mover.tokens.put_nowait(token)

            end.handler.on_frame = note  # type: ignore[method-assign]
            moved = 0
            while moved < WARM_UP:
                moved += await mover.session(SESSION_MOVES)
            now = least = resident_bytes(swarm)
            moved = 0
            while moved < MOVES:
                moved += await mover.session(SESSION_MOVES)
                now = resident_bytes(swarm)
                least = list(map(min, least, now))  # a peer that has started gives some memory back once
            assert max(map(operator.sub, now, least)) < GROWTH_BYTES
