"""What a run says of relays: one row of figures. JSON-ready."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from molink.simnet.presentation.tables import Column, Table

if TYPE_CHECKING:
    from molink.simnet.swarm.world import SwarmWorld


@dataclass(frozen=True, slots=True)
class RelayRow:
    """One run's relays. Means and percentiles are over the relays that carried anything, over the whole run."""

    name: str
    dialable: int
    """Volunteers, all that ever came."""
    undialable: int
    symmetric: int
    """Of those that cannot be dialled, the ones that punch no holes."""
    links: int
    """Between the hops of circuits that were computed on."""
    relayed_links: int
    relays_used: int
    links_mean: float
    links_p95: float
    links_most: int
    """At one moment over one relay."""
    mbps_mean: float
    mbps_p95: float
    mbps_most: float
    offered_mbps_mean: float


def relay_row(world: "SwarmWorld", name: str) -> RelayRow | None:
    """Of a run that has ended; None: everybody could be dialled."""
    relaying = world.relaying
    if relaying is None:
        return None
    lasted_s = max(1.0, world.timeline.now_s)
    used = relaying.loads
    links = [load.pair_s / lasted_s for load in used.values()] or [0.0]
    mbps = [load.carried_bytes * 8e-6 / lasted_s for load in used.values()] or [0.0]
    offered = [relaying.reach.relays_with_mbps(peer_id) for peer_id in used] or [0.0]
    return RelayRow(
        name=name,
        dialable=relaying.reach.dialable,
        undialable=relaying.reach.undialable,
        symmetric=relaying.reach.symmetric,
        links=relaying.links,
        relayed_links=relaying.relayed_links,
        relays_used=len(used),
        links_mean=float(np.mean(links)),
        links_p95=float(np.percentile(links, 95)),
        links_most=max((load.most_pairs for load in used.values()), default=0),
        mbps_mean=float(np.mean(mbps)),
        mbps_p95=float(np.percentile(mbps, 95)),
        mbps_most=max(mbps),
        offered_mbps_mean=float(np.mean(offered)),
    )


def relay_table(rows: Sequence[RelayRow]) -> Table:
    """For people: a line for each figure, a column for each run."""
    return Table("Relays", _LINES, rows, on_its_side="name")


_LINES = (
    Column("volunteers that can be dialled", "dialable", form=","),
    Column("that cannot", "undialable", form=","),
    Column("of these behind symmetric NATs", "symmetric", form=",", ends=True),
    Column("links of circuits", "links", form=","),
    Column("over relays", lambda row: f"{row.relayed_links:,} ({row.relayed_links / max(1, row.links):.1%})"),
    Column("relays that carried any", "relays_used", form=",", ends=True),
    Column(
        "links over one mean, 95 %, most at once",
        lambda row: f"{row.links_mean:.2f}, {row.links_p95:.2f}, {row.links_most}",
    ),
    Column(
        "carried by one mean, 95 %, most",
        lambda row: f"{row.mbps_mean:.3f}, {row.mbps_p95:.3f}, {row.mbps_most:.3f}",
        "Mbps",
    ),
    Column("offered by one", "offered_mbps_mean", "Mbps", ".1f"),
)
