"""What a client adds to announced loads is what it has begun since, less what has ended: never twice, never lost."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC
from support.swarms.swarm_of_fakes import FakePeer

from molink.client.circuit.peer_history import FORGOTTEN_S, InFlightLoad, SessionKey
from molink.dht.records.records import PeerView

VIEW = FakePeer(SPEC.whole).view
HERE = (VIEW.peer_id,)


def announced(sessions: int, age_s: float) -> PeerView:
    """The peer with so many sessions, of its own clients and of others, so long ago."""
    return replace(VIEW, state=replace(VIEW.state, sessions=sessions), age_s=age_s)


def sessions_of(own: InFlightLoad, view: PeerView, now_s: float) -> int:
    (added,) = own.add_to_views((view,), now_s)
    assert replace(added, state=replace(added.state, sessions=view.state.sessions)) == view
    return added.state.sessions


def test_a_session_counts_until_its_peer_announces_it() -> None:
    own = InFlightLoad()
    own.begin_session((b"a", 1), HERE, 10.0)
    assert sessions_of(own, announced(5, age_s=4.0), 12.0) == 6
    assert sessions_of(own, announced(6, age_s=1.0), 12.0) == 6


def test_a_session_that_has_ended_is_taken_off_until_its_peer_says_so() -> None:
    own = InFlightLoad()
    own.begin_session((b"a", 1), HERE, 10.0)
    own.end_session((b"a", 1), HERE, 20.0)
    own.end_session((b"a", 1), HERE, 99.0)
    assert sessions_of(own, announced(6, age_s=10.0), 25.0) == 5
    assert sessions_of(own, announced(5, age_s=1.0), 25.0) == 5


def test_a_session_that_came_and_went_between_announcements_never_counts() -> None:
    own = InFlightLoad()
    own.begin_session((b"a", 1), HERE, 10.0)
    own.end_session((b"a", 1), HERE, 11.0)
    assert sessions_of(own, announced(3, age_s=20.0), 12.0) == 3


def test_sessions_that_a_peer_left_out_while_they_began_count_as_long_as_they_run() -> None:
    """Leases are on their way while it speaks: an announcement may come after the asking, and count fewer."""
    own = InFlightLoad()
    for name in (b"a", b"b", b"c", b"d"):
        own.begin_session((name, 1), HERE, 10.0)
    assert sessions_of(own, announced(1, age_s=1.0), 12.0) == 4
    own.end_session((b"a", 1), HERE, 13.0)
    assert sessions_of(own, announced(1, age_s=3.0), 14.0) == 3
    (without_b,) = own.add_to_views((announced(1, age_s=3.0),), 14.0, leaving=(b"b", 1))
    assert without_b.state.sessions == 2
    assert sessions_of(own, announced(9, age_s=0.5), 15.0) == 9


def test_each_epoch_counts_for_itself_and_other_peers_are_left_alone() -> None:
    own = InFlightLoad()
    own.begin_session((b"a", 1), HERE, 10.0)
    own.end_session((b"a", 1), HERE, 11.0)
    own.begin_session((b"a", 2), HERE, 11.0)
    own.begin_session((b"b", 1), ("another peer",), 11.0)
    assert sessions_of(own, announced(0, age_s=20.0), 12.0) == 1


def test_what_peers_owed_us_when_they_fell_silent_is_forgotten_in_the_end() -> None:
    own = InFlightLoad()
    own.begin_session((b"a", 1), ("silent",), 10.0)
    own.begin_session((b"b", 1), ("silent",), 10.0)
    own.end_session((b"a", 1), ("silent",), 11.0)
    own.add_to_views((), 12.0)
    assert own == _begun((b"a", 1), (b"b", 1), ended=(b"a", 1))
    own.add_to_views((), 12.0 + FORGOTTEN_S)
    assert own == _begun((b"b", 1))


def _begun(*keys: SessionKey, ended: SessionKey | None = None) -> InFlightLoad:
    own = InFlightLoad()
    for key in keys:
        own.begin_session(key, ("silent",), 10.0)
    if ended is not None:
        own.end_session(ended, ("silent",), 11.0)
    return own


STAYS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=8)


@given(STAYS, st.integers(0, 20), st.lists(st.integers(0, 100), min_size=1, max_size=5).map(sorted))
def test_others_sessions_and_our_own_of_this_moment_whenever_the_peer_spoke(
    stays: list[tuple[int, int]], others: int, looks: list[int]
) -> None:
    """Times are whole seconds; peers speak at half seconds, so that nothing happens at the same time."""
    own, events = InFlightLoad(), []
    for number, (since, lasting) in enumerate(stays):
        key = (bytes([number]), 1)
        events += [(since, True, key), (since + lasting, False, key)]
    events.sort(key=lambda event: event[0])
    at, spoke_s = 0, -0.5
    for now in looks:
        while at < len(events) and events[at][0] <= now:
            time, begins, key = events[at]
            (own.begin_session if begins else own.end_session)(key, HERE, float(time))
            at += 1
        told = others + _present(stays, spoke_s)
        assert sessions_of(own, announced(told, now - spoke_s), float(now)) == others + _present(stays, now)
        spoke_s = max(spoke_s, now // 2 + 0.5)


def _present(stays: list[tuple[int, int]], now_s: float) -> int:
    return sum(since <= now_s < since + lasting for since, lasting in stays)
