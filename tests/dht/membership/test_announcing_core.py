"""When a peer speaks, without a swarm: whatever happens it goes on, within its pace, and leaves nothing unsaid."""

import itertools
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from molink.dht.membership import announcing_core as core
from molink.dht.membership.timing import DiscoveryTiming, facts_interval_s

TIMING = DiscoveryTiming()
LOOK = core.Look(peers=10, news_bits_per_s=0.0, draw=0.0)
EVENTS = st.sampled_from(
    [core.Changed(), core.Changed(facts=True), core.Contradicted(), core.Accused(), None, None]
)


def wake_s(effects: tuple[core.Effect, ...]) -> float:
    return next(effect.at_s for effect in effects if isinstance(effect, core.Wake))


def spoken(effects: tuple[core.Effect, ...]) -> core.Speak | None:
    return next((effect for effect in effects if isinstance(effect, core.Speak)), None)


def begun(now_s: float = 100.0) -> core.AnnouncingCore:
    """A peer that has just spoken for the first time."""
    one = core.AnnouncingCore(TIMING)
    assert wake_s(one.handle(core.Changed(facts=True), now_s)) == now_s
    assert spoken(one.handle(LOOK, now_s)) is not None
    return one


@given(
    st.lists(st.tuples(EVENTS, st.floats(0.0, 30.0)), max_size=60),
    st.integers(1, 20_000),
    st.floats(0.0, 50_000.0),
    st.floats(-1.0, 1.0),
)
def test_whatever_happens_the_next_look_is_set_and_comes_to_words_within_the_interval(
    happens: list[tuple[core.Changed | core.Contradicted | core.Accused | None, float]],
    peers: int,
    news: float,
    draw: float,
) -> None:
    one, look = core.AnnouncingCore(TIMING), core.Look(peers, news, draw)
    now_s, said = 1000.0, []
    wakes_s = wake_s(one.handle(core.Changed(facts=True), now_s))
    for event, waited_s in happens:
        until_s = now_s + waited_s
        while wakes_s <= until_s:
            now_s = max(now_s, wakes_s)
            effects = one.handle(look, now_s)
            wakes_s = wake_s(effects)
            if (words := spoken(effects)) is not None:
                assert words.ttl_s > 2 * (one.due_s - now_s)
                assert not one.has_news
                said.append(now_s)
            else:
                assert wakes_s > now_s
        now_s = until_s
        if event is not None:
            wakes_s = wake_s(one.handle(event, now_s))
            assert one.has_news
        assert wakes_s < math.inf
    for _ in range(5):
        now_s = max(now_s, wakes_s)
        wakes_s = wake_s(one.handle(look, now_s))
    assert not one.has_news
    assert all(after - before >= TIMING.change_gap_s - 1e-6 for before, after in itertools.pairwise(said))


def test_what_few_have_to_send_in_many_copies_is_said_as_much_more_rarely() -> None:
    for peers, copies in ((63, 21.0), (1000, 20.0)):
        one, other = begun(), begun()
        look = core.Look(peers, 0.0, 0.0, copies)
        alike = core.Look(round(peers * copies), 0.0, 0.0)
        assert one.handle(core.Changed(), 500.0) == other.handle(core.Changed(), 500.0)
        assert one.handle(look, 500.0) == other.handle(alike, 500.0)
        assert one.interval_s > 3 * TIMING.interval_s


def test_a_state_is_said_again_before_it_lapses_though_intervals_have_grown_since() -> None:
    one = begun()
    crowd = core.Look(peers=5000, news_bits_per_s=20_000.0, draw=0.0)
    now_s, said_s = 100.0, [100.0]
    while len(said_s) < 8:
        words_ttl_s = 3 * one.interval_s
        one.handle(core.Changed(), now_s)
        now_s = one.said_s + 1.0
        while (effects := one.handle(crowd, now_s)) and spoken(effects) is None:
            now_s = wake_s(effects)
        assert now_s - said_s[-1] < words_ttl_s
        said_s.append(now_s)


@given(st.integers(1, 600), st.floats(0.0, 30_000.0))
def test_words_are_no_more_than_the_bucket_holds_and_what_has_flowed_into_it(peers: int, news: float) -> None:
    one, look = begun(), core.Look(peers, news, 0.0)
    now_s, count = 100.0, 1
    while now_s < 160.0:
        wakes_s = wake_s(one.handle(core.Changed(), now_s))
        now_s = max(now_s, wakes_s)
        effects = one.handle(look, now_s)
        count += spoken(effects) is not None
        now_s = max(now_s + 0.01, wake_s(effects) if spoken(effects) is None else now_s)
    spacing_s = max(TIMING.change_gap_s, core.change_spacing_s(peers, one.interval_s, TIMING.interval_s))
    assert count <= TIMING.change_burst + (now_s - 100.0) / spacing_s + 1


def test_unchanged_it_speaks_again_when_the_interval_is_over_and_not_before() -> None:
    one = begun()
    assert spoken(one.handle(LOOK, one.due_s - 0.1)) is None
    assert spoken(one.handle(LOOK, one.due_s)) == core.Speak(ttl_s=57, facts=None)


def test_facts_go_with_the_first_words_then_when_they_are_old_or_others_contradict_them() -> None:
    one = core.AnnouncingCore(TIMING)
    one.handle(core.Changed(facts=True), 100.0)
    first = spoken(one.handle(LOOK, 100.0))
    assert first is not None
    assert first.facts == core.SaidFacts(ttl_s=3601, links=32)
    one.handle(core.Contradicted(), 101.0)
    again = spoken(one.handle(LOOK, 101.0))
    assert again is not None
    assert again.facts is not None
    old = spoken(one.handle(LOOK, 101.0 + facts_interval_s(LOOK.peers)))
    assert old is not None
    assert old.facts is not None


def test_facts_that_change_often_wait_for_their_own_pace_while_states_go() -> None:
    one, busy = begun(), replace(LOOK, peers=200, news_bits_per_s=20_000.0)
    facts: list[bool] = []
    for now_s in (101.0, 102.0, 700.0):
        one.handle(core.Changed(facts=now_s < 103.0), now_s)
        words = spoken(one.handle(busy, now_s))
        assert words is not None
        facts.append(words.facts is not None)
    assert facts == [True, False, True]


def test_who_is_called_gone_speaks_before_its_pace_allows() -> None:
    one, crowded = begun(), replace(LOOK, peers=5000, news_bits_per_s=20_000.0)
    while not one.has_news:
        one.handle(core.Changed(), one.said_s + 1.0)
        one.handle(crowded, one.said_s + 1.0)
    now_s = one.said_s + 2.0
    waits_s = wake_s(one.handle(crowded, now_s)) - now_s
    assert one.handle(core.Accused(), now_s)
    refutes_s = wake_s(one.handle(crowded, now_s)) - now_s
    assert refutes_s < TIMING.refute_s / 6 < waits_s


def test_who_has_left_says_nothing_any_more() -> None:
    one = begun()
    assert one.handle(core.Left(), 101.0) == (core.Wake(math.inf),)
    assert one.handle(core.Changed(), 102.0) == ()
    assert one.handle(LOOK, 500.0) == ()
