"""What strangers may hold of a peer: never all of it, and nothing that they do not use."""

from support.swarms.lease_books import SPEC, book, granted, key, refused

from molink.peer.memory.lease_rules import KEPT_PART
from molink.peer.memory.lease_table import IDLE_S, SPARED_S
from molink.peer.memory.leases import Granted, LeaseBook, Refused
from molink.shards.spec import Span

MANY = 64


def crowd(leases: LeaseBook, owners: int, now: float, network: str = "") -> int:
    """How many leases of 1 token these strangers get when each asks for as many as there are."""
    answers = [
        leases.request(key(owner * MANY + number, 1), Span(0, 1), 1, f"stranger {owner}", now, network)
        for owner in range(owners)
        for number in range(MANY)
    ]
    return sum(isinstance(answer, Granted) for answer in answers)


def test_two_strangers_never_hold_all_sessions_and_a_newcomer_and_a_known_client_get_in() -> None:
    leases = book(kv=100_000)
    leases.loaded(SPEC.whole)
    granted(leases.request(key(250), Span(0, 1), 1, "known", 0.0))
    leases.used(key(250), 0.0)
    leases.release(key(250))
    assert crowd(leases, 2, 0.0) == MANY - MANY // KEPT_PART
    for newcomer in (251, 252, 253):
        granted(leases.request(key(newcomer), Span(0, 1), 1, f"newcomer {newcomer}", 1.0))
    refused(leases.request(key(254), Span(0, 1), 1, "one newcomer more", 1.0), "busy")
    granted(leases.request(key(250, 2), Span(0, 1), 1, "known", 1.0))


def test_one_network_never_holds_all_sessions_however_many_identities_it_has() -> None:
    leases = book(kv=100_000)
    leases.loaded(SPEC.whole)
    assert crowd(leases, 3, 0.0, "203.0.113.0/24") == 48
    granted(leases.request(key(250), Span(0, 1), 1, "elsewhere", 0.0, "198.51.100.0/24"))


def test_leases_that_nobody_uses_make_room_after_half_a_minute_and_end_after_a_minute_though_renewed() -> (
    None
):
    leases = book(kv=100_000, max_sessions=4, max_sessions_per_owner=4)
    leases.loaded(SPEC.whole)
    for session in (1, 2, 3, 4):
        granted(leases.request(key(session), Span(0, 1), 1, "stranger", 0.0))
    for now in (10.0, 20.0):
        leases.used(key(4), now)
        assert all(leases.renew(key(session), now) for session in (1, 2, 3, 4))
        refused(leases.request(key(5), Span(0, 1), 1, "newcomer", now), "busy")
    answer = granted(leases.request(key(5), Span(0, 1), 1, "newcomer", SPARED_S))
    assert [lease.key for lease in answer.evicted] == [key(1)]
    assert [lease.key for lease in leases.leases] == [key(2), key(3), key(4), key(5)]
    assert all(leases.renew(key(session), 50.0) for session in (2, 3, 4))
    leases.used(key(4), 55.0)
    assert not leases.renew(key(2), IDLE_S)
    assert {lease.key for lease in leases.expire(IDLE_S)} == {key(2), key(3), key(5)}
    assert leases.renew(key(4), IDLE_S)


def test_who_has_most_idle_leases_makes_room_first() -> None:
    leases = book(kv=100_000, max_sessions=4, max_sessions_per_owner=4)
    leases.loaded(SPEC.whole)
    granted(leases.request(key(1), Span(0, 1), 1, "honest", 0.0))
    for session in (2, 3, 4):
        granted(leases.request(key(session), Span(0, 1), 1, "stranger", 1.0))
    for session in (1, 2, 3, 4):
        leases.renew(key(session), 30.0)
    answer = granted(leases.request(key(5), Span(0, 1), 1, "newcomer", 40.0))
    assert [lease.key for lease in answer.evicted] == [key(2)]


def test_the_last_tenth_of_the_memory_is_not_for_strangers_who_have_some_already() -> None:
    leases = book(kv=1000)
    leases.loaded(SPEC.whole)
    granted(leases.request(key(1), Span(0, 1), 100, "stranger", 0.0))
    bytes_left = leases.free_kv_bytes
    for session in range(2, 30):
        if isinstance(leases.request(key(session), Span(0, 1), 50, "stranger", 0.0), Refused):
            break
    assert 100 <= leases.free_kv_bytes < bytes_left
    granted(leases.request(key(50), Span(0, 1), 100, "newcomer", 0.0))


def test_a_refusal_evicts_nobody() -> None:
    leases = book(kv=100, max_sessions=4)
    leases.loaded(SPEC.whole)
    granted(leases.request(key(1), Span(0, 1), 50, "alice", 0.0))
    before = leases.leases
    refused(leases.request(key(2), Span(0, 1), 150, "bob", SPARED_S), "memory")
    assert leases.leases == before
    assert leases.renew(key(1), SPARED_S)


def test_where_one_client_may_have_more_sessions_its_network_may_too() -> None:
    leases = book(max_sessions=64, max_sessions_per_owner=56)
    for session in range(56):
        granted(leases.request(key(session), Span(0, 1), 1, "gateway", 0.0, "203.0.113.0/24"))
    refused(leases.request(key(56), Span(0, 1), 1, "gateway", 0.0, "203.0.113.0/24"), "busy")


def test_who_has_as_many_sessions_as_a_client_may_takes_nothing_from_others() -> None:
    """Victims' links have just closed: they may come back, and their leases are the first that make room."""
    leases = book(kv=1000, max_sessions_per_owner=4)
    leases.loaded(SPEC.whole)
    for session in (1, 2, 3):
        granted(leases.request(key(session), Span(0, 1), 10, f"victim {session}", 0.0))
    leases.abandon([key(session) for session in (1, 2, 3)], 50.0)
    for session in (4, 5, 6, 7):
        granted(leases.request(key(session), Span(0, 1), 10, "stranger", 15.0))
    answer = granted(leases.request(key(8), Span(0, 1), 10, "stranger", 50.0))
    assert [lease.owner for lease in answer.evicted] == ["stranger"]
    assert {key(1), key(2), key(3)} < {lease.key for lease in leases.leases}


def test_leases_that_are_too_small_to_help_stay() -> None:
    leases = book(kv=100)
    leases.loaded(SPEC.whole)
    for session, tokens in ((1, 16), (2, 48), (3, 32)):
        granted(leases.request(key(session), Span(0, 1), tokens, f"client {session}", float(session)))
    answer = granted(leases.request(key(4), Span(0, 1), 48, "newcomer", 40.0))
    assert [lease.key for lease in answer.evicted] == [key(2)]
