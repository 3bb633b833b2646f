"""Which peers of a large swarm a peer compares itself with when it chooses its layers. Pure."""

from collections.abc import Sequence

import numpy as np

from molink.dht.records.records import Coordinate, PeerView
from molink.routing.latency.coordinates import CoordinateTable

MOST_NEIGHBOURS = 256
"""What a placement is worth is found by searches for circuits, of which each would take minutes and gigabytes among
10,000 peers."""


def neighbours(
    views: Sequence[PeerView], coordinate: Coordinate | None, most: int = MOST_NEIGHBOURS
) -> tuple[PeerView, ...]:
    """Those at most that are nearest by their coordinates, in the order in which they were given; all, if there are
    no more. Where coordinates are not known, peers from everywhere."""
    if len(views) <= most:
        return tuple(views)
    placed = [at for at, view in enumerate(views) if view.facts.coordinate is not None]
    if coordinate is None or len(placed) < most:
        return tuple(views[at * len(views) // most] for at in range(most))
    known = [one for at in placed if (one := views[at].facts.coordinate) is not None]
    table = CoordinateTable.of(known)
    apart = np.linalg.norm(table.positions - np.array(coordinate.position), axis=1) + table.heights_ms
    nearest = np.argsort(apart, kind="stable")[:most]
    return tuple(views[at] for at in sorted(placed[place] for place in nearest.tolist()))
