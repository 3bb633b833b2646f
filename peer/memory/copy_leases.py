"""Leases of second copies of KV caches: what live leases leave, and gone before one of those is refused. Pure.

A copy has all of the memory that its session may need, so that it becomes the session's lease without asking anybody;
as long as it is a copy, whatever else this peer is asked for goes before it. So it is announced neither as a session
nor as memory that is taken.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from molink.peer.memory.lease import Lease, LeaseKey, Refused
from molink.peer.memory.lease_gate import LeaseGate
from molink.peer.memory.lease_rules import LeaseRules
from molink.peer.memory.lease_table import LeaseTable
from molink.peer.memory.memory import Holdings
from molink.shards.spec import Span, missing_spans


class CopyLeases:
    """Copies that a lease book has granted beside its leases, one for each session.

    Copies and leases together are always within the limits of either, so that each copy can become a lease.
    """

    __slots__ = ("_behind_tokens", "_copies", "_ended", "_gate", "_holdings", "_rules", "_table")

    def __init__(self, rules: LeaseRules, table: LeaseTable, holdings: Holdings, gate: LeaseGate) -> None:
        self._rules = rules
        self._table = table
        self._holdings = holdings
        self._gate = gate
        self._copies: dict[bytes, Lease] = {}
        self._behind_tokens: dict[bytes, int] = {}
        self._ended: Callable[[Lease], None] = _nobody

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._copies.values()))

    @property
    def kv_bytes(self) -> int:
        """Memory of all copies."""
        return sum(copy.kv_bytes for copy in self._copies.values())

    def tell_ended(self, ended: Callable[[Lease], None]) -> None:
        """`ended` hears at once of each copy that ends and does not become a lease: its memory is somebody's."""
        self._ended = ended

    def of_session(self, session: bytes) -> Lease | None:
        """The session's copy, of whatever epoch."""
        return self._copies.get(session)

    def request(
        self, key: LeaseKey, span: Span, tokens: int, owner: str, now: float, network: str = ""
    ) -> Lease | Refused:
        """Asks for a copy of `tokens` tokens of the span, all of whose layers have to be held, for `ttl_s` from `now`.

        The same request again has the same copy as its answer. A higher epoch keeps the copy, if it is of the same
        span and tokens, else it has a new one in its place.
        """
        rules, older = self._rules, self._copies.get(key.session)
        if older is not None:
            answer = older.answer(key, span, tokens, owner)
            if isinstance(answer, Refused):
                return answer
            if (older.span, older.tokens) == (span, tokens):
                kept = replace(older, key=key, expires_s=max(older.expires_s, now + rules.ttl_s))
                self._copies[key.session] = kept
                return kept
        refusal = rules.refuse_shape(span, tokens) or self._gate.refusal or self._refuse_session(key, span)
        if refusal is not None:
            return refusal
        kv_bytes = rules.spec.kv_bytes(span, tokens)
        copy = Lease(key, span, tokens, kv_bytes, now + rules.ttl_s, owner, network)
        others = [one for one in (*self._table, *self) if one is not older]
        refusal = rules.refuse_copy(copy, others, self._holdings, now)
        if refusal is not None:
            return refusal
        if older is not None:
            self.end((older,))
        self._copies[key.session] = copy
        self._behind_tokens[key.session] = tokens
        return copy

    def record_lag(self, session: bytes, behind_tokens: int) -> None:
        """The session's copy lacks so many of the tokens that its hop has computed."""
        if session in self._copies:
            self._behind_tokens[session] = behind_tokens

    def take(self, key: LeaseKey, span: Span, tokens: int, owner: str) -> Lease | None:
        """The session's copy, if it is what a lease in this epoch is asked for: it is one from now on, and no copy."""
        copy = self._copies.get(key.session)
        if copy is None or (copy.span, copy.tokens, copy.owner) != (span, tokens, owner):
            return None
        if key.epoch <= copy.key.epoch:
            return None
        self._remove(copy)
        return copy

    def renew(self, key: LeaseKey, now: float) -> bool:
        """The copy lasts `ttl_s` from `now`; False when there is none of that session and epoch (any more)."""
        copy = self._copies.get(key.session)
        if copy is None or copy.key != key:
            return False
        expires_s = max(copy.expires_s, now + self._rules.ttl_s)
        self._copies[key.session] = replace(copy, expires_s=expires_s)
        return True

    def release(self, key: LeaseKey) -> None:
        """Ends the copy of that session and epoch, if there is one."""
        self.end(copy for copy in self if copy.key == key)

    def end(self, copies: Iterable[Lease]) -> None:
        """Ends these copies."""
        for copy in tuple(copies):
            self._remove(copy)
            self._ended(copy)

    def end_all(self) -> None:
        """Ends every copy: this peer takes nothing new."""
        self.end(self)

    def settle(self) -> None:
        """Ends copies until leases and all that is left are within the limits: of those in the way the one that lacks
        most first. Copies of layers that are not held end, too."""
        held = self._holdings.held
        self.end(copy for copy in self if missing_spans(copy.span, held))
        while self._copies:
            excess = self._rules.excess(tuple(self._table), tuple(self), self._holdings)
            if not excess:
                return
            self.end((max(excess, key=lambda copy: self._behind_tokens[copy.key.session]),))

    def expire(self, now: float) -> None:
        """Ends copies that nobody has renewed."""
        self.end(copy for copy in self if copy.expires_s <= now)

    def _remove(self, copy: Lease) -> None:
        del self._copies[copy.key.session]
        del self._behind_tokens[copy.key.session]

    def _refuse_session(self, key: LeaseKey, span: Span) -> Refused | None:
        if self._table.of_session(key.session) is not None:
            return Refused(
                "epoch", "this peer is a hop of the session, and cannot be a hop's partner too", 0.0
            )
        if missing := missing_spans(span, self._holdings.held):
            layers = ", ".join(map(str, missing))
            return Refused("span", f"layers {layers} are not held here: nothing is loaded for a copy", 0.0)
        return None


def _nobody(_: Lease) -> None:
    return None
