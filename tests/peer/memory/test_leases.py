"""The peer's arbitration of its memory: it never promises what it cannot keep, and loses no lease."""

from collections.abc import Collection

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.properties import examples
from support.swarms.lease_books import SPEC, TTL_S, book, granted, key, refused

from molink.peer.memory.lease_rules import KEPT_PART
from molink.peer.memory.lease_table import ABANDONED_S, IDLE_S, SPARED_S, LeaseTimes
from molink.peer.memory.leases import (
    Granted,
    Lease,
    LeaseBook,
    LeaseKey,
    Refused,
)
from molink.peer.memory.memory import MemoryPlan
from molink.shards.spec import Span, merge_spans


def test_a_cold_lease_is_ready_when_all_of_its_layers_are_loaded() -> None:
    leases = book()
    answer = granted(leases.request(key(1), Span(1, 4), 10, "alice", 5.0))
    assert answer.to_load == (Span(1, 4),)
    assert answer.lease == Lease(key(1), Span(1, 4), 10, SPEC.kv_bytes(Span(1, 4), 10), 5.0 + TTL_S, "alice")
    assert leases.loading == (Span(1, 4),)
    assert leases.held == ()
    leases.loaded(Span(1, 3))
    assert not leases.ready(key(1))
    leases.loaded(Span(3, 4))
    assert leases.ready(key(1))
    assert leases.held == (Span(1, 4),)
    assert leases.loading == ()
    assert not leases.ready(key(1, epoch=2))
    assert not leases.ready(key(2))


def test_two_clients_that_want_the_same_cold_layers_share_one_load() -> None:
    leases = book()
    assert granted(leases.request(key(1), Span(0, 3), 1, "alice", 0.0)).to_load == (Span(0, 3),)
    assert granted(leases.request(key(2), Span(1, 5), 1, "bob", 0.0)).to_load == (Span(3, 5),)
    leases.loaded(Span(0, 3))
    assert granted(leases.request(key(3), Span(0, 3), 1, "carol", 0.0)).to_load == ()
    assert leases.ready(key(3))


def test_of_two_clients_that_race_for_the_same_memory_one_is_told_when_to_come_back() -> None:
    leases = book(kv=100)
    leases.loaded(SPEC.whole)
    granted(leases.request(key(1), Span(0, 1), 64, "alice", 0.0))
    refusal = refused(leases.request(key(2), Span(0, 1), 64, "bob", 12.0), "memory")
    assert refusal.retry_after_s == pytest.approx(TTL_S - 12.0)
    assert "64 B of KV cache" in refusal.detail
    leases.release(key(1))
    granted(leases.request(key(2), Span(0, 1), 64, "bob", 12.0))


def test_the_hint_is_when_enough_memory_will_have_run_out() -> None:
    leases = book(kv=100)
    leases.loaded(SPEC.whole)
    for session, arrived_s in ((1, 0.0), (2, 10.0), (3, 20.0)):
        granted(leases.request(key(session), Span(0, 1), 30, f"client {session}", arrived_s))
    refusal = refused(leases.request(key(4), Span(0, 1), 50, "bob", 25.0), "memory")
    assert refusal.retry_after_s == pytest.approx(10.0 + TTL_S - 25.0)
    for session in (1, 2, 3):
        leases.used(key(session), 995.0)
    overdue = refused(leases.request(key(4), Span(0, 1), 20, "bob", 1000.0), "memory")
    assert 0 < overdue.retry_after_s < 1
    never = refused(leases.request(key(4), Span(0, 1), 150, "bob", 25.0), "memory")
    assert never.retry_after_s == TTL_S


def test_weights_stay_within_their_limit_even_where_memory_is_free() -> None:
    limit = SPEC.weight_bytes(Span(1, 3))
    leases = LeaseBook(SPEC, MemoryPlan(10_000, 10, limit))
    refused(leases.request(key(1), Span(1, 4), 1, "alice", 0.0), "memory")
    granted(leases.request(key(1), Span(1, 3), 1, "alice", 0.0))
    assert leases.free_weight_bytes == 0
    assert leases.free_kv_bytes == 10_000 - 10 - limit - SPEC.kv_bytes(Span(1, 3), 1)


def test_embedding_and_head_are_counted_with_the_layers_that_carry_them() -> None:
    leases = book(kv=0)
    assert leases.preload(SPEC.whole, 0.0) == (SPEC.whole,)
    assert leases.free_weight_bytes == 0
    assert leases.free_kv_bytes == 0


def test_the_same_request_again_has_the_same_lease_and_orders_nothing_twice() -> None:
    leases = book()
    first = granted(leases.request(key(1), Span(0, 2), 10, "alice", 0.0))
    again = granted(leases.request(key(1), Span(0, 2), 10, "alice", 9.0))
    assert again == Granted(first.lease, ())
    leases.gate.drain()
    assert leases.request(key(1), Span(0, 2), 10, "alice", 9.0) == again
    assert leases.leases == (first.lease,)


def test_the_same_epoch_cannot_change_its_mind() -> None:
    leases = book()
    first = granted(leases.request(key(1), Span(0, 2), 10, "alice", 0.0))
    for span, tokens in ((Span(0, 3), 10), (Span(0, 2), 11)):
        assert "new epoch" in refused(leases.request(key(1), span, tokens, "alice", 0.0), "epoch").detail
    assert leases.leases == (first.lease,)


def test_a_higher_epoch_replaces_the_session_s_lease_whose_memory_is_free_for_it() -> None:
    leases = book(kv=100)
    leases.loaded(SPEC.whole)
    older = granted(leases.request(key(1), Span(0, 1), 80, "alice", 0.0)).lease
    answer = granted(leases.request(key(1, epoch=2), Span(0, 1), 96, "alice", 1.0))
    assert answer.replaced == older
    assert leases.leases == (answer.lease,)
    assert leases.free_kv_bytes == 100 - 96
    assert leases.release(key(1)) is None
    assert not leases.renew(key(1), 2.0)
    refused(leases.request(key(1), Span(0, 1), 80, "alice", 2.0), "epoch")


def test_a_refused_higher_epoch_leaves_the_older_lease_as_it_was() -> None:
    leases = book(kv=250)
    granted(leases.request(key(9), SPEC.whole, 1, "bob", 0.0))
    older = granted(leases.request(key(1), Span(0, 1), 80, "alice", 0.0)).lease
    refused(leases.request(key(1, epoch=2), Span(0, 1), 150, "alice", 1.0), "memory")
    assert older in leases.leases


def test_a_session_cannot_be_taken_over_by_another_client() -> None:
    leases = book()
    mine = granted(leases.request(key(1), Span(0, 1), 10, "alice", 0.0)).lease
    refused(leases.request(key(1, epoch=7), Span(0, 1), 10, "mallory", 0.0), "epoch")
    refused(leases.request(key(1), Span(0, 1), 10, "mallory", 0.0), "epoch")
    assert leases.leases == (mine,)


def test_a_lease_expires_unless_it_is_renewed() -> None:
    leases = book()
    granted(leases.request(key(1), Span(0, 1), 10, "alice", 0.0))
    kept = granted(leases.request(key(2), Span(0, 1), 10, "alice", 0.0)).lease
    assert leases.renew(key(2), 20.0)
    assert leases.expire(TTL_S - 0.1) == ()
    assert [lease.key for lease in leases.expire(TTL_S)] == [key(1)]
    assert [lease.key for lease in leases.leases] == [kept.key]
    assert leases.leases[0].expires_s == 20.0 + TTL_S
    assert not leases.renew(key(1), TTL_S)


def test_renewing_never_shortens_a_lease() -> None:
    leases = book()
    granted(leases.request(key(1), Span(0, 1), 10, "alice", 100.0))
    assert leases.renew(key(1), 50.0)
    assert leases.leases[0].expires_s == 100.0 + TTL_S


def test_a_failed_load_gives_its_memory_back_and_ends_the_leases_that_waited_for_it() -> None:
    leases = book()
    leases.loaded(Span(0, 1))
    warm = granted(leases.request(key(1), Span(0, 1), 1, "alice", 0.0)).lease
    waiting = granted(leases.request(key(2), Span(0, 3), 1, "alice", 0.0))
    sharing = granted(leases.request(key(3), Span(2, 4), 1, "bob", 0.0))
    free = leases.free_weight_bytes
    assert leases.load_failed(Span(1, 3)) == (waiting.lease, sharing.lease)
    assert leases.leases == (warm,)
    assert leases.loading == (Span(3, 4),)
    assert leases.free_weight_bytes == free + SPEC.weight_bytes(Span(1, 3))
    assert leases.load_failed(Span(1, 3)) == ()
    assert leases.ready(key(1))


def test_a_load_that_nobody_ordered_counts_only_if_it_fits() -> None:
    leases = LeaseBook(SPEC, MemoryPlan(500, 10, 250))
    leases.loaded(Span(1, 3))
    assert leases.held == (Span(1, 3),)
    with pytest.raises(ValueError, match="not ordered"):
        leases.loaded(Span(1, 4))
    with pytest.raises(ValueError, match="not within"):
        leases.loaded(Span(5, 9))
    assert leases.held == (Span(1, 3),)


def test_layers_are_dropped_only_when_no_lease_and_no_load_needs_them() -> None:
    leases = book()
    leases.loaded(Span(0, 4))
    granted(leases.request(key(1), Span(2, 3), 1, "alice", 0.0))
    with pytest.raises(ValueError, match=r"alice on \[2, 3\)"):
        leases.drop(Span(0, 3))
    leases.drop(Span(3, 4))
    leases.release(key(1))
    leases.drop(Span(1, 3))
    assert leases.held == (Span(0, 1),)
    leases.preload(Span(4, 6), 0.0)
    with pytest.raises(ValueError, match="load"):
        leases.drop(Span(0, 6))


def test_of_several_spans_all_are_dropped_or_none() -> None:
    leases = book()
    leases.loaded(SPEC.whole)
    granted(leases.request(key(1), Span(4, 5), 1, "alice", 0.0))
    with pytest.raises(ValueError, match="1 leases need them"):
        leases.drop(Span(0, 2), Span(3, 5))
    assert leases.held == (SPEC.whole,)
    leases.drop(Span(0, 2), Span(5, 6))
    assert leases.held == (Span(2, 5),)
    assert leases.free_weight_bytes == SPEC.weight_bytes(Span(0, 2)) + SPEC.weight_bytes(Span(5, 6))


def test_a_draining_peer_refuses_what_is_new_and_keeps_what_it_granted() -> None:
    leases = book()
    granted(leases.request(key(1), Span(0, 1), 1, "alice", 0.0))
    leases.gate.drain()
    assert leases.gate.is_closed
    refused(leases.request(key(2), Span(0, 1), 1, "alice", 0.0), "draining")
    refused(leases.request(key(1, epoch=2), Span(0, 1), 2, "alice", 0.0), "draining")
    refused(leases.preload(Span(1, 2), 0.0), "draining")
    assert leases.renew(key(1), 1.0)
    assert leases.free_kv_bytes == leases.free_weight_bytes == 0
    leases.loaded(Span(0, 1))
    assert leases.ready(key(1))


def test_a_session_goes_on_at_a_draining_peer_after_the_loss_of_another_hop() -> None:
    leases = book()
    first = granted(leases.request(key(1), Span(0, 1), 1, "alice", 0.0))
    leases.gate.drain()
    again = granted(leases.request(key(1, epoch=2), Span(0, 1), 1, "alice", 0.0))
    assert (again.replaced, leases.leases) == (first.lease, (again.lease,))


def test_sessions_are_limited_in_all_and_for_each_client() -> None:
    leases = book(max_sessions=3, max_sessions_per_owner=2)
    for session in (1, 2):
        granted(leases.request(key(session), Span(0, 1), 1, "alice", session))
    greedy = refused(leases.request(key(3), Span(0, 1), 1, "alice", 11.0), "busy")
    assert greedy.retry_after_s == pytest.approx(1.0 + TTL_S - 11.0)
    granted(leases.request(key(3), Span(0, 1), 1, "bob", 0.0))
    refused(leases.request(key(4), Span(0, 1), 1, "carol", 0.0), "busy")
    assert leases.free_kv_bytes == leases.free_weight_bytes == 0
    granted(leases.request(key(1, epoch=2), Span(0, 1), 2, "alice", 0.0))


@pytest.mark.parametrize(
    ("span", "tokens"), [(Span(0, 3), 1), (Span(3, 6), 1), (Span(2, 3), 0), (Span(2, 3), 201)]
)
def test_spans_and_lengths_that_are_not_served_are_refused(span: Span, tokens: int) -> None:
    leases = LeaseBook(SPEC, MemoryPlan(10_000, 10, 9_000), span_limit=Span(1, 5))
    assert refused(leases.request(key(1), span, tokens, "alice", 0.0), "span").retry_after_s == 0.0
    assert leases.leases == ()


def test_a_span_beyond_the_model_is_refused_whatever_the_limit() -> None:
    leases = LeaseBook(SPEC, MemoryPlan(10_000, 10, 9_000), span_limit=Span(0, 50))
    refused(leases.request(key(1), Span(4, 9), 1, "alice", 0.0), "span")


SPANS = (
    st.tuples(st.integers(0, 5), st.integers(1, 6))
    .filter(lambda ends: ends[0] < ends[1])
    .map(lambda e: Span(*e))
)
KEYS = st.builds(key, st.integers(0, 4), st.integers(1, 3))
OWNERS = st.sampled_from(["alice", "bob"])


class LeaseMachine(RuleBasedStateMachine):
    """A book beside a plain account of what was granted and what was reported to have ended."""

    @initialize(
        weight_limit=st.integers(100, 800),
        kv=st.integers(0, 1200),
        max_sessions=st.integers(1, 4),
        owned=st.integers(1, 3),
    )
    def start(self, weight_limit: int, kv: int, max_sessions: int, owned: int) -> None:
        self.plan = MemoryPlan(weight_limit + kv + 50, 50, weight_limit)
        self.max_sessions = max_sessions
        self.owned = owned
        self.book = LeaseBook(
            SPEC,
            self.plan,
            max_sessions=max_sessions,
            max_sessions_per_owner=owned,
            times=LeaseTimes(ttl_s=TTL_S),
        )
        self.leases: dict[LeaseKey, Lease] = {}
        self.held: set[int] = set()
        self.ordered: list[Span] = []
        self.now = 0.0
        self.draining = False
        self.used: dict[LeaseKey, float] = {}
        self.known: set[str] = set()
        self.abandoned: set[LeaseKey] = set()
        self.free_at_start = (self.book.free_weight_bytes, self.book.free_kv_bytes)

    def loading(self) -> set[int]:
        return {layer for span in self.ordered for layer in span}

    def weights(self, layers: set[int]) -> int:
        return sum(SPEC.weight_bytes(Span(layer, layer + 1)) for layer in layers)

    def ended(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            assert self.leases.pop(lease.key) == lease

    def idle(self, least_s: float) -> set[LeaseKey]:
        return {asked for asked in self.leases if self.now - self.used[asked] >= least_s}

    def kept_bytes(self, owner: str) -> int:
        """Of the KV cache, for others than this one."""
        if owner in self.known or all(lease.owner != owner for lease in self.leases.values()):
            return 0
        return max(0, self.book.kv_limit_bytes) // KEPT_PART

    def fits(self, span: Span, kv_bytes: int, gone: Collection[LeaseKey] = ()) -> bool:
        weights = self.weights(self.held | self.loading() | set(span))
        kv = sum(lease.kv_bytes for lease in self.leases.values() if lease.key not in gone)
        return (
            weights <= self.plan.weight_limit_bytes and weights + kv + kv_bytes <= self.plan.total_bytes - 50
        )

    def expected(self, asked: LeaseKey, older: Lease | None, owner: str, tokens: int, span: Span) -> str:
        if older is not None and (older.owner != owner or asked.epoch < older.key.epoch):
            return "epoch"
        if older is not None and asked.epoch == older.key.epoch:
            return "again" if (older.span, older.tokens) == (span, tokens) else "epoch"
        if self.draining and (older is None or (older.span, older.tokens) != (span, tokens)):
            return "draining"
        gone = self.idle(SPARED_S) - {older.key if older is not None else None}
        left = [lease for lease in self.leases.values() if lease.key not in gone]
        owned = sum(lease.owner == owner for lease in left)
        if older is None and (len(left) >= self.max_sessions or owned >= self.owned):
            return "busy or memory"
        wanted = SPEC.kv_bytes(span, tokens) - (older.kv_bytes if older is not None else 0)
        if not self.fits(span, wanted, gone):
            return "busy or memory"
        return "granted" if self.fits(span, wanted + self.kept_bytes(owner), gone) else "any"

    @rule(asked=KEYS, span=SPANS, tokens=st.integers(1, 60), owner=OWNERS)
    def request(self, asked: LeaseKey, span: Span, tokens: int, owner: str) -> None:
        older = next((lease for lease in self.leases.values() if lease.key.session == asked.session), None)
        expected = self.expected(asked, older, owner, tokens, span)
        answer = self.book.request(asked, span, tokens, owner, self.now)
        if isinstance(answer, Refused):
            assert answer.code in expected or (expected == "any" and answer.code == "memory")
            assert 0 <= answer.retry_after_s <= TTL_S
            assert (answer.retry_after_s > 0) == (answer.code in {"memory", "busy"})
        elif expected == "again":
            assert answer == Granted(self.leases[asked], ())
        else:
            assert expected in {"granted", "any"}
            assert {lease.key for lease in answer.evicted} <= self.idle(SPARED_S)
            self.ended(answer.evicted)
            self.used[asked] = self.now
            assert answer.replaced == older
            if older is not None:
                self.ended((older,))
            cold = set(span) - self.held - self.loading()
            assert {layer for part in answer.to_load for layer in part} == cold
            self.leases[asked] = answer.lease
            self.abandoned.discard(asked)
            self.ordered.extend(answer.to_load)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), span=SPANS, tokens=st.integers(1, 60))
    def request_the_next_epoch(self, data: st.DataObject, span: Span, tokens: int) -> None:
        older = data.draw(st.sampled_from(sorted(self.leases.values(), key=lambda lease: lease.key.session)))
        self.request(LeaseKey(older.key.session, older.key.epoch + 1), span, tokens, older.owner)

    @rule(span=SPANS)
    def preload(self, span: Span) -> None:
        answer = self.book.preload(span, self.now)
        if isinstance(answer, Refused):
            assert self.draining or not self.fits(span, 0)
        else:
            assert {layer for part in answer for layer in part} == set(span) - self.held - self.loading()
            self.ordered.extend(answer)

    @rule(asked=KEYS)
    def renew(self, asked: LeaseKey) -> None:
        used = asked in self.leases and self.now - self.used[asked] < IDLE_S
        assert self.book.renew(asked, self.now) == used
        self.leases.update({lease.key: lease for lease in self.book.leases if lease.key == asked})

    @rule(asked=KEYS)
    def use(self, asked: LeaseKey) -> None:
        self.book.used(asked, self.now)
        if asked in self.leases:
            if asked not in self.abandoned:
                self.used[asked] = self.now
            self.known.add(self.leases[asked].owner)

    @rule(asked=KEYS)
    def release(self, asked: LeaseKey) -> None:
        lease = self.book.release(asked)
        assert (lease is not None) == (asked in self.leases)
        self.ended(() if lease is None else (lease,))

    @rule(owner=OWNERS)
    def abandon_owner(self, owner: str) -> None:
        theirs = [asked for asked, lease in self.leases.items() if lease.owner == owner]
        left = self.book.abandon(theirs, self.now)
        self.abandoned |= {*theirs}
        assert {lease.key for lease in left} == {
            asked for asked, lease in self.leases.items() if lease.owner == owner
        }
        for lease in self.book.leases:
            if lease.owner == owner:
                assert lease.expires_s <= self.now + ABANDONED_S
                self.leases[lease.key] = lease
                self.used[lease.key] = min(self.used[lease.key], self.now - SPARED_S)

    @rule(passed_s=st.floats(0.0, 40.0))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        self.ended(self.book.expire(self.now))
        assert all(lease.expires_s > self.now for lease in self.leases.values())
        assert not self.idle(IDLE_S)

    @precondition(lambda self: self.ordered)
    @rule(data=st.data(), works=st.booleans())
    def load_ends(self, data: st.DataObject, works: bool) -> None:
        span = self.ordered.pop(data.draw(st.integers(0, len(self.ordered) - 1)))
        if works:
            self.book.loaded(span)
            self.held |= set(span)
        else:
            ended = self.book.load_failed(span)
            self.ended(ended)
            assert all(set(lease.span) & set(span) for lease in ended)

    @precondition(lambda self: self.ordered)
    @rule()
    def all_loads_end_well(self) -> None:
        for span in self.ordered:
            self.book.loaded(span)
            self.held |= set(span)
        self.ordered.clear()
        assert all(self.book.ready(asked) for asked in self.leases)

    @rule(spans=st.lists(SPANS, max_size=3))
    def drop(self, spans: list[Span]) -> None:
        needed = {layer for lease in self.leases.values() for layer in lease.span} | self.loading()
        dropped = {layer for span in spans for layer in span}
        if needed & dropped:
            with pytest.raises(ValueError, match="cannot be dropped"):
                self.book.drop(*spans)
        else:
            self.book.drop(*spans)
            self.held -= dropped

    @precondition(lambda self: not self.draining and self.now > 60)
    @rule()
    def drain(self) -> None:
        self.book.gate.drain()
        self.draining = True

    @invariant()
    def memory_is_never_over_committed(self) -> None:
        weights = self.weights(self.held | self.loading())
        kv = sum(lease.kv_bytes for lease in self.book.leases)
        assert weights <= self.plan.weight_limit_bytes
        assert self.plan.workspace_bytes + weights + kv <= self.plan.total_bytes
        free = self.plan.total_bytes - self.plan.workspace_bytes - weights - kv
        free_weights = min(self.plan.weight_limit_bytes - weights, free)
        is_full = self.draining or len(self.leases) >= self.max_sessions
        assert self.book.free_weight_bytes == (0 if is_full else free_weights)
        standing = self.leases.keys() - self.abandoned
        spare = sum(lease.kv_bytes for asked, lease in self.leases.items() if asked not in standing)
        is_full = self.draining or len(standing) >= self.max_sessions
        assert self.book.free_kv_bytes == (0 if is_full else free + spare)

    @invariant()
    def no_lease_is_lost_and_each_can_be_honoured(self) -> None:
        assert {lease.key: lease for lease in self.book.leases} == self.leases
        for asked, lease in self.leases.items():
            assert set(lease.span) <= self.held | self.loading()
            assert self.book.ready(asked) == (set(lease.span) <= self.held)

    @invariant()
    def layers_are_held_or_loading_but_not_both(self) -> None:
        assert {layer for span in self.book.held for layer in span} == self.held
        assert {layer for span in self.book.loading for layer in span} == self.loading()
        assert not self.held & self.loading()
        assert self.book.held == merge_spans(self.book.held)

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for span in self.ordered:
            self.book.loaded(span)
        self.ended(tuple(filter(None, map(self.book.release, tuple(self.leases)))))
        self.book.drop(SPEC.whole)
        assert self.leases == {}
        assert self.book.held == self.book.loading == self.book.leases == ()
        if not self.draining:
            assert (self.book.free_weight_bytes, self.book.free_kv_bytes) == self.free_at_start


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
