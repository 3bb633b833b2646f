"""What a client has seen of peers: how long they were there, how often they were lost, how far away they are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from molink.routing.cost.reliability import UNSEEN, Observed

REMEMBERED_LOST = 1000
"""Peers that are remembered although they are gone, because they were lost: the latest."""


@dataclass(slots=True)
class _Seen:
    observed: Observed
    last_s: float | None
    """When it was last seen alive; None if it was gone at the last look."""


class Observations:
    """Grows with every look at the swarm. Times are those of one clock of the caller's."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def look(self, alive: Iterable[str], now_s: float) -> None:
        """These peers are alive now: those that were at the last look too have been in between."""
        present = set(alive)
        for peer_id in present:
            seen = self._seen.setdefault(peer_id, _Seen(UNSEEN, now_s))
            if seen.last_s is not None:
                before = seen.observed
                uptime_s = before.uptime_s + max(0.0, now_s - seen.last_s)
                seen.observed = Observed(uptime_s, before.losses, before.client_rtt_ms, before.uplink_mbps)
            seen.last_s = now_s
        gone = [peer_id for peer_id in self._seen if peer_id not in present]
        remembered = [peer_id for peer_id in gone if self._seen[peer_id].observed.losses][-REMEMBERED_LOST:]
        for peer_id in gone:
            self._seen[peer_id].last_s = None
        for peer_id in set(gone) - set(remembered):
            del self._seen[peer_id]

    def lost(self, peer_id: str) -> None:
        """The peer did not do what its circuit needed, or could not be reached."""
        seen = self._seen.pop(peer_id, None) or _Seen(UNSEEN, None)
        seen.observed = replace(seen.observed, losses=seen.observed.losses + 1)
        self._seen[peer_id] = seen

    def of(self, peer_ids: Iterable[str], rtt_ms: Callable[[str], float | None]) -> Mapping[str, Observed]:
        """What is known of each of the peers; `rtt_ms` gives the round trip to a peer, if it was measured."""
        found: dict[str, Observed] = {}
        for peer_id in peer_ids:
            seen = self._seen.get(peer_id)
            observed = UNSEEN if seen is None else seen.observed
            measured_ms = rtt_ms(peer_id)
            if measured_ms is not None:
                observed = replace(observed, client_rtt_ms=measured_ms)
            found[peer_id] = observed
        return found
