"""Round trips to neighbours: links to some of the model's peers, whose own pings measure them, and where that puts
this peer among them."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from molink.dht.records.records import COORDINATE_DIMENSIONS, Coordinate, LinkMeasurement, PeerView
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.link.links import Links
from molink.routing.latency.coordinates import MAX_RTT_MS, START, moved_ms, placed

NEIGHBOURS = 16
PROBE_EVERY_S = 20.0
FIRST_RTT_S = 3.0
CHANGED_BY = 0.25
"""A round trip that differs by more than this part of it is worth announcing anew, and so is a coordinate that has
moved by more than this part of the usual round trip."""
NOISE_MS = 1.0
"""Differences below this are not."""
PASSES = 3
"""Times that one probe's round trips move the coordinate: they come seldom, and each announcement that says little new
costs the whole swarm."""
SURER = 2.0
"""A coordinate whose error has changed by this factor is worth announcing too: routers go by it."""


class Prober:
    """Keeps links to up to NEIGHBOURS peers of the same model, knows their round trips and its own coordinate."""

    def __init__(self, peer_id: str, links: Links, peers: Callable[[], tuple[PeerView, ...]]) -> None:
        self.coordinate = START
        """The coordinate to announce, as last found worth announcing."""
        self._peer_id = peer_id
        self._links = links
        self._peers = peers
        self._announced: dict[str, float] = {}
        self._current = START

    def measurements(self) -> tuple[LinkMeasurement, ...]:
        """The round trips to announce, as last found worth announcing."""
        return tuple(LinkMeasurement(peer_id, rtt_ms) for peer_id, rtt_ms in sorted(self._announced.items()))

    async def probe(self) -> bool:
        """Measures the present neighbours; True if what is announced should change."""
        views = self._peers()
        dialable = [view for view in views if view.facts.grpc_addresses and view.peer_id != self._peer_id]
        linked = [view for view in dialable if self._links.find(view.peer_id) is not None]
        fresh = [view for view in dialable if view not in linked]
        if any(view.peer_id == self._peer_id and not view.facts.grpc_addresses for view in views):
            # of two that nobody can dial, where a link stands anyway: a probe alone would cost a relay or a hole
            hidden = (
                view for view in views if not view.facts.grpc_addresses and view.peer_id != self._peer_id
            )
            linked += [view for view in hidden if self._links.find(view.peer_id) is not None]
        chosen = linked[:NEIGHBOURS] + random.sample(fresh, min(len(fresh), max(0, NEIGHBOURS - len(linked))))
        rtts = await asyncio.gather(*(self._measure(view) for view in chosen))
        found = [(view, rtt_ms) for view, rtt_ms in zip(chosen, rtts, strict=True) if rtt_ms is not None]
        measured = {view.peer_id: rtt_ms for view, rtt_ms in found}
        coordinate = self._place(found)
        if not (self._links_changed(measured) or self._has_moved(coordinate, measured)):
            return False
        self._announced = measured
        self.coordinate = coordinate
        return True

    def _place(self, found: list[tuple[PeerView, float]]) -> Coordinate:
        """Moves this peer by what was measured, and returns the coordinate that it can vouch for.

        Of few neighbours many points are equally far: however well such a point fits them, it says nothing of others.
        """
        samples = {
            view.peer_id: (view.facts.coordinate, rtt_ms)
            for view, rtt_ms in found
            if view.facts.coordinate is not None and 0 < rtt_ms <= MAX_RTT_MS
        }
        self._current = placed(self._peer_id, self._current, samples, PASSES)
        if len(samples) > COORDINATE_DIMENSIONS:
            return self._current
        return replace(self._current, error=max(self._current.error, START.error))

    def _links_changed(self, measured: dict[str, float]) -> bool:
        return measured.keys() != self._announced.keys() or any(
            abs(rtt_ms - self._announced[peer_id]) > NOISE_MS + CHANGED_BY * self._announced[peer_id]
            for peer_id, rtt_ms in measured.items()
        )

    def _has_moved(self, coordinate: Coordinate, measured: dict[str, float]) -> bool:
        usual_ms = median(measured.values()) if measured else 0.0
        if moved_ms(self.coordinate, coordinate) > NOISE_MS + CHANGED_BY * usual_ms:
            return True
        return not 1 / SURER <= coordinate.error / self.coordinate.error <= SURER

    async def _measure(self, view: PeerView) -> float | None:
        try:
            link = await self._links.to(view.facts)
            async with asyncio.timeout(FIRST_RTT_S):
                rtt_ms = await link.measured()
        except (LinkError, TimeoutError):
            return None
        return None if self._links.is_relayed(link) else rtt_ms  # a relay's detour is not where this peer is
