"""Whatever others announce that does not exist, a neighbour is asked for what it has; requests are bounded by link."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.gossip.iwants import (
    FIRST_ALLOWANCE,
    IWANT_TIMEOUT_S,
    LEAST_ALLOWANCE,
    MOST_ALLOWANCE,
    MOST_ANNOUNCED,
    OutstandingIwants,
)
from molink.dht.gossip.spreading import MAX_RECORD_IDS, LazyPush, record_id

TURN_S = 1.0
"""Between two looks at what is overdue."""


def flood(
    receives: Callable[[str, list[bytes], float], tuple[bytes, ...]],
    links: Iterable[str],
    numbers: "itertools.count[int]",
    now: float = 0.0,
) -> int:
    """Each of the links announces what does not exist, more than is remembered. Returns for how much of it is asked."""
    return sum(
        len(receives(link, [next(numbers).to_bytes(8) for _ in range(MAX_RECORD_IDS)], now))
        for link in links
        for _ in range(10)
    )


def records(count: int) -> dict[bytes, bytes]:
    """By id."""
    return {record_id(record): record for record in (bytes([*at.to_bytes(4), 1]) for at in range(count))}


@pytest.mark.parametrize("liars", [1, 8, 50])
def test_however_much_others_name_that_does_not_exist_a_neighbour_is_asked_for_what_it_has(
    liars: int,
) -> None:
    peer, true = LazyPush(), tuple(records(MAX_RECORD_IDS))
    links = [f"liar {number}" for number in range(liars)]
    for link in (*links, "honest"):
        peer.open_link(link)
    flood(peer.receive_ihave, links, itertools.count())
    assert peer.receive_ihave("honest", true, 1.0) == true


def test_links_that_come_one_after_the_other_each_naming_all_that_it_may_leave_room() -> None:
    peer, numbers, true = LazyPush(), itertools.count(), tuple(records(MAX_RECORD_IDS))
    for number in range(50):
        peer.open_link(f"liar {number}")
        flood(peer.receive_ihave, [f"liar {number}"], numbers)
    peer.open_link("honest")
    assert peer.receive_ihave("honest", true, 1.0) == true


def test_links_that_come_and_go_under_other_names_leave_room_and_nothing_behind() -> None:
    peer, numbers, true = LazyPush(), itertools.count(), tuple(records(MAX_RECORD_IDS))
    peer.open_link("honest")
    for number in range(50):
        peer.open_link(f"liar {number}")
        assert flood(peer.receive_ihave, [f"liar {number}"], numbers) == FIRST_ALLOWANCE
        peer.close_link(f"liar {number}")
    assert peer.receive_ihave("honest", true, 1.0) == true
    assert set(peer.retry_iwants(2 * IWANT_TIMEOUT_S)) <= {"honest"}


@pytest.mark.parametrize("liars", [0, 8, 48])
def test_five_hundred_records_that_a_new_neighbour_announces_at_once_come_within_three_turns(
    liars: int,
) -> None:
    peer, numbers, true = LazyPush(), itertools.count(), records(500)
    links = [f"liar {number}" for number in range(liars)]
    for link in (*links, "honest"):
        peer.open_link(link)
    flood(peer.receive_ihave, links, numbers)
    names = list(true)
    asked = [
        name
        for at in range(0, len(names), MAX_RECORD_IDS)
        for name in peer.receive_ihave("honest", names[at : at + MAX_RECORD_IDS], 0.0)
    ]
    came = 0
    for turn in range(1, 4):
        for name in asked:
            peer.forward(true[name], "honest", push=False)
        came += len(asked)
        flood(peer.receive_ihave, links, numbers, turn * TURN_S)
        asked = peer.retry_iwants(turn * TURN_S).get("honest", [])
    assert came == 500


def test_who_announces_first_and_sends_nothing_delays_records_by_one_wait_and_next_time_few() -> None:
    """Eight do so together: the one that sends is preferred to all of them."""
    peer, true = LazyPush(), records(2 * MAX_RECORD_IDS)
    links = [f"liar {number}" for number in range(8)]
    for link in (*links, "honest"):
        peer.open_link(link)
    names = list(true)
    for link in (*links, "honest"):
        peer.receive_ihave(link, names[:MAX_RECORD_IDS], 0.0)
    at, waits = 0.0, 0
    while (asked := peer.retry_iwants(at := at + IWANT_TIMEOUT_S)) and "honest" not in asked:
        waits += 1
    assert waits <= len(links)
    for name in asked["honest"]:
        peer.forward(true[name], "honest", push=False)
    assert len(asked["honest"]) == MAX_RECORD_IDS
    for link in (*links, "honest"):
        peer.receive_ihave(link, names[MAX_RECORD_IDS:], at)
    assert set(peer.retry_iwants(at + IWANT_TIMEOUT_S)["honest"]) <= set(names[MAX_RECORD_IDS:])
    assert set(peer.retry_iwants(at + IWANT_TIMEOUT_S)) == set()


def test_who_sends_nothing_is_asked_for_ever_less_and_who_sends_again_for_more() -> None:
    iwants, numbers = OutstandingIwants(), itertools.count()
    iwants.open_link("link")
    asked: list[bytes] = []

    def announce(now: float) -> list[bytes]:
        names = [next(numbers).to_bytes(8) for _ in range(2 * MAX_RECORD_IDS)]
        return [*iwants.due(now).get("link", ()), *iwants.announced("link", names, now)]

    in_vain = [len(announce(turn * IWANT_TIMEOUT_S)) for turn in range(5)]
    assert in_vain == [FIRST_ALLOWANCE, *[LEAST_ALLOWANCE] * 4]
    for turn in range(10):
        for name in asked:
            iwants.came(name, "link")
        asked = announce((5 + turn) * IWANT_TIMEOUT_S)
    assert len(asked) == MOST_ALLOWANCE


def test_what_a_lost_link_was_asked_for_another_is_asked_for_at_once_and_else_it_is_forgotten() -> None:
    iwants = OutstandingIwants()
    for link in ("lost", "other"):
        iwants.open_link(link)
    assert iwants.announced("lost", [b"both", b"one"], 0.0) == (b"both", b"one")
    assert iwants.announced("other", [b"both"], 0.0) == ()
    iwants.close_link("lost")
    assert iwants.due(0.1) == {"other": [b"both"]}
    assert iwants.announced("other", [b"one"], 0.2) == (b"one",)


def test_what_has_come_from_anybody_is_asked_of_nobody() -> None:
    iwants = OutstandingIwants()
    for link in ("first", "second"):
        iwants.open_link(link)
        iwants.announced(link, [b"record"], 0.0)
    iwants.came(b"record", "third")
    assert iwants.due(IWANT_TIMEOUT_S) == {}


@pytest.mark.parametrize(("source", "allowed"), [("link", FIRST_ALLOWANCE + 1), ("other", FIRST_ALLOWANCE)])
def test_more_is_asked_of_whom_alone_has_sent_what_it_was_asked_for(source: str, allowed: int) -> None:
    iwants, numbers = OutstandingIwants(), itertools.count()
    iwants.open_link("link")
    (asked,) = iwants.announced("link", [b"record"], 0.0)
    iwants.came(asked, source)
    assert flood(iwants.announced, ["link"], numbers) == allowed


def test_a_link_in_the_place_of_an_older_one_to_the_same_peer_is_asked_anew() -> None:
    iwants = OutstandingIwants()
    iwants.open_link("peer")
    assert iwants.announced("peer", [b"record"], 0.0) == (b"record",)
    iwants.open_link("peer")
    assert iwants.due(2 * IWANT_TIMEOUT_S) == {}
    assert iwants.announced("peer", [b"record"], 30.0) == (b"record",)


def test_links_that_have_ended_are_asked_for_nothing() -> None:
    iwants = OutstandingIwants()
    iwants.open_link("ended")
    iwants.close_link("ended")
    assert iwants.announced("ended", [b"record"], 0.0) == ()


class Neighbours:
    """Liars that come and go under new names, and one honest neighbour, which sends what it is asked for in time."""

    def __init__(self) -> None:
        self.iwants = OutstandingIwants()
        self.now = 0.0
        self.liars: list[str] = []
        self.outstanding: dict[bytes, tuple[str, float]] = {}
        """By id, who was asked and when."""
        self.lacking: dict[bytes, None] = {}
        """What the honest neighbour has announced and not sent."""
        self._numbers = itertools.count()
        self.iwants.open_link("honest")

    def comes(self) -> None:
        self.liars.append(f"liar {next(self._numbers)}")
        self.iwants.open_link(self.liars[-1])

    def goes(self, which: int) -> None:
        if self.liars:
            link = self.liars.pop(which % len(self.liars))
            self.iwants.close_link(link)
            self.outstanding = {name: one for name, one in self.outstanding.items() if one[0] != link}

    def lies(self, which: int, count: int, same: int) -> None:
        """Names what nobody has, and some of what the honest neighbour has, or will have."""
        if self.liars:
            link = self.liars[which % len(self.liars)]
            made_up = [next(self._numbers).to_bytes(8) for _ in range(count)]
            self._asked(link, self.iwants.announced(link, [*map(true, range(same)), *made_up], self.now))

    def says(self, begin: int, count: int) -> None:
        """The honest neighbour announces records of which nobody else has heard, and others."""
        idle = all(link != "honest" for link, _ in self.outstanding.values())
        own = [b"own" + next(self._numbers).to_bytes(8) for _ in range(count)]
        heard = [true(number) for number in range(begin, begin + count)]
        named = [*own, *heard][: MOST_ANNOUNCED - len(self.lacking)]
        self.lacking |= dict.fromkeys(named)
        asked = self.iwants.announced("honest", named, self.now)
        self._asked("honest", asked)
        assert not idle or len(asked) >= min(count, len(named), FIRST_ALLOWANCE)

    def sends(self) -> None:
        for name, (link, _) in list(self.outstanding.items()):
            if link == "honest":
                del self.outstanding[name]
                del self.lacking[name]
                self.iwants.came(name, "honest")

    def passes(self, after_s: float) -> None:
        """Time passes, and the honest neighbour has sent by then what it was asked for."""
        self.sends()
        self.now += after_s
        self.outstanding = {
            name: (link, at)
            for name, (link, at) in self.outstanding.items()
            if self.now < at + IWANT_TIMEOUT_S
        }
        for link, names in self.iwants.due(self.now).items():
            self._asked(link, names)
        asked_of_honest = any(link == "honest" for link, _ in self.outstanding.values())
        assert asked_of_honest or self.lacking.keys() <= self.outstanding.keys()

    def _asked(self, link: str, names: Iterable[bytes]) -> None:
        assert link == "honest" or link in self.liars
        for name in names:
            assert name not in self.outstanding, "one link at a time is asked"
            self.outstanding[name] = (link, self.now)
        by_link = Counter(asked for asked, _ in self.outstanding.values())
        assert by_link[link] <= (MOST_ALLOWANCE if link == "honest" else FIRST_ALLOWANCE)


def true(number: int) -> bytes:
    return b"true" + number.to_bytes(8)


EVENTS = st.one_of(
    st.tuples(st.just("comes")),
    st.tuples(st.just("goes"), st.integers(0, 50)),
    st.tuples(st.just("lies"), st.integers(0, 50), st.sampled_from((0, 1, 128, 600)), st.integers(0, 100)),
    st.tuples(st.just("says"), st.integers(0, 100), st.sampled_from((1, 20, 128, 500))),
    st.tuples(st.just("sends")),
    st.tuples(st.just("passes"), st.sampled_from((0.1, 1.0, IWANT_TIMEOUT_S))),
)


@given(st.lists(EVENTS, min_size=20, max_size=60))
def test_in_any_order_of_events_requests_are_bounded_and_all_that_an_honest_neighbour_announces_comes(
    events: list[tuple[object, ...]],
) -> None:
    neighbours = Neighbours()
    for name, *arguments in events:
        getattr(neighbours, str(name))(*arguments)
    for _ in range(len(neighbours.liars) + 2):
        neighbours.passes(IWANT_TIMEOUT_S)
    for _ in range(4):
        neighbours.passes(TURN_S)
    assert not neighbours.lacking
