"""Leases of a client whose link has closed: it may come back for them, and nobody else waits for that."""

from support.swarms.lease_books import book, granted, key

from molink.peer.memory.lease import Refused
from molink.peer.memory.lease_table import ABANDONED_S
from molink.shards.spec import Span


def test_leases_of_a_client_that_is_gone_end_soon_and_those_of_others_do_not() -> None:
    leases = book()
    mine = [granted(leases.request(key(n), Span(0, 1), 10, "alice", 0.0)).lease for n in range(3)]
    other = granted(leases.request(key(9), Span(0, 1), 10, "bob", 0.0)).lease
    assert leases.abandon_owner("alice", 5.0) == tuple(mine)
    assert leases.abandon_owner("carol", 5.0) == ()
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
    leases.abandon_owner("alice", 1.0)
    again = granted(leases.request(key(session), Span(0, 1), 10, f"bob {session}", 1.0))
    assert [lease.key for lease in again.evicted] == [mine.key]
