"""The verified announcements of one model's peers, and the circuit problem that they pose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from molink.dht.records import PROTOCOL_VERSION, PeerView
from molink.routing.arrays import BoolArray
from molink.routing.cost import CostModel, layer_ms_at, one_way_ms
from molink.routing.problem import CircuitProblem
from molink.shards.spec import ModelSpec, Span


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a router knows at one moment. Peers must be verified: nothing is checked here but plausibility."""

    peers: tuple[PeerView, ...]
    model: ModelSpec
    measured_rtt_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The router's own measurements between two peers (from, to), in milliseconds; they go before announced
    ones."""

    def usable(self, avoid: frozenset[str] = frozenset()) -> tuple[PeerView, ...]:
        """The peers that may join a new circuit, in order of peer id.

        Left out: peers to avoid, peers that drain or leave, of another protocol version or of another model,
        and peers whose measurements make no sense.
        """
        chosen = {
            view.peer_id: view
            for view in self.peers
            if view.peer_id not in avoid
            and view.facts.model.model_hash == self.model.model_hash
            and _available(view)
        }
        return tuple(chosen[peer_id] for peer_id in sorted(chosen))

    def problem(
        self,
        tokens: int,
        *,
        avoid: frozenset[str] = frozenset(),
        warm_only: bool = False,
        cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
    ) -> tuple[CircuitProblem, tuple[str, ...]]:
        """The problem of a circuit for one session of `tokens` tokens, prompt and generation, and whose each
        machine is.

        A layer's time is the announced one at the batch size that this session would make of those that the
        peer has. With `warm_only` no layer needs loading. Raises ValueError if `tokens` is below 1.
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        views = self.usable(avoid)
        peer_ids = tuple(view.peer_id for view in views)
        resident = _table(self.model.layers, [view.state.spans for view in views])
        load_ms = np.zeros((len(views), self.model.layers))
        for row, view in enumerate(views):
            if view.facts.load_bytes_per_s > 0:
                load_ms[row] = np.array(self.model.layer_bytes) * 1000.0 / view.facts.load_bytes_per_s
        problem = CircuitProblem(
            layer_ms=np.array([layer_ms_at(view.facts.layer_latencies, _batch_size(view)) for view in views]),
            latency_ms=one_way_ms(peer_ids, self._rtt_ms(views), cost),
            free_bytes=np.array(
                [0 if warm_only else _loadable_bytes(view) for view in views], dtype=np.int64
            ),
            layer_bytes=np.array(self.model.layer_bytes, dtype=np.int64),
            embed_ms=np.array([view.facts.embed_ms for view in views], dtype=np.float64),
            head_ms=np.array([view.facts.head_ms for view in views], dtype=np.float64),
            resident=resident,
            allowed=resident if warm_only else resident | self._willing(views),
            embed_bytes=self.model.embed_bytes,
            head_bytes=self.model.head_bytes,
            embed_resident=resident[:, 0],
            head_resident=resident[:, -1],
            kv_bytes=tokens * np.array(self.model.kv_bytes_per_token, dtype=np.int64),
            free_kv_bytes=np.array([max(0, view.state.free_kv_bytes) for view in views], dtype=np.int64),
            load_ms=load_ms + cost.load_layer_overhead_ms,
            load_weight=1.0 / cost.load_amortisation_tokens,
        )
        return problem, peer_ids

    def _willing(self, views: Sequence[PeerView]) -> BoolArray:
        whole = self.model.whole
        return _table(self.model.layers, [(view.facts.span_limit or whole,) for view in views])

    def _rtt_ms(self, views: Sequence[PeerView]) -> dict[tuple[str, str], float]:
        announced = {(view.peer_id, link.peer_id): link.rtt_ms for view in views for link in view.facts.links}
        return {**announced, **self.measured_rtt_ms}


def _available(view: PeerView) -> bool:
    facts, state = view.facts, view.state
    if state.draining or state.ttl_s == 0 or facts.ttl_s == 0 or facts.protocol_version != PROTOCOL_VERSION:
        return False
    times = [
        facts.embed_ms,
        facts.head_ms,
        facts.load_bytes_per_s,
        *(each.layer_ms for each in facts.layer_latencies),
    ]
    return len(facts.layer_latencies) > 0 and all(math.isfinite(time) and time >= 0 for time in times)


def _batch_size(view: PeerView) -> int:
    """Sessions that would step together on the peer, the new one included."""
    return max(view.state.sessions, view.state.queued, 0) + 1


def _loadable_bytes(view: PeerView) -> int:
    return max(0, view.state.free_weight_bytes) if view.facts.load_bytes_per_s > 0 else 0


def _table(layers: int, spans: Sequence[Sequence[Span]]) -> BoolArray:
    """[peers, layers]: whether a layer is in one of the peer's spans."""
    table = np.zeros((len(spans), layers), dtype=np.bool_)
    for row, held in enumerate(spans):
        for span in held:
            table[row, span.start : span.stop] = True
    return table
