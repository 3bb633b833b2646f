"""One volunteer's peer: its lease book, what it computes, and what it has to announce."""

from molink.dht.membership.announcing_core import AnnouncingCore
from molink.dht.membership.timing import DiscoveryTiming
from molink.dht.records.records import PeerState, PeerView
from molink.peer.announcing.placement_core import Claim, PlacementCore, claimed
from molink.peer.memory.leases import Granted, LeaseBook, LeaseKey, Refused, announced_free_bytes
from molink.routing.placement.placement import JoiningMachine
from molink.shards.spec import ModelSpec, Span, missing_spans
from molink.simnet.swarm.population.volunteers import Volunteer

TIMING = DiscoveryTiming()


class NotConserved(RuntimeError):
    """The world has broken a law of its own: a number in its results would mean nothing."""


class Member:
    """A peer of the swarm. `decoding` and `prefilling` are the numbers of the generations that step on it."""

    __slots__ = (
        "alive",
        "book",
        "claim",
        "copies",
        "decoding",
        "loads",
        "placement",
        "prefilling",
        "spec",
        "speech",
        "told",
        "volunteer",
    )

    def __init__(self, volunteer: Volunteer, spec: ModelSpec) -> None:
        self.volunteer = volunteer
        self.spec = spec
        self.book = LeaseBook(spec, volunteer.memory)
        self.alive = True
        self.decoding: dict[int, int] = {}
        """Each with the number of its hop that is here."""
        self.copies: dict[int, int] = {}
        """Generations of which it keeps a second copy, each with the number of the hop that it is of."""
        self.prefilling: dict[int, None] = {}
        self.loads: dict[Span, float] = {}
        """What it is loading, and when that will be there."""
        self.placement = PlacementCore(volunteer.peer_id)
        self.claim = Claim()
        self.speech = AnnouncingCore(TIMING)
        self.told: PeerState | None = None
        """What it has said last."""

    @property
    def peer_id(self) -> str:
        return self.volunteer.peer_id

    def state(self) -> PeerState:
        """What it would announce now."""
        return claimed(self._own_state(), self.claim)

    def own_view(self) -> PeerView:
        """Itself as it is this moment, whatever it has told others."""
        return PeerView(self.volunteer.facts, self._own_state(), 0.0)

    def _own_state(self) -> PeerState:
        free_weight_bytes, free_kv_bytes = announced_free_bytes(
            self.spec, self.volunteer.facts.span_limit, self.book
        )
        return PeerState(
            peer_id=self.peer_id,
            sequence=0,
            ttl_s=1,
            facts_sequence=0,
            spans=self.book.held,
            free_weight_bytes=free_weight_bytes,
            free_kv_bytes=free_kv_bytes,
            sessions=len(self.book.leases),
            queued=len(self.prefilling),
            draining=self.book.gate.is_closed,
            loading=self.book.loading,
        )

    def loaded_view(self, number: int) -> PeerView:
        """Itself as one more session meets it this moment: those that decode beside it, and those whose prompts it
        computes meanwhile. What it could lease is of no matter there."""
        state = PeerState(
            peer_id=self.peer_id,
            sequence=0,
            ttl_s=1,
            facts_sequence=0,
            spans=self.book.held,
            free_weight_bytes=0,
            free_kv_bytes=0,
            sessions=len(self.decoding) - (number in self.decoding),
            queued=len(self.prefilling) - (number in self.prefilling),
        )
        return PeerView(self.volunteer.facts, state, 0.0)

    def joining(self) -> JoiningMachine:
        """Itself as placement is asked about it."""
        facts = self.volunteer.facts
        free_weight_bytes, free_kv_bytes = announced_free_bytes(self.spec, facts.span_limit, self.book)
        return JoiningMachine(
            peer_id=self.peer_id,
            free_weight_bytes=free_weight_bytes,
            free_kv_bytes=free_kv_bytes,
            layer_latencies=facts.layer_latencies,
            embed_ms=facts.embed_ms,
            head_ms=facts.head_ms,
            step_ms=facts.step_ms,
            load_bytes_per_s=facts.load_bytes_per_s,
            fetch_bytes_per_s=self.volunteer.fetch_bytes_per_s,
            coordinate=facts.coordinate,
            span_limit=facts.span_limit,
            held=self.book.held,
            relays=facts.relays,
            cone=facts.cone,
        )

    def hold(self, spans: tuple[Span, ...]) -> None:
        """It has these layers from now on. ValueError if they do not fit."""
        for span in spans:
            self.book.loaded(span)

    def request(self, key: LeaseKey, span: Span, tokens: int, owner: str, now_s: float) -> Granted | Refused:
        """Asks the lease book, which first takes back what has run out."""
        self.book.expire(now_s)
        self.book.copies.expire(now_s)
        answer = self.book.request(key, span, tokens, owner, now_s)
        self.book.used(key, now_s)
        taken_bytes = sum(lease.kv_bytes for lease in self.book.leases)
        if taken_bytes > self.book.kv_limit_bytes and isinstance(answer, Granted):
            raise NotConserved(
                f"{self.peer_id} has granted {taken_bytes} bytes of KV cache of {self.book.kv_limit_bytes}"
            )
        return answer

    def load_s(self, spans: tuple[Span, ...]) -> float:
        """Seconds that loading takes, as it announces."""
        return sum(map(self.spec.weight_bytes, spans)) / max(1.0, self.volunteer.facts.load_bytes_per_s)

    def fetch_s(self, spans: tuple[Span, ...]) -> float:
        """Seconds until such weights are on its disk."""
        fetched_bytes_per_s = self.volunteer.fetch_bytes_per_s
        return sum(map(self.spec.weight_bytes, spans)) / fetched_bytes_per_s if fetched_bytes_per_s else 0.0

    def ready_s(self, span: Span, now_s: float) -> float:
        """When all of the span is held."""
        lacking = missing_spans(span, self.book.held)
        waits = [
            ready_s
            for loading, ready_s in self.loads.items()
            if any(loading.start < part.stop and part.start < loading.stop for part in lacking)
        ]
        return max(waits, default=now_s)

    def arrived(self, span: Span) -> None:
        """A load has ended."""
        self.loads.pop(span, None)
        self.book.loaded(span)
