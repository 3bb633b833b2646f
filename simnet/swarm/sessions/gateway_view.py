"""What a simulated gateway knows of the swarm: the records that it has copied, and what it has seen of peers itself."""

import math
from collections.abc import Callable, Collection, Iterable

from molink.client.circuit.peer_history import InFlightLoad, PeerHistory, SessionKey
from molink.dht.membership.timing import DiscoveryTiming, anti_entropy_interval_s
from molink.dht.records.records import PeerView
from molink.routing import Snapshot
from molink.routing.latency.relayed_links import RelayOffer, relay_offers
from molink.routing.routes.shortlist import REDRAW_S
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.members.bulletin import Notice

_TIMING = DiscoveryTiming()


class GatewayView:
    """Owner of a gateway's copy of the peers' table, as of the moment at which it was looked at last."""

    def __init__(
        self,
        model: ModelSpec,
        pull: Callable[[float], dict[str, Notice]],
        rtt_ms: Callable[[str], float],
    ) -> None:
        self.now_s = 0.0
        """The moment for which it chooses."""
        self.linked: set[str] = set()
        """Peers to which it has a link, and so knows the round trip."""
        self.history = PeerHistory()
        self.own = InFlightLoad()
        self._model = model
        self._pull = pull
        self._rtt_ms = rtt_ms
        self._notices: dict[str, Notice] = {}
        self._relays: dict[str, RelayOffer] = {}
        self._pulled_s = -math.inf
        self._pull_due_s = 0.0
        self._recorded_s = -math.inf

    @property
    def count(self) -> int:
        """Peers that it knows."""
        return len(self._notices)

    def snapshot(
        self, peer_ids: Collection[str] | None = None, leaving: SessionKey | None = None
    ) -> Snapshot:
        """What it knows of these peers at the moment for which it chooses, or of all, its own sessions included but for
        the one that is `leaving`."""
        views = self.views(self._notices if peer_ids is None else sorted(peer_ids), leaving)
        seen = self.history.observations_of([view.peer_id for view in views], self._known_rtt_ms)
        return Snapshot(views, self._model, observed=seen, relays=self._relays)

    def refresh(self, now_s: float) -> None:
        """Copies the peers' table."""
        self._notices = self._pull(self._pulled_s)
        self._relays = relay_offers(notice.view(now_s) for notice in self._notices.values())
        self._pulled_s = now_s
        self._pull_due_s = now_s + anti_entropy_interval_s(len(self._notices), _TIMING.refresh_interval_s)

    def look(self, now_s: float) -> None:
        """What is asked for from now on is as of this moment, from a table that is new enough."""
        if now_s >= self._pull_due_s:
            self.refresh(now_s)
        self.now_s = now_s

    def record_alive(self) -> None:
        """Now and then: who is there."""
        now_s = self.now_s
        if now_s >= self._recorded_s + REDRAW_S:
            self._recorded_s = now_s
            living = (one for one, notice in self._notices.items() if notice.expires_s > now_s)
            self.history.record_alive(living, now_s)

    def views(self, peer_ids: Iterable[str], leaving: SessionKey | None = None) -> tuple[PeerView, ...]:
        """What is known of these peers, the gateway's own sessions on them included, as `snapshot` says."""
        now_s = self.now_s
        notices = map(self._notices.get, peer_ids)
        views = [notice.view(now_s) for notice in notices if notice is not None and notice.expires_s > now_s]
        return self.own.add_to_views(views, now_s, leaving)

    def _known_rtt_ms(self, peer_id: str) -> float | None:
        return self._rtt_ms(peer_id) if peer_id in self.linked else None
