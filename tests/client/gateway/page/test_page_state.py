"""What the page is told of the swarm, and what it is told again when something has changed."""

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.page.page_swarm import circuit_of, hops_of, page_snapshot, peer_of

from molink.client.gateway.page.swarm_state import MOST_CIRCUITS, MOST_PEERS, changes, page_state

PEERS = [peer_of(at) for at in range(6)]


def state_of(peers: list[dict[str, Any]], circuits: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return page_state(page_snapshot(peers), circuits or [], ())


def applied(state: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """The state as a listener has it that was told a change."""
    peers = {**state["peers"], **changed.get("peers", {})}
    for gone in changed.get("gone", ()):
        del peers[gone]
    rest = {name: value for name, value in changed.items() if name not in ("peers", "gone")}
    return state | rest | {"peers": peers}


def test_no_address_is_told_but_those_that_the_operator_lets_everybody_see() -> None:
    told = page_state(page_snapshot(PEERS), [], ("/ip4/198.51.100.1/tcp/1/p2p/X",))
    assert told["invites"] == ["/ip4/198.51.100.1/tcp/1/p2p/X"]
    assert "203.0.113.7" not in json.dumps(told)


def test_what_has_not_changed_is_not_told_again() -> None:
    assert changes(state_of(PEERS), state_of(PEERS)) == {}


def test_of_a_peer_that_takes_part_in_a_token_only_that_peer_is_told() -> None:
    served = [PEERS[0] | {"tokens_served": 10**6}, *PEERS[1:]]
    assert list(changes(state_of(PEERS), state_of(served))["peers"]) == [PEERS[0]["peer_id"]]


def test_who_is_gone_is_named_and_a_gap_opens() -> None:
    changed = changes(state_of(PEERS[:4]), state_of(PEERS[:3]))
    assert changed["gone"] == [PEERS[3]["peer_id"]]
    assert changed["ready"] is False


def test_peers_of_other_protocols_are_not_drawn() -> None:
    old = PEERS[5] | {"same_protocol": False}
    assert old["peer_id"] not in state_of([*PEERS[:5], old])["peers"]


def test_of_more_peers_than_can_be_drawn_those_on_circuits_are() -> None:
    many = [peer_of(at) for at in range(MOST_PEERS + 50)]
    hops = hops_of(many[-8:])
    told = state_of(many, [circuit_of(hops)])
    assert (len(told["peers"]), told["peers_in_all"]) == (MOST_PEERS, MOST_PEERS + 50)
    assert {hop["peer_id"] for hop in hops} <= set(told["peers"])


def test_of_more_circuits_than_can_be_drawn_the_newest_are() -> None:
    circuits = [circuit_of(hops_of(PEERS), number) for number in range(MOST_CIRCUITS + 9)]
    shown = state_of(PEERS, circuits)["circuits"]
    assert (len(shown), shown[-1]["id"]) == (MOST_CIRCUITS, circuits[-1]["id"])


@given(
    st.lists(st.sets(st.integers(0, 9), max_size=8), min_size=2, max_size=6),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_whoever_is_told_every_change_has_the_state(swarms: list[set[int]], tokens: list[int]) -> None:
    states = [
        state_of([peer_of(at) | {"tokens_served": served} for at in sorted(swarm)])
        for swarm, served in zip(swarms, tokens, strict=False)
    ]
    has = states[0]
    for before, after in itertools.pairwise(states):
        has = applied(has, json.loads(json.dumps(changes(before, after))))
    assert has == states[-1]
