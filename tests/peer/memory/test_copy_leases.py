"""Second copies take what leases leave, are gone before a lease is refused, and become leases without asking."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.properties import examples
from support.swarms.lease_books import SPEC, TTL_S, book, granted, key, refused

from molink.peer.memory.lease import Lease, LeaseKey, Refused
from molink.peer.memory.leases import LeaseBook, announced_free_bytes
from molink.shards.spec import Span

FIRST = Span(0, 1)


def loaded_book(kv: int = 96, **options: int) -> LeaseBook:
    leases = book(kv, **options)
    leases.loaded(SPEC.whole)
    return leases


def copied(answer: Lease | Refused) -> Lease:
    assert isinstance(answer, Lease), answer
    return answer


def ended_of(leases: LeaseBook) -> list[LeaseKey]:
    ended: list[LeaseKey] = []
    leases.copies.tell_ended(lambda copy: ended.append(copy.key))
    return ended


def test_a_copy_is_announced_neither_as_a_session_nor_as_memory_that_is_taken() -> None:
    leases = loaded_book()
    before = announced_free_bytes(SPEC, None, leases)
    copied(leases.copies.request(key(1), FIRST, 80, "alice", 0.0))
    assert announced_free_bytes(SPEC, None, leases) == before
    assert leases.leases == ()
    assert leases.free_kv_bytes == 96


def test_the_copy_that_lacks_most_goes_before_a_lease_is_refused() -> None:
    leases = loaded_book()
    ended = ended_of(leases)
    for number, behind in ((1, 5), (2, 20), (3, 0)):
        copied(leases.copies.request(key(number), FIRST, 32, "alice", 0.0))
        leases.copies.record_lag(key(number).session, behind)
    granted(leases.request(key(4), FIRST, 32, "bob", 1.0))
    assert ended == [key(2)]
    granted(leases.request(key(5), FIRST, 64, "carol", 1.0))
    assert ended == [key(2), key(1), key(3)]


def test_a_copy_takes_nothing_from_anybody() -> None:
    leases = loaded_book()
    granted(leases.request(key(1), FIRST, 48, "alice", 0.0))
    copied(leases.copies.request(key(2), FIRST, 48, "alice", 0.0))
    assert leases.copies.request(key(3), FIRST, 1, "bob", 0.0).code == "memory"  # type: ignore[union-attr]
    cold = book()
    assert cold.copies.request(key(1), FIRST, 1, "bob", 0.0).code == "span"  # type: ignore[union-attr]
    assert cold.loading == ()


def test_a_promoted_copy_is_the_session_s_lease_however_full_the_peer_is() -> None:
    leases = loaded_book(max_sessions=3, max_sessions_per_owner=2)
    copied(leases.copies.request(key(1), FIRST, 48, "alice", 0.0))
    granted(leases.request(key(2), FIRST, 48, "bob", 0.0))
    answer = granted(leases.request(key(1, epoch=2), FIRST, 48, "alice", 3.0))
    assert answer.promoted is not None
    assert answer.lease.key == key(1, epoch=2)
    assert answer.lease.expires_s == 3.0 + TTL_S
    assert len(leases.copies) == 0
    assert {lease.key for lease in leases.leases} == {key(2), key(1, epoch=2)}


def test_a_copy_of_another_span_or_size_is_no_lease_and_makes_way() -> None:
    leases = loaded_book(1000)
    ended = ended_of(leases)
    copied(leases.copies.request(key(1), FIRST, 50, "alice", 0.0))
    answer = granted(leases.request(key(1, epoch=2), Span(0, 2), 50, "alice", 0.0))
    assert answer.promoted is None
    assert ended == [key(1)]


def test_a_hop_s_peer_cannot_be_its_partner_and_no_other_client_can_take_its_copy() -> None:
    leases = loaded_book(1000)
    granted(leases.request(key(1), FIRST, 50, "alice", 0.0))
    assert leases.copies.request(key(1, epoch=2), FIRST, 50, "alice", 0.0).code == "epoch"  # type: ignore[union-attr]
    copied(leases.copies.request(key(2), FIRST, 50, "alice", 0.0))
    assert leases.copies.request(key(2), FIRST, 50, "mallory", 0.0).code == "epoch"  # type: ignore[union-attr]
    refused(leases.request(key(2, epoch=2), FIRST, 50, "mallory", 0.0), "epoch")
    refused(leases.request(key(2), FIRST, 50, "alice", 0.0), "epoch")
    assert len(leases.copies) == 1


def test_drain_pause_and_moves_of_layers_end_copies_and_wait_for_none() -> None:
    for end in (
        lambda leases: leases.gate.drain(),
        lambda leases: leases.gate.close(Refused("memory", "full", 1.0)),
        lambda leases: leases.drop(Span(0, 2)),
    ):
        leases = loaded_book(1000)
        ended = ended_of(leases)
        copied(leases.copies.request(key(1), FIRST, 50, "alice", 0.0))
        end(leases)
        assert ended == [key(1)]
        assert isinstance(leases.copies.request(key(1), FIRST, 50, "alice", 0.0), Refused)


def test_a_copy_lasts_as_long_as_it_is_renewed_and_a_later_epoch_keeps_it() -> None:
    leases = loaded_book(1000)
    ended = ended_of(leases)
    copied(leases.copies.request(key(1), FIRST, 50, "alice", 0.0))
    assert leases.copies.renew(key(1), 20.0)
    assert not leases.copies.renew(key(1, epoch=2), 20.0)
    leases.copies.expire(TTL_S + 1)
    assert copied(leases.copies.request(key(1, epoch=2), FIRST, 50, "alice", 40.0)).key.epoch == 2
    assert ended == []
    leases.copies.expire(40.0 + TTL_S)
    assert ended == [key(1, epoch=2)]


SESSIONS = st.integers(1, 5)
OWNERS = st.sampled_from(("alice", "bob"))
SPANS = st.sampled_from((Span(0, 1), Span(0, 3), Span(3, 6)))


class CopyMachine(RuleBasedStateMachine):
    """A book with copies beside one without: of leases both say the same."""

    @initialize(kv=st.integers(50, 600), most=st.integers(1, 6), owned=st.integers(1, 4))
    def begin(self, kv: int, most: int, owned: int) -> None:
        options = {"max_sessions": most, "max_sessions_per_owner": owned}
        self.book, self.plain = (loaded_book(kv, **options) for _ in range(2))
        self.most, self.owned, self.now = most, owned, 0.0
        self.epochs: dict[bytes, int] = {}

    @rule(number=SESSIONS, span=SPANS, tokens=st.integers(1, 60), owner=OWNERS, behind=st.integers(0, 60))
    def keep_copy(self, number: int, span: Span, tokens: int, owner: str, behind: int) -> None:
        before = announced_free_bytes(SPEC, None, self.book)
        asked = key(number, self.epochs.get(key(number).session, 1))
        self.book.copies.request(asked, span, tokens, owner, self.now)
        self.book.copies.record_lag(asked.session, behind)
        assert announced_free_bytes(SPEC, None, self.book) == before

    @rule(number=SESSIONS, span=SPANS, tokens=st.integers(1, 60), owner=OWNERS)
    def lease(self, number: int, span: Span, tokens: int, owner: str) -> None:
        asked = LeaseKey(key(number).session, self.epochs.get(key(number).session, 1) + 1)
        if self.book.copies.of_session(asked.session) is not None:
            return  # a session with a copy is promoted, below
        self.epochs[asked.session] = asked.epoch
        answers = [one.request(asked, span, tokens, owner, self.now) for one in (self.book, self.plain)]
        assert answers[0] == answers[1]

    @rule(number=SESSIONS)
    def promote(self, number: int) -> None:
        copy = self.book.copies.of_session(key(number).session)
        if copy is None:
            return
        asked = LeaseKey(copy.key.session, copy.key.epoch + 1)
        self.epochs[asked.session] = asked.epoch
        answer = granted(self.book.request(asked, copy.span, copy.tokens, copy.owner, self.now))
        assert answer.promoted == copy
        assert (answer.replaced, answer.evicted, answer.to_load) == (None, (), ())
        for lease in self.book.leases:  # in the other book it was never here
            if lease.key == asked:
                self.book.release(asked)

    @rule(number=SESSIONS)
    def release(self, number: int) -> None:
        asked = LeaseKey(key(number).session, self.epochs.get(key(number).session, 1))
        assert self.book.release(asked) == self.plain.release(asked)

    @rule(passed_s=st.floats(0.0, 40.0))
    def expire(self, passed_s: float) -> None:
        self.now += passed_s
        assert self.book.expire(self.now) == self.plain.expire(self.now)
        self.book.copies.expire(self.now)

    @invariant()
    def leases_and_copies_are_within_every_limit(self) -> None:
        if not hasattr(self, "book"):
            return
        everything = (*self.book.leases, *self.book.copies)
        assert sum(one.kv_bytes for one in everything) <= self.book.kv_limit_bytes
        assert len(everything) <= self.most
        for owner in ("alice", "bob"):
            assert sum(one.owner == owner for one in everything) <= self.owned
        assert self.book.free_kv_bytes == self.plain.free_kv_bytes
        assert self.book.free_weight_bytes == self.plain.free_weight_bytes


TestCopyMachine = CopyMachine.TestCase
TestCopyMachine.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
