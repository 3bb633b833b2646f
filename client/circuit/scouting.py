"""Reachability probes: who is there is found out by asking, many peers at once, or the hops of one circuit.

Whoever announces an address need not answer there, and identities cost nothing. So once a circuit could not be formed
because a peer did not answer, many others are tried side by side, each address once, and circuits are looked for among
those that have answered before the rest of the swarm is believed.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from molink.client.epochs.patience import SignOfLife, answers_until_s
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

MOST_AT_ONCE = 64
DIAL_S = 5.0
ANSWER_S = 2.0
MOST_REMEMBERED = 1024
"""Peers that have answered before: the latest."""


class LinkLookup(Protocol):
    """Lookup of links to peers, as `Links` has them."""

    async def to(self, facts: PeerFacts) -> Link: ...

    def find(self, peer_id: str) -> Link | None: ...


class ReachabilityProbes:
    """Reachability probes of one client, and who has answered it. Open between `__aenter__` and `__aexit__`."""

    def __init__(self, links: LinkLookup) -> None:
        self._links = links
        self._answered: dict[str, None] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def record_answer(self, peer_id: str) -> None:
        """Records that a peer has answered a request: it is reachable."""
        self._answered.pop(peer_id, None)
        self._answered[peer_id] = None
        while len(self._answered) > MOST_REMEMBERED:
            del self._answered[next(iter(self._answered))]

    def record_loss(self, peer_id: str) -> None:
        """Records that a peer answers no more."""
        self._answered.pop(peer_id, None)

    def reachable(self, peer_ids: Iterable[str]) -> frozenset[str]:
        """Returns those of the peers that have answered."""
        return frozenset(peer_id for peer_id in peer_ids if peer_id in self._answered)

    def probe_peers(self, views: Sequence[PeerView], unreachable: Callable[[PeerFacts], None]) -> None:
        """Dials as many of these peers as may be dialled at once, in their order, of those that claim the same
        addresses one. `unreachable` is called with each that is not there."""
        claimed: set[tuple[str, ...]] = set()
        for view in views:
            addresses = tuple(sorted(view.facts.grpc_addresses)) or (view.peer_id,)
            if len(self._under_way) >= MOST_AT_ONCE:
                return
            if view.peer_id in self._under_way or view.peer_id in self._answered or addresses in claimed:
                continue
            claimed.add(addresses)
            task = asyncio.create_task(self._try(view.facts, unreachable), name=f"try {view.peer_id}")
            self._under_way[view.peer_id] = task

    @property
    def under_way(self) -> int:
        """Number of peers that are being tried."""
        return len(self._under_way)

    async def wait_any(self, timeout_s: float) -> None:
        """Waits until one more has answered or failed, `timeout_s` at most; not at all if no probe is under way."""
        if self._under_way:
            await asyncio.wait(
                tuple(self._under_way.values()), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )

    async def _try(self, facts: PeerFacts, unreachable: Callable[[PeerFacts], None]) -> None:
        nothing = pb.AwaitReady(session=secrets.token_bytes(16), epoch=1, wait_ms=0)
        try:
            async with asyncio.timeout(DIAL_S):
                link = await self._links.to(facts)
            await link.request(pb.Request(await_ready=nothing), ANSWER_S)  # a refusal is an answer too
        except (LinkError, TimeoutError):
            unreachable(facts)
        else:
            self.record_answer(facts.peer_id)
        finally:
            self._under_way.pop(facts.peer_id, None)


async def ask_signs_of_life(links: Sequence[Link], session: bytes, epoch: int) -> list[SignOfLife]:
    """Returns what a circuit's hops answer when they are asked for the session's lease, in order; those that are late
    without an answer."""
    clock = asyncio.get_running_loop().time
    since_s = clock()
    signs = {link.peer_id: SignOfLife(link.peer_id, None) for link in links}
    pending = {asyncio.create_task(_sign_of_life(link, session, epoch)) for link in links}
    try:
        while pending:
            left_s = since_s + answers_until_s(list(signs.values()), ANSWER_S) - clock()
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            signs |= {task.result().peer_id: task.result() for task in done}
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return list(signs.values())


async def _sign_of_life(link: Link, session: bytes, epoch: int) -> SignOfLife:
    clock = asyncio.get_running_loop().time
    since_s = clock()
    asked = pb.AwaitReady(session=session, epoch=epoch, wait_ms=0)
    try:
        response, _ = await link.request(pb.Request(await_ready=asked), ANSWER_S)
    except LinkError:
        return SignOfLife(link.peer_id, None)
    if response.WhichOneof("body") != "readiness":
        return SignOfLife(link.peer_id, None)
    return sign_of_life(link.peer_id, clock() - since_s, response.readiness)


def sign_of_life(peer_id: str, after_s: float, readiness: pb.Readiness) -> SignOfLife:
    """What a hop says of its engine with that answer, which came after so long."""
    computing_s, expected_s = readiness.computing_ms / 1000, readiness.expected_ms / 1000
    return SignOfLife(peer_id, after_s, computing_s, expected_s, readiness.waits)
