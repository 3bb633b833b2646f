"""Peer history: how long a client has seen each peer alive, how often it was lost, and how far away it is. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from molink.routing.cost.reliability import UNSEEN, PeerObservation

REMEMBERED_LOST = 1000
"""Peers that are remembered although they are gone, because they were lost: the latest."""


@dataclass(slots=True)
class _Seen:
    observed: PeerObservation
    last_s: float | None
    """When it was last seen alive, in seconds; None if it was gone in the last call of `record_alive`."""


class PeerHistory:
    """Peer history of one client. Times are seconds of one clock of the caller's."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def record_alive(self, alive: Iterable[str], now_s: float) -> None:
        """Records which peers are alive now.

        The uptime of a peer that was alive in the last call too grows by the time since then.
        """
        present = set(alive)
        for peer_id in present:
            seen = self._seen.setdefault(peer_id, _Seen(UNSEEN, now_s))
            if seen.last_s is not None:
                before = seen.observed
                uptime_s = before.uptime_s + max(0.0, now_s - seen.last_s)
                seen.observed = PeerObservation(
                    uptime_s, before.losses, before.client_rtt_ms, before.uplink_mbps
                )
            seen.last_s = now_s
        gone = [peer_id for peer_id in self._seen if peer_id not in present]
        remembered = [peer_id for peer_id in gone if self._seen[peer_id].observed.losses][-REMEMBERED_LOST:]
        for peer_id in gone:
            self._seen[peer_id].last_s = None
        for peer_id in set(gone) - set(remembered):
            del self._seen[peer_id]

    def record_loss(self, peer_id: str) -> None:
        """Records a loss: the peer did not do what its circuit needed, or could not be reached."""
        seen = self._seen.pop(peer_id, None) or _Seen(UNSEEN, None)
        seen.observed = replace(seen.observed, losses=seen.observed.losses + 1)
        self._seen[peer_id] = seen

    def observations_of(
        self, peer_ids: Iterable[str], rtt_ms: Callable[[str], float | None]
    ) -> Mapping[str, PeerObservation]:
        """Returns what is known of each of the peers; `rtt_ms` gives the round trip to a peer, if it was measured."""
        found: dict[str, PeerObservation] = {}
        for peer_id in peer_ids:
            seen = self._seen.get(peer_id)
            observed = UNSEEN if seen is None else seen.observed
            measured_ms = rtt_ms(peer_id)
            if measured_ms is not None:
                observed = replace(observed, client_rtt_ms=measured_ms)
            found[peer_id] = observed
        return found
