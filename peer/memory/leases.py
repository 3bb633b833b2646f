"""The peer's own arbitration of its memory among circuits. Pure: the time is an argument.

The peer owns its memory: it alone decides what to load and what to drop, and never grants a lease that it
cannot honour. So what a lease needs is committed when it is granted: its KV cache, and the weights of its
cold layers, though these are still to be loaded. Of two clients that race for the same memory one is refused;
two that want the same cold layers share one load.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from molink.peer.memory.copy_leases import CopyLeases
from molink.peer.memory.lease import Granted, Lease, LeaseKey, Refused
from molink.peer.memory.lease_gate import LeaseGate
from molink.peer.memory.lease_rules import LeaseRules
from molink.peer.memory.lease_table import LEASE_TIMES, LeaseTable, LeaseTimes
from molink.peer.memory.memory import Holdings, MemoryPlan, common_spans, most_kv_bytes, spare_pool_bytes
from molink.shards.spec import ModelSpec, Span, missing_spans

__all__ = ["Granted", "Lease", "LeaseBook", "LeaseKey", "Refused", "announced_free_bytes"]


class LeaseBook:
    """Who may use which part of this peer's memory.

    Leases end by `release`, `expire`, `load_failed`, a newer epoch, or, while they are idle, by a
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
        times: LeaseTimes = LEASE_TIMES,
    ) -> None:
        self.memory = memory
        """What all that is leased and held has to fit."""
        self.gate = LeaseGate()
        served = span_limit if span_limit is not None else spec.whole
        near = max(max_sessions_per_network, max_sessions_per_owner)
        limits = (max_sessions, max_sessions_per_owner, near)
        self._rules = LeaseRules(spec, memory, served, *limits, times.ttl_s)
        self._table = LeaseTable(times)
        self._holdings = Holdings(spec)
        self.copies = CopyLeases(self._rules, self._table, self._holdings, self.gate)
        """Second copies, in what leases leave."""
        self.gate.tell_closed(self.copies.end_all)

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
        return tuple(self._table)

    @property
    def free_kv_bytes(self) -> int:
        """KV cache that one more session could be granted now, on layers that are held or on their way."""
        standing = self._table.standing  # the others make room for whoever needs it
        if self.gate.is_closed or self._rules.is_full(standing):
            return 0
        leased = [lease.kv_bytes for lease in standing]
        return most_kv_bytes(self.kv_limit_bytes, self.memory.swap_bytes, leased)

    @property
    def kv_limit_bytes(self) -> int:
        """What the KV cache may take, leases and prefixes kept for later together: all that is not set aside for
        steps, and for weights that are held or on their way."""
        return self._rules.kv_limit_bytes(self._holdings)

    @property
    def free_weight_bytes(self) -> int:
        """Weights that one more session could be granted now; its KV cache comes out of the same memory."""
        if self.gate.is_closed or self._rules.is_full(self.leases):
            return 0
        leased = [lease.kv_bytes for lease in self.leases]
        spare_bytes = spare_pool_bytes(self.kv_limit_bytes, self.memory.swap_bytes, leased)
        return min(self.memory.weight_limit_bytes - self._holdings.committed_bytes, spare_bytes)

    def request(
        self, key: LeaseKey, span: Span, tokens: int, owner: str, now: float, network: str = ""
    ) -> Granted | Refused:
        """Asks for the span and the KV cache of `tokens` tokens, for `ttl_s` from `now`.

        The same request again has the same lease as its answer. A higher epoch replaces the session's lease,
        whose KV cache counts as free for it; if it is refused, the older lease stays. Where there is no room, leases
        that nobody has used for `spared_s` make some, if that is what is missing, and no more than that takes: of who
        has most, and of these the one that was used least lately.
        Copies that are in the way end in any case; the session's own becomes the lease, which is never refused. A peer
        that grants nothing new has a session go on in what it was granted.
        """
        rules, table = self._rules, self._table
        older = table.of_session(key.session)
        held = older or self.copies.of_session(key.session)
        if held is not None and (answer := held.answer(key, span, tokens, owner)) is not None:
            if older is not None or isinstance(answer, Refused):
                return answer
            return Refused(
                "epoch", "this peer keeps a copy in this epoch: ask for its lease in a later one", 0.0
            )
        goes_on = older is not None and (older.span, older.tokens) == (span, tokens)
        refusal = rules.refuse_shape(span, tokens) or (None if goes_on else self.gate.refusal)
        if refusal is not None:
            return refusal
        if older is None and (copy := self.copies.take(key, span, tokens, owner)) is not None:
            lease = replace(copy, key=key, expires_s=now + rules.ttl_s)
            table.grant(lease, now)
            return Granted(lease, (), promoted=copy)
        kv_bytes = rules.spec.kv_bytes(span, tokens)
        to_load = self._holdings.cold(span)
        lease = Lease(key, span, tokens, kv_bytes, now + rules.ttl_s, owner, network)
        refusal_now = partial(rules.refuse_lease, lease, to_load, older, table, self._holdings, now)
        evicted = _set_aside(table, [one for one in table.spare(now) if one is not older], refusal_now)
        if isinstance(evicted, Refused):
            return evicted
        table.end(evicted)
        table.grant(lease, now)
        self._holdings.order(to_load)
        self.copies.end(copy for copy in self.copies if copy.key.session == key.session)
        self.copies.settle()
        return Granted(lease, to_load, older, evicted)

    def advance(
        self, key: LeaseKey, span: Span, tokens: int, owner: str, now: float, network: str = ""
    ) -> Granted | Refused:
        """As `request`, of a session that goes on here in its next epoch: a lease that has what it needs stays, whether
        anything new is granted or not."""
        older = self._table.of_session(key.session)
        if older is None or (older.span, older.tokens) != (span, tokens):
            return self.request(key, span, tokens, owner, now, network)
        if (answer := older.answer(key, span, tokens, owner)) is not None:
            return answer
        lease = replace(older, key=key, expires_s=now + self._rules.ttl_s)
        self._table.grant(lease, now)
        return Granted(lease, (), older)

    def used(self, key: LeaseKey, now: float, *, stepped: bool = True) -> None:
        """The session has stepped, or waits for this peer and not for its client. No error if there is no such lease
        (any more)."""
        lease = self._table.find(key)
        if lease is not None:
            self._table.use(lease, now, stepped=stepped)

    def knows(self, owner: str) -> bool:
        """Whether a client has stepped here before."""
        return self._table.knows(owner)

    def preload(self, span: Span, now: float) -> tuple[Span, ...] | Refused:
        """Commits the memory of layers that the peer loads of its own accord, such as at the start.

        Returns what must be loaded, as `to_load` of a grant does.
        """
        rules, to_load = self._rules, self._holdings.cold(span)
        refusal = rules.refuse_shape(span, 1) or self.gate.refusal
        refusal = refusal or rules.refuse_load(to_load, self._table, self._holdings, now)
        if refusal is not None:
            return refusal
        self._holdings.order(to_load)
        self.copies.settle()
        return to_load

    def renew(self, key: LeaseKey, now: float) -> bool:
        """The lease lasts `ttl_s` from `now`. False when there is no such lease (any more), or nobody has used it for
        `idle_s`.

        One that has run out but was not taken back by `expire` yet is renewed too: its memory is still there.
        """
        lease = self._table.find(key)
        if lease is None or self._table.is_idle(lease, now):
            return False
        self._table.renew(replace(lease, expires_s=max(lease.expires_s, now + self._rules.ttl_s)))
        return True

    def release(self, key: LeaseKey) -> Lease | None:
        """Ends a lease; None when there is no such lease (any more)."""
        lease = self._table.find(key)
        if lease is not None:
            self._table.end((lease,))
        return lease

    def abandon(self, keys: Iterable[LeaseKey], now: float) -> tuple[Lease, ...]:
        """The client of these is gone: they end soon, or sooner where another needs their room. Returns those that
        there are."""
        left = tuple(lease for key in keys if (lease := self._table.find(key)) is not None)
        for lease in left:
            self._table.abandon(lease, now)
        return left

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Ends the leases that have run out, and those that nobody has used for `idle_s`."""
        table = self._table
        return table.end(
            lease for lease in self.leases if lease.expires_s <= now or table.is_idle(lease, now)
        )

    def loaded(self, span: Span) -> None:
        """A load has ended well: the span is held. Layers that nobody ordered are held too, if they fit.

        Raises:
            ValueError: they do not fit, or the model has no such layers.
        """
        uncommitted = self._holdings.cold(span)
        if uncommitted:
            refusal = self._rules.refuse_shape(span, 1)
            refusal = refusal or self._rules.refuse_load(uncommitted, self._table, self._holdings, 0.0)
            if refusal is not None:
                raise ValueError(f"layers {span} were loaded but not ordered: {refusal.detail}")
        self._holdings.arrive(span)
        self.copies.settle()

    def load_failed(self, span: Span) -> tuple[Lease, ...]:
        """A load has failed: its memory is free again, the leases that waited for it end and are returned."""
        failed = self._holdings.fail(span)
        return self._table.end(lease for lease in self.leases if common_spans(failed, lease.span))

    def ready(self, key: LeaseKey) -> bool:
        """Whether there is such a lease and all layers of its span are held now."""
        lease = self._table.find(key)
        return lease is not None and not missing_spans(lease.span, self.held)

    def drop(self, *spans: Span) -> None:
        """The peer has decided to hold these layers no longer: all of them, or none if it raises.

        Raises:
            ValueError: a lease needs one of them, or one is being loaded.
        """
        for span in spans:
            leased = [lease for lease in self._table if common_spans((span,), lease.span)]
            if leased:
                raise ValueError(
                    f"layers {span} cannot be dropped: {len(leased)} leases need them, one of {leased[0].owner} "
                    f"on {leased[0].span}. Release them first"
                )
            if loading := common_spans(self.loading, span):
                raise ValueError(
                    f"layers {loading[0]} cannot be dropped while they load: wait for that to end"
                )
        for span in spans:
            self._holdings.drop(span)
        self.copies.settle()


def _set_aside(
    table: LeaseTable, spares: Iterable[Lease], refusal: Callable[[], Refused | None]
) -> tuple[Lease, ...] | Refused:
    """Sets the first of the spare leases aside until there is no `refusal` any more, and none that does not help.
    Returns these, or why there would be a refusal without all of them, and then they are where they were."""
    evicted: list[Lease] = []
    first = refusal()
    if first is None:
        return ()
    for spare in spares:
        evicted.append(spare)
        table.set_aside(spare)
        if refusal() is None:
            break
    else:
        table.put_back(evicted)
        return first
    needed: list[Lease] = []
    for spare in reversed(evicted):  # a client at its own limit, for one, gains nothing by others' leases
        table.put_back((spare,))
        if refusal() is not None:
            table.set_aside(spare)
            needed.insert(0, spare)
    return tuple(needed)


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
