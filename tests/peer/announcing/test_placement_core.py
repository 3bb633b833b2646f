"""The placement of a peer's layers without a peer: whatever it is answered it goes on, and does one thing at a time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerState, PeerView
from molink.peer.announcing import placement_core as core
from molink.routing.placement.rebalancing import SETTLE_S, Move
from molink.shards.spec import Span

LOW, HIGH = sorted((Identity.generate() for _ in range(2)), key=lambda one: one.peer_id)
FIRST, SECOND = Span(0, 4), Span(4, 8)


def other(identity: Identity, *loading: Span) -> PeerView:
    state = PeerState(
        identity.peer_id, sequence=1, ttl_s=9, facts_sequence=1, spans=(), free_weight_bytes=0,
        free_kv_bytes=0, sessions=0, queued=0, draining=False, loading=loading,
    )  # fmt: skip
    return PeerView(replace(facts_of(identity), ttl_s=9), state, 0.0)


def move(load: tuple[Span, ...], drop: tuple[Span, ...]) -> Move:
    return Move(load, drop, 1, 1.0, None, None, 0.0, 1.0)


SPANS = st.sampled_from([(), (FIRST,), (SECOND,), (FIRST, SECOND)])
MOVES = st.none() | st.builds(move, SPANS, SPANS)
VIEWS = st.sampled_from([(), (other(LOW),), (other(LOW, SECOND), other(HIGH, FIRST))])
ANSWERS = {
    core.FindSpan: st.builds(core.SpanFound, st.sampled_from([None, FIRST, SECOND])),
    core.FindMove: st.builds(core.MoveFound, MOVES, st.booleans()),
    core.AwaitViews: st.builds(core.ViewsAwaited, VIEWS),
    core.FetchSpan: st.just(core.SpanFetched()),
    core.DropSpans: st.builds(core.SpansDropped, st.booleans()),
    core.LoadSpan: st.just(core.SpanLoaded()),
    core.Rest: st.builds(core.ConsiderMove, VIEWS, st.booleans()),
}


@given(st.data(), st.booleans())
def test_whatever_it_is_answered_it_comes_to_rest_drops_before_it_loads_and_takes_its_claim_back(
    data: st.DataObject, joins: bool
) -> None:
    placement = core.PlacementCore(LOW.peer_id)
    claimed = core.Claim()
    event: core.Event = (
        core.Join(data.draw(VIEWS)) if joins else core.ConsiderMove(data.draw(VIEWS), busy=False)
    )
    done: list[core.Effect] = []
    claims: list[core.Claim] = []
    """As each was asked."""
    for now_s in range(100):
        *told, asked = placement.handle(event, float(now_s))
        assert all(type(one) not in core.ANSWERS for one in told)
        for one in told:
            claimed = one if isinstance(one, core.Claim) else claimed
        if isinstance(asked, core.Rest):
            assert claimed == core.Claim()
            assert placement.resting
            break
        assert not placement.resting
        if isinstance(asked, core.LoadSpan):
            assert asked.span in claimed.load
            assert not any(one == asked and part is claimed for one, part in zip(done, claims, strict=True))
        if isinstance(asked, core.DropSpans):
            assert asked.spans == claimed.drop
            assert {one.span for one in done if isinstance(one, core.FetchSpan)} == set(claimed.load)
            assert not any(isinstance(one, core.LoadSpan) for one in done)
        done.append(asked)
        claims.append(claimed)
        event = core.Failed() if data.draw(st.integers(0, 9)) == 0 else data.draw(ANSWERS[type(asked)])
    else:
        pytest.fail("it never came to rest")
    changed = {core.PlacementOutcome.JOINED, core.PlacementOutcome.MOVED, core.PlacementOutcome.FAILED}
    assert (placement.held_since_s == now_s) == (asked.outcome in changed)


@given(st.data())
def test_a_second_look_changes_nothing_while_something_is_under_way(data: st.DataObject) -> None:
    placement = core.PlacementCore(LOW.peer_id)
    event: core.Event = core.ConsiderMove((other(HIGH),), busy=False)
    for _ in range(20):
        *_, asked = placement.handle(event, 1.0)
        if isinstance(asked, core.Rest):
            return
        assert placement.handle(core.ConsiderMove((), busy=False), 1.0) == ()
        event = data.draw(ANSWERS[type(asked)])


@pytest.mark.parametrize(
    "kind",
    [
        core.SpanFound(None),
        core.MoveFound(None, False),
        core.SpanFetched(),
        core.SpansDropped(True),
        core.SpanLoaded(),
    ],
)
def test_an_answer_that_nobody_asked_for_is_refused_and_changes_nothing(kind: core.Event) -> None:
    placement = core.PlacementCore(LOW.peer_id)
    placement.handle(core.ConsiderMove((other(HIGH),), busy=False), 0.0)
    placement.handle(core.MoveFound(move((SECOND,), (FIRST,)), loading=False), 0.0)
    with pytest.raises(ValueError, match="answers nothing"):
        placement.handle(kind, 0.0)
    assert isinstance(placement.handle(core.ViewsAwaited(()), 1.0)[-1], core.FindMove)


def test_who_loads_or_drains_does_not_look() -> None:
    placement = core.PlacementCore(LOW.peer_id)
    assert placement.handle(core.ConsiderMove((other(HIGH),), busy=True), 0.0) == (
        core.Rest(core.PlacementOutcome.STAYED),
    )


def test_who_is_alone_waits_for_nobodys_word() -> None:
    placement = core.PlacementCore(LOW.peer_id)
    placement.handle(core.Join(()), 0.0)
    assert placement.handle(core.SpanFound(FIRST), 0.0) == (core.Claim(load=(FIRST,)), core.AwaitViews(0.0))


def test_a_newcomer_that_would_choose_otherwise_says_so_again_and_gives_in_at_last() -> None:
    placement = core.PlacementCore(LOW.peer_id)
    effects = list(placement.handle(core.Join((other(HIGH),)), 0.0))
    claims = 0
    while not isinstance(effects[-1], core.LoadSpan):
        claims += sum(isinstance(one, core.Claim) for one in effects)
        asked = effects[-1]
        event: core.Event = core.ViewsAwaited((other(HIGH),))
        if isinstance(asked, core.FindSpan):
            event = core.SpanFound((FIRST, SECOND)[claims % 2])
        effects = list(placement.handle(event, 1.0))
    assert claims == core.CHOICES
    assert [type(one) for one in effects] == [core.Claim, core.Choose, core.LoadSpan]
    assert placement.held_since_s == math.inf


def test_a_claim_of_a_greater_id_that_crossed_ones_own_does_not_count_and_a_smaller_ones_does() -> None:
    for own, rival, counts in ((LOW, HIGH, False), (HIGH, LOW, True)):
        placement = core.PlacementCore(own.peer_id)
        placement.handle(core.ConsiderMove((other(rival),), busy=False), 0.0)
        *_, settle = placement.handle(core.MoveFound(move((SECOND,), (FIRST,)), loading=False), 0.0)
        assert settle == core.AwaitViews(SETTLE_S)
        (asked,) = placement.handle(core.ViewsAwaited((other(rival, SECOND),)), 1.0)
        assert isinstance(asked, core.FindMove)
        assert [bool(view.state.loading) for view in asked.others] == [counts]
        assert asked.looked_s == 0.0


def moving() -> core.PlacementCore:
    """A core that has decided to move from FIRST to SECOND, at 100 s, and waits for what it needs of SECOND."""
    placement = core.PlacementCore(LOW.peer_id)
    found = core.MoveFound(move((SECOND,), (FIRST,)), loading=False)
    placement.handle(core.ConsiderMove((other(HIGH),), busy=False), 100.0)
    placement.handle(found, 100.0)
    placement.handle(core.ViewsAwaited((other(HIGH),)), 101.0)
    assert placement.handle(found, 101.0) == (core.FetchSpan(SECOND),)
    return placement


def test_who_cannot_have_the_new_layers_keeps_the_old_ones() -> None:
    told = moving().handle(core.Failed(), 200.0)
    assert told == (core.Claim(), core.Rest(core.PlacementOutcome.FAILED))


def test_after_a_load_that_failed_the_old_layers_are_loaded_again_which_others_hear_of() -> None:
    placement = moving()
    assert placement.handle(core.SpanFetched(), 101.0) == (core.DropSpans((FIRST,)),)
    assert placement.handle(core.SpansDropped(ok=True), 102.0) == (core.LoadSpan(SECOND),)
    assert placement.handle(core.Failed(), 110.0) == (core.Claim(load=(FIRST,)), core.LoadSpan(FIRST))
    assert placement.handle(core.SpanLoaded(), 120.0)[-1] == core.Rest(core.PlacementOutcome.FAILED)
    assert placement.held_since_s == 120.0


def test_who_fetched_for_long_drops_nothing_that_others_have_let_go_of_meanwhile() -> None:
    placement = moving()
    assert placement.handle(core.SpanFetched(), 1000.0) == (core.AwaitViews(0.0),)
    (asked,) = placement.handle(core.ViewsAwaited(()), 1000.0)
    assert isinstance(asked, core.FindMove)
    told = placement.handle(core.MoveFound(None, loading=False), 1000.0)
    assert told == (core.Claim(), core.Rest(core.PlacementOutcome.CALLED_OFF))
