"""Round trips to neighbours: links to some of the model's peers, whose own pings measure them."""

import asyncio
import random
from collections.abc import Callable

from molink.dht.records import LinkMeasurement, PeerView
from molink.peer.link import LinkError
from molink.peer.links import Links

NEIGHBOURS = 16
PROBE_EVERY_S = 20.0
FIRST_RTT_S = 3.0
CHANGED_BY = 0.25
"""A round trip that differs by more than this part of it is worth announcing anew."""
NOISE_MS = 1.0
"""Differences below this are not."""


class Prober:
    """Keeps links to up to NEIGHBOURS peers of the same model, and knows their round trips."""

    def __init__(self, peer_id: str, links: Links, peers: Callable[[], tuple[PeerView, ...]]) -> None:
        self._peer_id = peer_id
        self._links = links
        self._peers = peers
        self._announced: dict[str, float] = {}
        self._measured: dict[str, float] = {}

    def measurements(self) -> tuple[LinkMeasurement, ...]:
        """The round trips to announce, as last found worth announcing."""
        return tuple(LinkMeasurement(peer_id, rtt_ms) for peer_id, rtt_ms in sorted(self._announced.items()))

    async def probe(self) -> bool:
        """Measures the present neighbours; True if what is announced should change."""
        others = [
            view for view in self._peers() if view.peer_id != self._peer_id and view.facts.grpc_addresses
        ]
        linked = [view for view in others if self._links.find(view.peer_id) is not None]
        fresh = [view for view in others if view not in linked]
        chosen = linked[:NEIGHBOURS] + random.sample(fresh, min(len(fresh), max(0, NEIGHBOURS - len(linked))))
        rtts = await asyncio.gather(*(self._measure(view) for view in chosen))
        self._measured = {
            view.peer_id: rtt_ms for view, rtt_ms in zip(chosen, rtts, strict=True) if rtt_ms is not None
        }
        if self._measured.keys() == self._announced.keys() and not any(
            abs(rtt_ms - self._announced[peer_id]) > NOISE_MS + CHANGED_BY * self._announced[peer_id]
            for peer_id, rtt_ms in self._measured.items()
        ):
            return False
        self._announced = dict(self._measured)
        return True

    async def _measure(self, view: PeerView) -> float | None:
        try:
            link = await self._links.to(view.facts)
            async with asyncio.timeout(FIRST_RTT_S):
                return await link.measured()
        except (LinkError, TimeoutError):
            return None
