"""What a peer's owner grants: of which layers, to how many sessions, in how much memory. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from molink.peer.memory.lease import Lease, Refused
from molink.peer.memory.lease_table import LeaseTable
from molink.peer.memory.memory import Holdings, MemoryPlan, format_bytes, most_kv_bytes
from molink.shards.spec import ModelSpec, Span

MIN_RETRY_S = 0.1
KEPT_PART = 10
"""One in so many sessions is kept for who has no lease here, half of these for those who have stepped here before; and
such a part of the KV cache for those who either have no lease here or have stepped here before."""


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """Admission rules of a lease book: why something is refused, of what is held and leased now. None: it is not."""

    spec: ModelSpec
    memory: MemoryPlan
    span_limit: Span
    max_sessions: int
    max_sessions_per_owner: int
    max_sessions_per_network: int
    ttl_s: float

    def kv_limit_bytes(self, holdings: Holdings) -> int:
        """What is set aside neither for steps nor for weights that are held or on their way."""
        return self.memory.total_bytes - self.memory.workspace_bytes - holdings.committed_bytes

    def is_full(self, leases: Sequence[Lease]) -> bool:
        """Whether no further session could be taken beside these, however small."""
        return len(leases) >= self.max_sessions

    def refuse_shape(self, span: Span, tokens: int) -> Refused | None:
        """Layers that are not served here, or more tokens than the model takes."""
        if not self.span_limit.covers(span) or not self.spec.whole.covers(span):
            detail = f"layers {span} are not within {self.span_limit}, which this peer serves"
            return Refused("span", detail, 0.0)
        if not 1 <= tokens <= self.spec.context_length:
            detail = f"a lease is for 1 to {self.spec.context_length} tokens, not {tokens}"
            return Refused("span", detail, 0.0)
        return None

    def refuse_lease(
        self,
        asked: Lease,
        to_load: tuple[Span, ...],
        older: Lease | None,
        table: LeaseTable,
        holdings: Holdings,
        now: float,
    ) -> Refused | None:
        """No room for a lease among those that there are, of which `older` would end."""
        refusal = None if older is not None else self._refuse_number(asked, table, now)
        if refusal is not None:
            return refusal
        kept_bytes = 0
        others = tuple(lease for lease in table if lease is not older)
        if not table.knows(asked.owner) and any(lease.is_near(asked) for lease in others):
            kept_bytes = max(0, self.kv_limit_bytes(holdings)) // KEPT_PART
        refusal = self._refuse_weights(to_load, holdings)
        return refusal or self._refuse_memory(to_load, asked.kv_bytes, others, holdings, now, kept_bytes)

    def refuse_copy(
        self, asked: Lease, others: Sequence[Lease], holdings: Holdings, now: float
    ) -> Refused | None:
        """No room for a copy among all leases and other copies: it takes what these leave, and nobody makes way."""
        everything = (*others, asked)
        excess = self.excess((), everything, holdings)
        if not excess:
            return None
        if sum(one.kv_bytes for one in everything) > self.kv_limit_bytes(holdings):
            detail = f"there is no room for a copy of {format_bytes(asked.kv_bytes)} beside the sessions here"
            return Refused("memory", detail, self._retry_after_s(tuple(others), now, asked.kv_bytes))
        return Refused("busy", "as many sessions and copies are here as may be", self.ttl_s)

    def excess(
        self, leases: Sequence[Lease], copies: Sequence[Lease], holdings: Holdings
    ) -> tuple[Lease, ...]:
        """Copies of which some have to end, since there are too many beside those leases; none: all may stay."""
        everything = (*leases, *copies)
        leased_bytes = sum(one.kv_bytes for one in everything)
        if leased_bytes > self.kv_limit_bytes(holdings) or len(everything) > self.max_sessions:
            return tuple(copies)
        owners = Counter(one.owner for one in everything)
        networks = Counter(one.network for one in everything if one.network)
        return tuple(
            copy
            for copy in copies
            if owners[copy.owner] > self.max_sessions_per_owner
            or networks[copy.network] > self.max_sessions_per_network
        )

    def refuse_load(
        self, to_load: tuple[Span, ...], table: LeaseTable, holdings: Holdings, now: float
    ) -> Refused | None:
        """No room for weights that no lease asks for."""
        refusal = self._refuse_weights(to_load, holdings)
        return refusal or self._refuse_memory(to_load, 0, tuple(table), holdings, now)

    def _refuse_weights(self, to_load: tuple[Span, ...], holdings: Holdings) -> Refused | None:
        """More weights than may be held."""
        weight_bytes = holdings.added_bytes(to_load)
        free_weight_bytes = self.memory.weight_limit_bytes - holdings.committed_bytes
        if weight_bytes <= free_weight_bytes:
            return None
        layers = ", ".join(map(str, to_load))
        detail = (
            f"layers {layers} take {format_bytes(weight_bytes)} of weights and "
            f"{format_bytes(free_weight_bytes)} are free for weights: choose layers that this peer "
            "holds, or another peer"
        )
        return Refused("memory", detail, self.ttl_s)

    def _refuse_memory(
        self,
        to_load: tuple[Span, ...],
        kv_bytes: int,
        others: tuple[Lease, ...],
        holdings: Holdings,
        now: float,
        kept_bytes: int = 0,
    ) -> Refused | None:
        """Weights and KV cache that do not fit together beside the leases of others."""
        weight_bytes = holdings.added_bytes(to_load)
        pool_bytes = self.kv_limit_bytes(holdings) - weight_bytes
        leased = [lease.kv_bytes for lease in others]
        free_bytes = weight_bytes + most_kv_bytes(pool_bytes, self.memory.swap_bytes, leased) - kept_bytes
        missing_bytes = weight_bytes + kv_bytes - free_bytes
        if missing_bytes <= 0:
            return None
        detail = (
            f"{format_bytes(weight_bytes)} of weights and {format_bytes(kv_bytes)} of KV cache are asked, "
            f"{format_bytes(max(0, free_bytes))} are free: ask for fewer tokens or layers, or another peer"
        )
        return Refused("memory", detail, self._retry_after_s(others, now, missing_bytes))

    def _refuse_number(self, asked: Lease, table: LeaseTable, now: float) -> Refused | None:
        """More sessions than one client, one network, or all together may have."""
        owned = tuple(lease for lease in table if lease.owner == asked.owner)
        if len(owned) >= self.max_sessions_per_owner:
            detail = f"{asked.owner} has {len(owned)} sessions here, the most that one client may have"
            return Refused("busy", detail, self._retry_after_s(owned, now))
        near = tuple(lease for lease in table if asked.network and lease.network == asked.network)
        if len(near) >= self.max_sessions_per_network:
            detail = f"{asked.network} has {len(near)} sessions here, the most that one network may have"
            return Refused("busy", detail, self._retry_after_s(near, now))
        kept = self.max_sessions // KEPT_PART
        if not owned and not near:
            kept = 0 if table.knows(asked.owner) else kept // 2
        if len(table) >= self.max_sessions - kept:
            detail = f"all {self.max_sessions} sessions of this peer are taken, or kept for others"
            return Refused("busy", detail, self._retry_after_s(tuple(table), now))
        return None

    def _retry_after_s(self, leases: tuple[Lease, ...], now: float, missing_bytes: int = 1) -> float:
        """When so many bytes of these leases will have run out, unless renewed; at most `ttl_s`."""
        for lease in sorted(leases, key=lambda one: one.expires_s):
            missing_bytes -= lease.kv_bytes
            if missing_bytes <= 0:
                return min(max(lease.expires_s - now, MIN_RETRY_S), self.ttl_s)
        return self.ttl_s
