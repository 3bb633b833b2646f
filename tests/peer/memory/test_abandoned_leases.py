"""Leases of a client whose link has closed: it may come back for them, and nobody else waits for that."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.properties import examples
from support.swarms.lease_books import SPEC, book, granted, key

from molink.peer.memory.lease import LeaseKey, Refused
from molink.peer.memory.lease_table import ABANDONED_S
from molink.peer.memory.leases import LeaseBook
from molink.shards.spec import Span


def full_book(kv: int, **options: int) -> LeaseBook:
    """One that holds all layers, and has so much room beside them."""
    leases = book(kv, **options)
    leases.preload(SPEC.whole, 0.0)
    leases.loaded(SPEC.whole)
    return leases


def test_leases_of_a_client_that_is_gone_end_soon_and_those_of_others_do_not() -> None:
    leases = book()
    mine = [granted(leases.request(key(n), Span(0, 1), 10, "alice", 0.0)).lease for n in range(3)]
    other = granted(leases.request(key(9), Span(0, 1), 10, "bob", 0.0)).lease
    assert leases.abandon([key(1), key(0), key(8), key(2)], 5.0) == (mine[1], mine[0], mine[2])
    assert leases.abandon([key(0, epoch=2)], 5.0) == ()
    assert leases.expire(5.0 + ABANDONED_S - 0.1) == ()
    assert {lease.key for lease in leases.expire(5.0 + ABANDONED_S)} == {lease.key for lease in mine}
    assert leases.leases == (other,)


def test_leases_of_a_client_that_is_gone_make_room_at_once() -> None:
    leases = book()
    mine = granted(leases.request(key(1), Span(0, 1), 10, "alice", 0.0)).lease
    for session in range(2, 100):
        answer = leases.request(key(session), Span(0, 1), 10, f"bob {session}", 0.0)
        if isinstance(answer, Refused):
            break
    assert isinstance(answer, Refused)
    leases.abandon([mine.key], 1.0)
    again = granted(leases.request(key(session), Span(0, 1), 10, f"bob {session}", 1.0))
    assert [lease.key for lease in again.evicted] == [mine.key]


def test_what_a_client_did_before_it_was_gone_is_no_use_of_its_leases_afterwards() -> None:
    leases = full_book(32)
    mine = granted(leases.request(key(1), Span(0, 1), 20, "alice", 0.0)).lease
    leases.abandon([mine.key], 1.0)
    leases.used(mine.key, 1.5)
    assert granted(leases.request(key(2), Span(0, 1), 20, "bob", 2.0)).evicted[0].key == mine.key


def test_a_client_that_comes_back_has_its_lease_again() -> None:
    leases = full_book(32)
    granted(leases.request(key(1), Span(0, 1), 20, "alice", 0.0))
    leases.abandon([key(1)], 1.0)
    assert leases.free_kv_bytes == 32
    again = granted(leases.request(key(1, epoch=2), Span(0, 1), 20, "alice", 1.0 + ABANDONED_S - 1))
    assert leases.free_kv_bytes == 0
    assert leases.expire(1.0 + ABANDONED_S + 1) == ()
    assert leases.leases == (again.lease,)
    assert isinstance(leases.request(key(2), Span(0, 1), 20, "bob", 12.0), Refused)


CLIENTS = st.sampled_from([f"client {number}" for number in range(6)])


class VanishingClients(RuleBasedStateMachine):
    """A peer whose clients vanish, beside one that forgets them at once: in nothing that is leased do they differ."""

    @initialize(kv=st.integers(60, 800), sessions=st.integers(4, 12), owned=st.integers(1, 4))
    def open(self, kv: int, sessions: int, owned: int) -> None:
        limits = {
            "max_sessions": sessions,
            "max_sessions_per_owner": owned,
            "max_sessions_per_network": sessions - 1,
        }
        self.book, self.other = full_book(kv, **limits), full_book(kv, **limits)
        self.gone: set[LeaseKey] = set()
        self.now = 0.0
        self.sessions = 0

    @rule(client=CLIENTS, tokens=st.integers(1, 40), at_home=st.booleans())
    def request(self, client: str, tokens: int, at_home: bool) -> None:
        self.sessions += 1
        asked = LeaseKey(self.sessions.to_bytes(16), 1)
        network = "home" if at_home else client
        answer, expected = (
            one.request(asked, Span(0, 2), tokens, client, self.now, network)
            for one in (self.book, self.other)
        )
        if isinstance(expected, Refused):
            assert isinstance(answer, Refused)
            return
        ended = {lease.key for lease in granted(answer).evicted}
        assert ended - self.gone == {lease.key for lease in granted(expected).evicted}
        self.gone -= ended

    @rule(client=CLIENTS)
    def vanish(self, client: str) -> None:
        theirs = [lease.key for lease in self.other.leases if lease.owner == client]
        self.gone |= {lease.key for lease in self.book.abandon(theirs, self.now)}
        for one in theirs:
            self.other.release(one)

    @rule(data=st.data(), passed_s=st.floats(0.0, 12.0))
    def step(self, data: st.DataObject, passed_s: float) -> None:
        self.now += passed_s
        for asked in self.gone:
            self.book.used(asked, self.now)  # as is noted now and then, behind the times
            self.other.used(asked, self.now)
        if left := [lease.key for lease in self.other.leases]:
            using = data.draw(st.sampled_from(left))
            for one in (self.book, self.other):
                one.used(using, self.now)
                one.renew(using, self.now)

    @rule()
    def expire(self) -> None:
        kept = {lease.key for lease in self.book.expire(self.now)}
        assert kept - self.gone == {lease.key for lease in self.other.expire(self.now)}
        self.gone -= kept

    @invariant()
    def differ_in_what_is_kept_alone(self) -> None:
        if not hasattr(self, "book"):
            return
        kept = {lease.key for lease in self.book.leases}
        assert kept == self.gone | {lease.key for lease in self.other.leases}
        assert self.book.free_kv_bytes == self.other.free_kv_bytes
        assert sum(lease.kv_bytes for lease in self.book.leases) <= self.book.kv_limit_bytes


TestVanishingClients = VanishingClients.TestCase
TestVanishingClients.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
