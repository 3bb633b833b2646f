"""What relays carry for simulated sessions: links that are open over each, and bytes."""

from dataclasses import dataclass, field

from molink.routing.latency.relayed_links import RelayOffer
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.population.reach import SwarmReach
from molink.simnet.swarm.sessions.generation import SimulatedGeneration


@dataclass(slots=True)
class RelayLoad:
    """One relay's load."""

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    """Pairs of peers that it joins now, each with the sessions that use the link."""
    most_pairs: int = 0
    pair_s: float = 0.0
    """Pairs times seconds, until `counted_s`."""
    counted_s: float = 0.0
    carried_bytes: float = 0.0

    def count(self, now_s: float) -> None:
        """Up to now, before the pairs change."""
        self.pair_s += len(self.pairs) * (now_s - self.counted_s)
        self.counted_s = now_s


@dataclass(frozen=True, slots=True)
class _Opened:
    """A circuit in use: its relayed hops as (relay, sender, receiver, bytes of a token), and where it began."""

    hops: tuple[tuple[str, str, str, int], ...]
    tokens: int
    lacking: int


class Relaying:
    """The owner of all relays' loads. A link keeps the share of its relay that it had when its circuit was planned."""

    def __init__(self, reach: SwarmReach, model: ModelSpec) -> None:
        self.reach = reach
        self.loads: dict[str, RelayLoad] = {}
        self.links = 0
        """Between hops of circuits that were computed on; the next is those of them that went over relays."""
        self.relayed_links = 0
        self._model = model
        self._open: dict[int, _Opened] = {}

    def offer(self, sender: str, receiver: str) -> RelayOffer | None:
        """What a link has of its relay; None: it needs none."""
        relay = self.reach.relay_between(sender, receiver)
        if relay is None:
            return None
        load = self.loads.get(relay)
        return self.reach.offer(
            relay, 0 if load is None else len(load.pairs.keys() - {_pair(sender, receiver)})
        )

    def begin(self, one: SimulatedGeneration, lacking: int, now_s: float) -> None:
        """A session computes on its circuit, first so many tokens of its history."""
        self.end(one, now_s)
        if len(one.hops) == 1:
            return
        found = []
        for at, hop in enumerate(one.hops):
            receiver = one.hops[(at + 1) % len(one.hops)].peer_id
            self.links += 1
            relay = self.reach.relay_between(hop.peer_id, receiver)
            if relay is None:
                continue
            self.relayed_links += 1
            size_bytes = (
                self._model.activation_bytes if at + 1 < len(one.hops) else 0
            )  # the tail sends a token
            found.append((relay, hop.peer_id, receiver, size_bytes))
            load = self.loads.setdefault(relay, RelayLoad(counted_s=now_s))
            load.count(now_s)
            pair = _pair(hop.peer_id, receiver)
            load.pairs[pair] = load.pairs.get(pair, 0) + 1
            load.most_pairs = max(load.most_pairs, len(load.pairs))
        self._open[one.number] = _Opened(tuple(found), int(one.progress.tokens), lacking)

    def end(self, one: SimulatedGeneration, now_s: float) -> None:
        """A session has left its circuit. No error if it is on none."""
        opened = self._open.pop(one.number, None)
        if opened is None:
            return
        tokens = opened.lacking + int(one.progress.tokens) - opened.tokens
        for relay, sender, receiver, size_bytes in opened.hops:
            load, pair = self.loads[relay], _pair(sender, receiver)
            load.count(now_s)
            load.carried_bytes += tokens * size_bytes
            load.pairs[pair] -= 1
            if not load.pairs[pair]:
                del load.pairs[pair]


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
