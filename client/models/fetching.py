"""Artifact download from peers: several in turn and side by side, each with a deadline, checked by its hash.

Who hands out a file may drip it, or never begin. So a peer that brings less than LEAST_BYTES_PER_S is cut, and if after
HEDGE_S nobody brings enough, the next one is asked beside it. The first whole file that is what was asked for counts.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from molink.client.circuit.reserving import LinkSource
from molink.client.errors import as_said
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

HEDGE_S = 2.5
MOST_AT_ONCE = 6
MOST_ASKED = 24
PART_TIMEOUT_S = 15.0
GRACE_S = 5.0
"""Before the rate counts."""
LEAST_BYTES_PER_S = 64 * 1024.0
MOST_NAMED = 3
"""Peers whose failures an error names."""

Content = TypeVar("Content")


class NotFetched(Exception):
    """Nobody handed it out; the message says why, peer by peer."""


@dataclass(frozen=True, slots=True)
class ArtifactRequest(Generic[Content]):
    """Artifact request: what is to be fetched, and how it is checked."""

    request: Callable[[int], pb.Request]
    """Asks for it from an offset on."""
    most_bytes: int
    opened: Callable[[bytes], Content]
    """Makes of the bytes what is wanted. Raises ValueError if they are something else."""


@dataclass(slots=True)
class FetchProgress:
    """Download progress of one peer. Times are seconds of the loop's clock."""

    since_s: float
    received: int = 0
    at_last_look: int = 0

    def is_too_slow(self, now_s: float) -> bool:
        elapsed_s = now_s - self.since_s
        return elapsed_s > GRACE_S and self.received < LEAST_BYTES_PER_S * elapsed_s

    def goes_well(self) -> bool:
        """Whether enough has come since the last look, HEDGE_S ago."""
        brought, self.at_last_look = self.received - self.at_last_look, self.received
        return brought >= LEAST_BYTES_PER_S * HEDGE_S


async def fetch(
    links: LinkSource, views: Sequence[PeerView], wanted: ArtifactRequest[Content]
) -> tuple[Content, PeerView]:
    """Fetches what is wanted, and says who handed it out: the first of these peers that does so whole; they are asked
    in their order.

    Raises:
        NotFetched: none of them did.
    """
    clock = asyncio.get_running_loop().time
    left = list(reversed(views[:MOST_ASKED]))
    under_way: dict[asyncio.Task[Content], tuple[PeerView, FetchProgress]] = {}
    reasons: list[str] = []
    hedged = True
    try:
        while True:
            if left and len(under_way) < MOST_AT_ONCE and (hedged or not under_way):
                view, progress = left.pop(), FetchProgress(clock())
                task = asyncio.create_task(_from_peer(links, view.facts, wanted, progress))
                under_way[task] = view, progress
            if not under_way:
                raise NotFetched("; ".join(reasons[:MOST_NAMED]) or "nobody has it")
            done, _ = await asyncio.wait(under_way, timeout=HEDGE_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                view, _ = under_way.pop(task)
                error = task.exception()
                if error is None:
                    return task.result(), view
                if not isinstance(error, (LinkError, ValueError)):
                    raise error
                said = error.reason if isinstance(error, LinkError) else str(error)
                reasons.append(f"{view.facts.name}: {as_said(said)}")
            going_well = [progress.goes_well() for _, progress in under_way.values()] if not done else []
            hedged = bool(done) or not any(going_well)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _from_peer(
    links: LinkSource, facts: PeerFacts, wanted: ArtifactRequest[Content], progress: FetchProgress
) -> Content:
    """All of it from one peer, part by part. Raises LinkError and ValueError."""
    clock = asyncio.get_running_loop().time
    link = await links.to(facts)
    content = bytearray()
    while True:
        response, payload = await link.request(wanted.request(len(content)), PART_TIMEOUT_S)
        if response.WhichOneof("body") != "content":
            raise LinkError(facts.peer_id, response.refusal.detail or "it does not hand that out")
        total = response.content.total_bytes
        if total > wanted.most_bytes or len(content) + len(payload) > total:
            raise ValueError(f"it offers {total} bytes, and at most {wanted.most_bytes} are taken")
        content += payload
        progress.received = len(content)
        if len(content) == total:
            return wanted.opened(bytes(content))
        if not payload:
            raise ValueError(f"it ended after {len(content)} of {total} bytes")
        if progress.is_too_slow(clock()):
            raise LinkError(facts.peer_id, "it hands files out too slowly")
