"""Who can be the tail of a circuit that has to draw in some way, and what is said where nobody can."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of

from molink.dht.records.records import PeerView
from molink.routing import NoCircuit, plan
from molink.routing.routes.able_tails import lacking_ability, with_able_tails
from molink.shards.spec import GRAMMARS, PENALTIES, PROMPT_LOGPROBS, Span

LAST = MODEL.layers - 1


def able(view: PeerView, *abilities: str) -> PeerView:
    return replace(view, facts=replace(view.facts, sampling_abilities=abilities))


def whole(peer_id: str, *abilities: str) -> PeerView:
    return able(peer(peer_id, (0, MODEL.layers)), *abilities)


def test_without_a_need_everybody_is_as_before() -> None:
    views = (whole("a"), whole("b", PENALTIES))
    assert with_able_tails(views, "") == views


@pytest.mark.parametrize("ability", [PENALTIES, GRAMMARS, PROMPT_LOGPROBS])
def test_only_a_peer_of_that_ability_is_the_tail_and_others_may_be_before_it(ability: str) -> None:
    views = (whole("a"), able(peer("b", (LAST, MODEL.layers)), ability))
    route = plan(snapshot_of(*with_able_tails(views, ability)), 100, prompt_tokens=50)
    assert [(hop.peer_id, hop.span) for hop in route.hops] == [
        ("a", Span(0, LAST)),
        ("b", Span(LAST, MODEL.layers)),
    ]


@pytest.mark.parametrize(
    ("ability", "named"),
    [
        (PENALTIES, "older version"),
        (GRAMMARS, r"molink\[grammars\]"),
        (PROMPT_LOGPROBS, "log-probabilities of prompts"),
    ],
)
def test_where_nobody_has_the_ability_it_is_said_what_is_missing(ability: str, named: str) -> None:
    views = with_able_tails((whole("a"), whole("b")), ability)
    with pytest.raises(NoCircuit) as caught:
        plan(snapshot_of(*views), 100, prompt_tokens=50)
    with pytest.raises(NoCircuit, match=named) as told:
        raise lacking_ability(caught.value, views, ability)
    assert told.value.missing_layers == caught.value.missing_layers == (Span(LAST, MODEL.layers),)


def test_where_somebody_has_it_the_reason_is_another() -> None:
    cause = NoCircuit("no memory")
    assert lacking_ability(cause, (whole("a", GRAMMARS),), GRAMMARS) is cause


@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(1, 5), st.booleans()), max_size=5))
def test_nobody_without_the_ability_holds_or_takes_the_last_layer(held: list[tuple[int, int, bool]]) -> None:
    views = [
        replace(
            able(peer(f"peer {at}", (start, min(MODEL.layers, start + count))), *([GRAMMARS] if has else [])),
        )
        for at, (start, count, has) in enumerate(held)
    ]
    for view in with_able_tails(views, GRAMMARS):
        if GRAMMARS not in view.facts.sampling_abilities:
            assert view.facts.span_limit is not None
            assert LAST not in view.facts.span_limit
            assert not any(LAST in span for span in view.state.spans)
