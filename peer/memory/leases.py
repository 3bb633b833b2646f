"""The peer's own arbitration of its memory among circuits. Pure: the time is an argument.

The peer owns its memory: it alone decides what to load and what to drop, and never grants a lease that it
cannot honour. So what a lease needs is committed when it is granted: its KV cache, and the weights of its
cold layers, though these are still to be loaded. Of two clients that race for the same memory one is refused;
two that want the same cold layers share one load.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from molink.peer.memory.lease import Granted, Lease, LeaseKey, Refused
from molink.peer.memory.memory import (
    Holdings,
    MemoryPlan,
    common_spans,
    format_bytes,
    most_kv_bytes,
    spare_pool_bytes,
)
from molink.shards.spec import ModelSpec, Span, missing_spans

__all__ = ["Granted", "Lease", "LeaseBook", "LeaseKey", "Refused", "announced_free_bytes"]

MIN_RETRY_S = 0.1
IDLE_S = 60.0
"""A lease without a step for so long ends, however often it is renewed: its client has given up the circuit by then."""
SPARED_S = 30.0
"""A lease without a step for so long ends as soon as another needs its room."""
KEPT_PART = 10
"""One in so many sessions is kept for who has no lease here, half of these for those who have stepped here before; and
such a part of the KV cache for those who either have no lease here or have stepped here before."""
MOST_KNOWN = 4096
"""Clients that are remembered to have stepped here."""


class LeaseBook:
    """Who may use which part of this peer's memory.

    Leases end by `release`, `release_owner`, `expire`, `load_failed`, a newer epoch, or, while they are idle, by a
    grant to another, and in no other way; each of these says which ended, so that the caller frees what belongs to
    them. A refusal changes nothing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        memory: MemoryPlan,
        *,
        span_limit: Span | None = None,
        max_sessions: int = 64,
        max_sessions_per_owner: int = 32,
        max_sessions_per_network: int = 48,
        ttl_s: float = 30.0,
    ) -> None:
        self._spec = spec
        self._memory = memory
        self._span_limit = span_limit if span_limit is not None else spec.whole
        self._max_sessions = max_sessions
        self._max_sessions_per_owner = max_sessions_per_owner
        self._max_sessions_per_network = max_sessions_per_network
        self._ttl_s = ttl_s
        self._leases: dict[bytes, Lease] = {}
        self._used_s: dict[bytes, float] = {}
        """By session: when it was granted, or has stepped last."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Clients that have stepped here, who did so last at the end."""
        self._holdings = Holdings(spec)
        self._closed: dict[str, Refused] = {}

    @property
    def held(self) -> tuple[Span, ...]:
        """Layers that could be stepped this second, in as few spans as possible."""
        return self._holdings.held

    @property
    def loading(self) -> tuple[Span, ...]:
        """Layers whose load was ordered and has not ended, in as few spans as possible."""
        return self._holdings.loading

    @property
    def leases(self) -> tuple[Lease, ...]:
        return tuple(self._leases.values())

    @property
    def draining(self) -> bool:
        """Whether everything new is refused: for good after `drain`, else until it is opened again."""
        return bool(self._closed)

    @property
    def cap_bytes(self) -> int:
        """Weights, KV caches and work space may take no more together."""
        return self._memory.total_bytes

    @property
    def free_kv_bytes(self) -> int:
        """KV cache that one more session could be granted now, on layers that are held or on their way."""
        return most_kv_bytes(self.kv_limit_bytes, self.swap_bytes, self._leased()) if self._open else 0

    @property
    def swap_bytes(self) -> int:
        """KV cache of sessions that wait may be in the host's memory, so much of it; 0: each session has its own from
        the start."""
        return self._memory.swap_bytes

    @property
    def kv_limit_bytes(self) -> int:
        """What the KV cache may take, leases and prefixes kept for later together: all that is not set aside for
        steps, and for weights that are held or on their way."""
        return self._memory.total_bytes - self._memory.workspace_bytes - self._holdings.committed_bytes

    @property
    def free_weight_bytes(self) -> int:
        """Weights that one more session could be granted now; its KV cache comes out of the same memory."""
        if not self._open:
            return 0
        spare_bytes = spare_pool_bytes(self.kv_limit_bytes, self.swap_bytes, self._leased())
        return min(self._memory.weight_limit_bytes - self._holdings.committed_bytes, spare_bytes)

    def request(
        self, key: LeaseKey, span: Span, tokens: int, owner: str, now: float, network: str = ""
    ) -> Granted | Refused:
        """Asks for the span and the KV cache of `tokens` tokens, for `ttl_s` from `now`.

        The same request again has the same lease as its answer. A higher epoch replaces the session's lease,
        whose KV cache counts as free for it; if it is refused, the older lease stays. Where there is no room, leases
        that nobody has used for SPARED_S make some: of who has most, and of these the one that was used least lately.
        """
        older = self._leases.get(key.session)
        if older is not None and (answer := older.answer(key, span, tokens, owner)) is not None:
            return answer
        refusal = self._refuse_shape(span, tokens) or self._refuse_closed()
        if refusal is not None:
            return refusal
        kv_bytes = self._spec.kv_bytes(span, tokens)
        to_load = self._holdings.cold(span)
        lease = Lease(key, span, tokens, kv_bytes, now + self._ttl_s, owner, network)
        evicted: list[Lease] = []
        refusal = self._refuse(lease, to_load, older, now)
        if refusal is not None:
            first = refusal
            for spare in self._spare(now):
                if spare is older or refusal is None:
                    continue
                evicted.append(spare)
                del self._leases[spare.key.session]
                refusal = self._refuse(lease, to_load, older, now)
            if refusal is not None:
                self._leases.update((spare.key.session, spare) for spare in evicted)
                return first
        self._end_uses(evicted)
        self._leases[key.session] = lease
        self._used_s[key.session] = now
        self._holdings.order(to_load)
        return Granted(lease, to_load, older, tuple(evicted))

    def used(self, key: LeaseKey, now: float, *, stepped: bool = True) -> None:
        """The session has stepped, or waits for this peer and not for its client. No error if there is no such lease
        (any more)."""
        lease = self._find(key)
        if lease is None:
            return
        self._used_s[key.session] = now
        if stepped:
            self._known[lease.owner] = None
            self._known.move_to_end(lease.owner)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def knows(self, owner: str) -> bool:
        """Whether a client has stepped here before."""
        return owner in self._known

    def preload(self, span: Span, now: float) -> tuple[Span, ...] | Refused:
        """Commits the memory of layers that the peer loads of its own accord, such as at the start.

        Returns what must be loaded, as `to_load` of a grant does.
        """
        refusal = self._refuse_shape(span, 1)
        refusal = refusal or self._refuse_closed()
        to_load = self._holdings.cold(span)
        refusal = refusal or self._refuse_memory(to_load, 0, None, now)
        if refusal is not None:
            return refusal
        self._holdings.order(to_load)
        return to_load

    def renew(self, key: LeaseKey, now: float) -> bool:
        """The lease lasts `ttl_s` from `now`. False when there is no such lease (any more), or nobody has used it for
        IDLE_S.

        One that has run out but was not taken back by `expire` yet is renewed too: its memory is still there.
        """
        lease = self._find(key)
        if lease is None or now - self._used_s[key.session] >= IDLE_S:
            return False
        self._leases[key.session] = replace(lease, expires_s=max(lease.expires_s, now + self._ttl_s))
        return True

    def release(self, key: LeaseKey) -> Lease | None:
        """Ends a lease; None when there is no such lease (any more)."""
        lease = self._find(key)
        if lease is not None:
            self._end((lease,))
        return lease

    def release_owner(self, owner: str) -> tuple[Lease, ...]:
        """Ends all leases of a client that is gone."""
        return self._end(lease for lease in self.leases if lease.owner == owner)

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Ends the leases that have run out, and those that nobody has used for IDLE_S."""
        return self._end(
            lease
            for lease in self.leases
            if lease.expires_s <= now or now - self._used_s[lease.key.session] >= IDLE_S
        )

    def loaded(self, span: Span) -> None:
        """A load has ended well: the span is held. Layers that nobody ordered are held too, if they fit.

        Raises:
            ValueError: they do not fit, or the model has no such layers.
        """
        uncommitted = self._holdings.cold(span)
        if uncommitted:
            refusal = self._refuse_shape(span, 1) or self._refuse_memory(uncommitted, 0, None, 0.0)
            if refusal is not None:
                raise ValueError(f"layers {span} were loaded but not ordered: {refusal.detail}")
        self._holdings.arrive(span)

    def load_failed(self, span: Span) -> tuple[Lease, ...]:
        """A load has failed: its memory is free again, the leases that waited for it end and are returned."""
        failed = self._holdings.fail(span)
        return self._end(lease for lease in self.leases if common_spans(failed, lease.span))

    def ready(self, key: LeaseKey) -> bool:
        """Whether there is such a lease and all layers of its span are held now."""
        lease = self._find(key)
        return lease is not None and not missing_spans(lease.span, self.held)

    def drop(self, *spans: Span) -> None:
        """The peer has decided to hold these layers no longer: all of them, or none if it raises.

        Raises:
            ValueError: a lease needs one of them, or one is being loaded.
        """
        for span in spans:
            self._require_unneeded(span)
        for span in spans:
            self._holdings.drop(span)

    def drain(self) -> None:
        """Refuse everything new from now on; what was granted stays."""
        self.close(Refused("draining", "this peer is leaving the swarm: choose another", 0.0))

    def close(self, refusal: Refused) -> None:
        """Answer everything new with this until `reopen` of its code; what was granted stays."""
        self._closed[refusal.code] = refusal

    def reopen(self, code: str) -> None:
        """What was closed with that code is open again, unless there is another reason."""
        self._closed.pop(code, None)

    @property
    def _open(self) -> bool:
        """Whether one more session could be taken at all."""
        return not self._closed and len(self._leases) < self._max_sessions

    def _require_unneeded(self, span: Span) -> None:
        leased = [lease for lease in self.leases if common_spans((span,), lease.span)]
        if leased:
            raise ValueError(
                f"layers {span} cannot be dropped: {len(leased)} leases need them, one of {leased[0].owner} "
                f"on {leased[0].span}. Release them first"
            )
        if loading := common_spans(self.loading, span):
            raise ValueError(f"layers {loading[0]} cannot be dropped while they load: wait for that to end")

    def _find(self, key: LeaseKey) -> Lease | None:
        lease = self._leases.get(key.session)
        return lease if lease is not None and lease.key.epoch == key.epoch else None

    def _end(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        ended = tuple(leases)
        for lease in ended:
            del self._leases[lease.key.session]
        self._end_uses(ended)
        return ended

    def _end_uses(self, ended: Iterable[Lease]) -> None:
        for lease in ended:
            self._used_s.pop(lease.key.session, None)

    def _spare(self, now: float) -> list[Lease]:
        """Leases that may make room for others, in the order in which they do."""
        held = Counter(lease.owner for lease in self._leases.values())
        idle = [lease for lease in self.leases if now - self._used_s[lease.key.session] >= SPARED_S]
        return sorted(idle, key=lambda lease: (-held[lease.owner], self._used_s[lease.key.session]))

    def _leased(self, without: Lease | None = None) -> list[int]:
        return [lease.kv_bytes for lease in self._leases.values() if lease is not without]

    def _refuse_shape(self, span: Span, tokens: int) -> Refused | None:
        if not self._span_limit.covers(span) or not self._spec.whole.covers(span):
            detail = f"layers {span} are not within {self._span_limit}, which this peer serves"
            return Refused("span", detail, 0.0)
        if not 1 <= tokens <= self._spec.context_length:
            detail = f"a lease is for 1 to {self._spec.context_length} tokens, not {tokens}"
            return Refused("span", detail, 0.0)
        return None

    def _refuse(
        self, asked: Lease, to_load: tuple[Span, ...], older: Lease | None, now: float
    ) -> Refused | None:
        """Why there is no room for a lease, among those that there are."""
        refusal = None if older is not None else self._refuse_number(asked, now)
        if refusal is not None:
            return refusal
        kept_bytes = 0
        others = (lease for lease in self.leases if lease is not older)
        if asked.owner not in self._known and any(lease.is_near(asked) for lease in others):
            kept_bytes = max(0, self.kv_limit_bytes) // KEPT_PART
        return self._refuse_memory(to_load, asked.kv_bytes, older, now, kept_bytes)

    def _refuse_number(self, asked: Lease, now: float) -> Refused | None:
        owned = tuple(lease for lease in self.leases if lease.owner == asked.owner)
        if len(owned) >= self._max_sessions_per_owner:
            detail = f"{asked.owner} has {len(owned)} sessions here, the most that one client may have"
            return Refused("busy", detail, self._retry_after_s(owned, now))
        near = tuple(lease for lease in self.leases if asked.network and lease.network == asked.network)
        if len(near) >= self._max_sessions_per_network:
            detail = f"{asked.network} has {len(near)} sessions here, the most that one network may have"
            return Refused("busy", detail, self._retry_after_s(near, now))
        kept = self._max_sessions // KEPT_PART
        if not owned and not near:
            kept = 0 if asked.owner in self._known else kept // 2
        if len(self._leases) >= self._max_sessions - kept:
            detail = f"all {self._max_sessions} sessions of this peer are taken, or kept for others"
            return Refused("busy", detail, self._retry_after_s(self.leases, now))
        return None

    def _refuse_closed(self) -> Refused | None:
        return self._closed.get("draining") or next(iter(self._closed.values()), None)

    def _refuse_memory(
        self,
        to_load: tuple[Span, ...],
        kv_bytes: int,
        older: Lease | None,
        now: float,
        kept_bytes: int = 0,
    ) -> Refused | None:
        weight_bytes = self._holdings.added_bytes(to_load)
        free_weight_bytes = self._memory.weight_limit_bytes - self._holdings.committed_bytes
        if weight_bytes > free_weight_bytes:
            layers = ", ".join(map(str, to_load))
            detail = (
                f"layers {layers} take {format_bytes(weight_bytes)} of weights and "
                f"{format_bytes(free_weight_bytes)} are free for weights: choose layers that this peer "
                "holds, or another peer"
            )
            return Refused("memory", detail, self._ttl_s)
        pool_bytes = self.kv_limit_bytes - weight_bytes
        free_bytes = (
            weight_bytes + most_kv_bytes(pool_bytes, self.swap_bytes, self._leased(older)) - kept_bytes
        )
        missing_bytes = weight_bytes + kv_bytes - free_bytes
        if missing_bytes <= 0:
            return None
        detail = (
            f"{format_bytes(weight_bytes)} of weights and {format_bytes(kv_bytes)} of KV cache are asked, "
            f"{format_bytes(max(0, free_bytes))} are free: ask for fewer tokens or layers, or another peer"
        )
        others = tuple(lease for lease in self.leases if lease is not older)
        return Refused("memory", detail, self._retry_after_s(others, now, missing_bytes))

    def _retry_after_s(self, leases: tuple[Lease, ...], now: float, missing_bytes: int = 1) -> float:
        """When so many bytes of these leases will have run out, unless renewed; at most `ttl_s`."""
        for lease in sorted(leases, key=lambda one: one.expires_s):
            missing_bytes -= lease.kv_bytes
            if missing_bytes <= 0:
                return min(max(lease.expires_s - now, MIN_RETRY_S), self._ttl_s)
        return self._ttl_s


def announced_free_bytes(spec: ModelSpec, span_limit: Span | None, leases: LeaseBook) -> tuple[int, int]:
    """What a peer says is free: memory for further weights, at most what is missing takes, and for KV caches beside
    them."""
    held_bytes = spec.held_bytes(leases.held)
    loadable_bytes = spec.held_bytes((*leases.held, span_limit or spec.whole)) - held_bytes
    # announcements round sizes down by up to 1/256: what would hold all that is missing must still do so then
    loadable_bytes += loadable_bytes >> 7
    free_weight_bytes = max(0, min(leases.free_weight_bytes, loadable_bytes))
    # what the weights could still take is promised to them: KV caches get the rest
    return free_weight_bytes, max(0, leases.free_kv_bytes - free_weight_bytes)
