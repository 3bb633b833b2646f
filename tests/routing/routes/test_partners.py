"""Partners of hops: who may be one, who is the best one, and when there is none."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of
from support.circuits.route_cases import changed

from molink.dht.records.records import Coordinate, LayerLatency, PeerView
from molink.routing import NoCircuit, NoPartner, Route, Snapshot, choose_partners, plan
from molink.routing.cost.cost import CostModel
from molink.routing.cost.terms import Demand
from molink.routing.problem.circuit import Hop
from molink.routing.routes.assignment import assign
from molink.routing.routes.copy_forms import (
    WORK_SHARE,
    CopyForm,
    computing_ms,
    copied_bytes_per_token,
    copy_costs,
)
from molink.routing.routes.partners import COPY_SHARE, MOST_SOUGHT, copy_bytes_per_s, partner_candidates
from molink.routing.routes.route import route_of
from molink.shards.spec import Span, missing_spans
from molink.simnet.devices.model_shapes import MODEL_SHAPES

DEMAND = Demand.of(100, 50)
ROOM = MODEL.kv_bytes(Span(0, 4), DEMAND.tokens)
FAST = 1000.0
"""Megabits per second: enough for any copy here."""
SPANS = ((0, 4), (4, 8), (0, 8), (2, 6), (0, 5), (3, 8))


def holder(peer_id: str, *spans: tuple[int, int], host: str = "", **changes: Any) -> PeerView:  # noqa: ANN401 (fields of several types)
    """A peer at a home of its own, with a line that carries any copy."""
    coordinate = changes.pop("coordinate", Coordinate((0.0, 0.0, 0.0, 0.0), 5.0, 0.1))
    uplink_mbps = changes.pop("uplink_mbps", FAST)
    view = peer(peer_id, *spans, coordinate=coordinate, **changes)
    return replace(
        view,
        facts=replace(view.facts, uplink_mbps=uplink_mbps, grpc_addresses=(f"{host or peer_id}.example:1",)),
    )


def keeping(view: PeerView, **terms: Any) -> PeerView:  # noqa: ANN401 (fields of several types)
    """The same peer with other terms of copies."""
    return replace(view, facts=replace(view.facts, **terms))


def at(x_ms: float) -> Coordinate:
    return Coordinate((x_ms, 0.0, 0.0, 0.0), 1.0, 0.1)


def route_through(*peer_ids: str, snapshot: Snapshot) -> Route:
    """The circuit over these peers, layers divided evenly."""
    posed = snapshot.pose(DEMAND)
    machines = {peer_id: machine for machine, peer_id in enumerate(posed.peer_ids)}
    each = MODEL.layers // len(peer_ids)
    hops = [Hop(machines[one], place * each, (place + 1) * each) for place, one in enumerate(peer_ids)]
    return route_of(posed, hops, snapshot, CostModel())


def pair(*others: PeerView, **changes: Any) -> tuple[Snapshot, Route]:  # noqa: ANN401 (fields of several types)
    """A circuit of two hops, `a` and `b`, among others."""
    snapshot = snapshot_of(holder("a", (0, 4), **changes), holder("b", (4, 8)), *others)
    return snapshot, route_through("a", "b", snapshot=snapshot)


@st.composite
def swarms(draw: st.DrawFn) -> tuple[Snapshot, Route]:
    """A snapshot in which everybody knows where he is, and the circuit that a client would take."""
    views = []
    for number in range(draw(st.integers(2, 7))):
        view = holder(
            f"p{number}",
            draw(st.sampled_from(SPANS)),
            host=draw(st.sampled_from(("here", "there", ""))),
            coordinate=at(draw(st.floats(0.0, 200.0))),
            layer_latencies=(LayerLatency(1, draw(st.floats(0.1, 9.0))), LayerLatency(8, 20.0)),
            head_ms=draw(st.floats(0.0, 3.0)),
            sessions=draw(st.integers(0, 6)),
            queued=draw(st.integers(0, 3)),
            draining=draw(st.integers(0, 9)) == 0,
            free_kv_bytes=draw(st.sampled_from((0, ROOM, 2 * ROOM, 10**9))),
            uplink_mbps=draw(st.sampled_from((0.1, 2.0, FAST))),
        )
        views.append(view)
    snapshot = snapshot_of(*views)
    try:
        return snapshot, plan(snapshot, DEMAND.tokens, prompt_tokens=DEMAND.prompt_tokens)
    except NoCircuit:
        assume(False)
        raise


def roomy(snapshot: Snapshot, route: Route, hop: int) -> list[str]:
    """Who holds the hop's layers and has room, off the circuit."""
    span = route.hops[hop].span
    return [
        view.peer_id
        for view in snapshot.usable()
        if view.peer_id not in route.peer_ids
        and not missing_spans(span, view.state.spans)
        and view.state.free_kv_bytes >= MODEL.kv_bytes(span, DEMAND.tokens)
    ]


def keeps_up(snapshot: Snapshot, route: Route, hop: int, token_bytes: int) -> bool:
    """Whether the hop's line carries so much for each token."""
    view = next(view for view in snapshot.peers if view.peer_id == route.hops[hop].peer_id)
    tokens_per_s, sessions = 1000 / route.tpot_ms, max(1, view.state.sessions)
    assert view.facts.uplink_mbps is not None
    line_bytes = view.facts.uplink_mbps * 1e6 / 8
    decode_bytes = sessions * MODEL.activation_bytes * tokens_per_s
    return token_bytes * tokens_per_s * sessions <= COPY_SHARE * max(0.0, line_bytes - decode_bytes)


def best_copy(snapshot: Snapshot, route: Route, hop: int, peer_id: str) -> CopyForm | None:
    """Of the forms that the hop's line carries and that peer has time for, the one of the fewest bytes."""
    span, tpot_ms = route.hops[hop].span, route.tpot_ms
    view = next(view for view in snapshot.peers if view.peer_id == peer_id)
    sizes = {CopyForm.KEYS_AND_VALUES: sum(MODEL.kv_bytes_per_token[layer] for layer in span)}
    token_ms = computing_ms(view, span, 1000 / tpot_ms)
    held = sum(map(len, view.state.spans)) * view.facts.layer_latencies[0].layer_ms + view.facts.step_ms
    idle = 1 - min(1.0, view.state.sessions * held / tpot_ms)
    if token_ms <= WORK_SHARE * idle * tpot_ms:
        sizes |= {CopyForm.TOKEN_IDS: 4} if span.start == 0 else {CopyForm.INPUTS: MODEL.activation_bytes}
    carried = [form for form, size in sizes.items() if keeps_up(snapshot, route, hop, size)]
    return min(carried, key=lambda form: (sizes[form], form), default=None)


def able(snapshot: Snapshot, route: Route, hop: int) -> list[str]:
    """Who could be the hop's partner, by the rules one after another."""
    return [name for name in roomy(snapshot, route, hop) if best_copy(snapshot, route, hop, name) is not None]


def switched_ms(snapshot: Snapshot, route: Route, hop: int, peer_id: str) -> float:
    """The router's own prediction for the circuit after the switch."""
    posed = snapshot.pose(DEMAND)
    names = [*route.peer_ids]
    names[hop] = peer_id
    hops = [
        Hop(posed.peer_ids.index(name), one.span.start, one.span.stop)
        for name, one in zip(names, route.hops, strict=True)
    ]
    return route_of(posed, hops, snapshot, CostModel()).tpot_ms


def same_home(snapshot: Snapshot, one: str, other: str) -> bool:
    hosts = {view.peer_id: view.facts.grpc_addresses for view in snapshot.peers}
    return hosts[one] == hosts[other]


def every_choice(snapshot: Snapshot, route: Route) -> Iterator[tuple[str | None, ...]]:
    options = [[None, *able(snapshot, route, hop)] for hop in range(len(route.hops))]
    for names in product(*options):
        some = [name for name in names if name is not None]
        if len(set(some)) == len(some):
            yield names


@given(swarms())
def test_a_partner_holds_the_span_has_the_room_and_is_on_no_hop_nor_another_hops_partner(
    swarm: tuple[Snapshot, Route],
) -> None:
    snapshot, route = swarm
    chosen = choose_partners(snapshot, route, DEMAND)
    assert len(chosen) == len(route.hops)
    named = [one.peer_id for one in chosen if one.peer_id is not None]
    assert len(set(named)) == len(named)
    for hop, one in enumerate(chosen):
        assert (one.peer_id is None) == (one.tpot_ms is None) == (one.reason is not None)
        if one.peer_id is not None:
            assert one.peer_id in able(snapshot, route, hop)
            assert one.cost is not None
            assert one.cost.form is best_copy(snapshot, route, hop, one.peer_id)
            assert keeps_up(snapshot, route, hop, one.cost.token_bytes)


@given(swarms())
def test_no_choice_gives_more_hops_a_partner_nor_more_of_them_another_home_nor_a_lower_tpot(
    swarm: tuple[Snapshot, Route],
) -> None:
    snapshot, route = swarm

    def rank(names: tuple[str | None, ...]) -> tuple[int, int, float]:
        given_ = [(hop, name) for hop, name in enumerate(names) if name is not None]
        shared = sum(same_home(snapshot, route.hops[hop].peer_id, name) for hop, name in given_)
        return -len(given_), shared, sum(switched_ms(snapshot, route, hop, name) for hop, name in given_)

    chosen = choose_partners(snapshot, route, DEMAND)
    best = min(map(rank, every_choice(snapshot, route)))
    assert rank(tuple(one.peer_id for one in chosen)) == pytest.approx(best)
    for hop, one in enumerate(chosen):
        if one.peer_id is not None:
            assert one.tpot_ms == pytest.approx(switched_ms(snapshot, route, hop, one.peer_id))


@given(swarms())
def test_a_hop_without_a_partner_is_told_why(swarm: tuple[Snapshot, Route]) -> None:
    snapshot, route = swarm
    for hop, one in enumerate(choose_partners(snapshot, route, DEMAND)):
        if one.reason is NoPartner.UPLINK:
            least = copy_costs(MODEL, route.hops[hop].span, MODEL.dtype)[0].token_bytes
            assert not keeps_up(snapshot, route, hop, least)
        elif one.reason is NoPartner.WORK:
            assert roomy(snapshot, route, hop)
            assert not able(snapshot, route, hop)
        elif one.reason is not None:
            assert (one.reason is NoPartner.TAKEN) == bool(able(snapshot, route, hop))


@given(swarms(), st.randoms(use_true_random=False))
def test_the_order_of_peers_does_not_matter(swarm: tuple[Snapshot, Route], order: Any) -> None:  # noqa: ANN401 (a generator of hypothesis)
    snapshot, route = swarm
    shuffled = list(snapshot.peers)
    order.shuffle(shuffled)
    again = choose_partners(replace(snapshot, peers=tuple(shuffled)), route, DEMAND)
    assert again == choose_partners(snapshot, route, DEMAND)


@given(swarms(), st.data())
def test_one_hop_alone_gets_the_best_of_all_that_are_not_to_be_avoided(
    swarm: tuple[Snapshot, Route], data: st.DataObject
) -> None:
    snapshot, route = swarm
    hop = data.draw(st.integers(0, len(route.hops) - 1))
    avoid = frozenset(data.draw(st.sets(st.sampled_from([view.peer_id for view in snapshot.peers]))))
    (one,) = choose_partners(snapshot, route, DEMAND, hops=(hop,), avoid=avoid)
    left = [name for name in able(snapshot, route, hop) if name not in avoid]
    if one.peer_id is None:
        assert not left
        return
    own = route.hops[hop].peer_id
    assert one.peer_id in left
    assert one.tpot_ms == pytest.approx(
        min(
            switched_ms(snapshot, route, hop, name)
            for name in left
            if same_home(snapshot, own, name) == same_home(snapshot, own, one.peer_id)
        )
    )


def test_the_nearer_of_two_equals_is_the_partner_and_the_faster_of_two_as_near() -> None:
    far, near = holder("far", (0, 4), coordinate=at(90.0)), holder("near", (0, 5), coordinate=at(5.0))
    assert choose_partners(*pair(far, near), DEMAND)[0].peer_id == "near"
    slow = holder("slow", (0, 4), layer_latencies=(LayerLatency(1, 9.0),))
    quick = holder("quick", (0, 4), layer_latencies=(LayerLatency(1, 1.0),))
    assert choose_partners(*pair(slow, quick), DEMAND)[0].peer_id == "quick"


def test_who_is_at_the_address_of_the_hops_peer_is_its_partner_only_if_nobody_else_is() -> None:
    beside = holder("beside", (0, 4), host="a")
    elsewhere = holder("elsewhere", (0, 4), coordinate=at(150.0))
    assert choose_partners(*pair(beside, elsewhere), DEMAND)[0].peer_id == "elsewhere"
    assert choose_partners(*pair(beside), DEMAND)[0].peer_id == "beside"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((), NoPartner.SPAN),
        ((holder("c", (0, 3)),), NoPartner.SPAN),
        ((holder("c", (0, 4), free_kv_bytes=ROOM - 1),), NoPartner.MEMORY),
        ((holder("c", (0, 4), draining=True),), NoPartner.SPAN),
    ],
)
def test_without_anybody_suitable_there_is_no_partner(
    others: tuple[PeerView, ...], reason: NoPartner
) -> None:
    chosen = choose_partners(*pair(*others), DEMAND)
    assert [one.reason for one in chosen] == [reason, NoPartner.SPAN]


def test_one_peer_is_not_the_partner_of_two_hops() -> None:
    chosen = choose_partners(*pair(holder("both", (0, 8))), DEMAND)
    assert sorted(one.peer_id or "" for one in chosen) == ["", "both"]
    assert {one.reason for one in chosen} == {None, NoPartner.TAKEN}


def test_a_line_that_is_too_thin_or_shared_by_too_many_sessions_carries_no_copy() -> None:
    other = holder("other", (0, 4))
    assert choose_partners(*pair(other, uplink_mbps=0.5), DEMAND)[0].peer_id == "other"
    busy = choose_partners(*pair(other, uplink_mbps=0.5, sessions=60), DEMAND)[0]
    assert busy.reason is NoPartner.UPLINK


def test_a_circuit_that_the_snapshot_does_not_know_whole_gets_no_partners() -> None:
    snapshot, route = pair(holder("other", (0, 4)))
    gone = replace(
        snapshot,
        peers=tuple(changed(view, ttl_s=0 if view.peer_id == "b" else 60) for view in snapshot.peers),
    )
    assert [one.reason for one in choose_partners(gone, route, DEMAND)] == [NoPartner.UNKNOWN] * 2
    with pytest.raises(ValueError, match="hops are 0 to 1"):
        choose_partners(snapshot, route, DEMAND, hops=(2,))


def test_a_hop_that_drains_has_a_partner_to_leave_its_sessions_to_and_so_have_the_others() -> None:
    snapshot, route = pair(holder("other", (0, 4)), holder("another", (4, 8)))
    drains = tuple(changed(view, draining=view.peer_id in ("b", "other")) for view in snapshot.peers)
    chosen = choose_partners(replace(snapshot, peers=drains), route, DEMAND)
    assert [one.peer_id for one in chosen] == [None, "another"]
    assert chosen[0].reason is NoPartner.SPAN, "who drains itself keeps nothing for others"


def test_copies_share_what_decode_leaves_of_a_line() -> None:
    assert copy_bytes_per_s(8.0, 200_000.0, 4) == COPY_SHARE * 800_000 / 4
    assert copy_bytes_per_s(8.0, 2_000_000.0, 0) == 0.0


@pytest.mark.parametrize(("name", "most"), [("llama-2-7b", 0.2), ("llama-2-70b", 0.6)])
def test_a_copy_from_inputs_of_eight_layers_takes_a_part_of_the_bytes(name: str, most: float) -> None:
    spec, span = MODEL_SHAPES[name].spec(), Span(8, 16)
    inputs, lines = (
        copied_bytes_per_token(spec, span, form, spec.dtype)
        for form in (CopyForm.INPUTS, CopyForm.KEYS_AND_VALUES)
    )
    assert inputs <= most * lines
    assert copy_costs(spec, span, spec.dtype)[0].form is CopyForm.INPUTS
    assert copy_costs(spec, Span(0, 8), spec.dtype)[0].token_bytes == 4


def test_layers_with_states_are_copied_from_inputs_alone() -> None:
    recurrent = replace(MODEL, state_bytes=(0, 0, 1000, 0, 0, 0, 0, 0))
    assert [one.form for one in copy_costs(recurrent, Span(2, 5), "float32")] == [CopyForm.INPUTS]
    assert [one.form for one in copy_costs(recurrent, Span(0, 3), "float32")] == [CopyForm.TOKEN_IDS]
    with pytest.raises(ValueError, match="not copied as keys_and_values"):
        copied_bytes_per_token(recurrent, Span(2, 5), CopyForm.KEYS_AND_VALUES, "float32")


def test_few_holders_on_a_shortlist_have_others_of_the_swarm_sought() -> None:
    others = [holder(f"o{at:02}", (0, 4), sessions=at % 3) for at in range(40)]
    snapshot, route = pair(*others, holder("leaving", (0, 4), draining=True), holder("part", (0, 3)))
    found = partner_candidates(snapshot.peers, frozenset({"o01", "o02"}), route, (0,))
    assert {"a", "b", "o01", "o02"} <= found
    assert len(found & {view.peer_id for view in others} | {"a"}) == MOST_SOUGHT
    assert not found & {"leaving", "part"}
    assert found - {"a", "b", "o01", "o02"} <= {view.peer_id for view in others if not view.state.sessions}
    everyone = frozenset(view.peer_id for view in snapshot.peers)
    assert partner_candidates(snapshot.peers, everyone, route, (0, 1)) == everyone


def test_a_thin_line_carries_what_a_partner_computes_from_and_a_busy_partner_gets_keys_and_values() -> None:
    idle, busy = holder("idle", (4, 8)), holder("busy", (4, 8), sessions=50)
    snapshot = snapshot_of(holder("a", (0, 4)), holder("b", (4, 8)), idle)
    route = route_through("a", "b", snapshot=snapshot)
    (choice,) = choose_partners(snapshot, route, DEMAND, hops=[1])
    assert choice.cost is not None
    assert (choice.cost.form, choice.cost.token_bytes) == (CopyForm.INPUTS, MODEL.activation_bytes)
    snapshot = replace(snapshot, peers=(*snapshot.peers[:2], busy))
    (choice,) = choose_partners(snapshot, route, DEMAND, hops=[1])
    assert choice.cost is not None
    assert choice.cost.form is CopyForm.KEYS_AND_VALUES
    seen = replace(snapshot, peers=(*snapshot.peers[:2], idle))
    (choice,) = choose_partners(seen, route, DEMAND, hops=[1], without_time=frozenset({"idle"}))
    assert choice.cost is not None
    assert choice.cost.form is CopyForm.KEYS_AND_VALUES, "who was seen not to keep up has no time either"
    tokens_per_s, room = 1000 / route.tpot_ms, MODEL.activation_bytes + MODEL.activation_bytes / COPY_SHARE
    thin = holder("b", (4, 8), uplink_mbps=1.01 * room * tokens_per_s / 125_000)
    for other, reason in ((idle, None), (busy, NoPartner.WORK)):
        snapshot = replace(snapshot, peers=(snapshot.peers[0], thin, other))
        (choice,) = choose_partners(snapshot, route, DEMAND, hops=[1])
        assert choice.reason is reason


@pytest.mark.parametrize("part", [None, 0.9, 1.1], ids=["not_known", "too_thin", "wide_enough"])
def test_holders_that_share_work_copy_keys_and_values_unless_their_line_is_known_to_be_too_thin(
    part: float | None,
) -> None:
    snapshot, route = pair(holder("other", (4, 8)))
    tokens_per_s = 1000 / route.tpot_ms
    carried_bytes = sum(MODEL.kv_bytes_per_token[4:8]) + MODEL.activation_bytes
    uplink_mbps = None if part is None else part * carried_bytes * tokens_per_s / 125_000
    shared = CopyForm.INPUTS if part == 0.9 else CopyForm.KEYS_AND_VALUES
    for pairs, form in ((True, shared), (False, CopyForm.INPUTS)):
        tail = keeping(holder("b", (4, 8)), pairs=pairs, uplink_mbps=uplink_mbps)
        snapshot = replace(snapshot, peers=(snapshot.peers[0], tail, snapshot.peers[2]))
        (choice,) = choose_partners(snapshot, route, DEMAND, hops=[1])
        assert choice.cost is not None
        assert choice.cost.form is form


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_an_assignment_is_as_cheap_as_the_cheapest_of_all(rows: int, more: int, seed: int) -> None:
    cost = np.random.default_rng(seed).integers(0, 20, (rows, rows + more)).astype(float)
    columns = assign(cost)
    assert len(set(columns)) == rows
    ways = [way for way in product(range(rows + more), repeat=rows) if len(set(way)) == rows]
    assert cost[range(rows), list(columns)].sum() == min(cost[range(rows), list(way)].sum() for way in ways)


def test_an_assignment_without_a_column_for_each_row_or_with_a_cost_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        assign(np.ones((2, 1)))
    with pytest.raises(ValueError, match="finite"):
        assign(np.array([[np.nan]]))


def test_who_keeps_no_copies_has_none_and_a_named_partner_is_the_only_one() -> None:
    c, d = holder("c", (0, 8)), holder("d", (0, 8))
    snapshot, route = pair(keeping(c, keeps_copies=False), d)
    assert [one.peer_id for one in choose_partners(snapshot, route, DEMAND, hops=[0])] == ["d"]
    a = keeping(holder("a", (0, 4)), partner_peer_id="c")
    snapshot = snapshot_of(a, holder("b", (4, 8)), c, d)
    assert [one.peer_id for one in choose_partners(snapshot, route, DEMAND, hops=[0])] == ["c"]
    for a in (
        keeping(holder("a", (0, 4)), partner_peer_id="e"),
        keeping(holder("a", (0, 4)), keeps_copies=False),
    ):
        snapshot = snapshot_of(a, holder("b", (4, 8)), c, d)
        (choice,) = choose_partners(snapshot, route, DEMAND, hops=[0])
        assert (choice.peer_id, choice.reason) == (None, NoPartner.DECLINED)


def test_a_short_answer_to_a_long_prompt_is_not_copied_but_where_its_hop_leaves_or_shares_its_work() -> None:
    spare = holder("spare", (0, 4))
    short, long = Demand.of(1008, 1000), Demand.of(2000, 1000)
    snapshot, route = pair(spare)
    assert choose_partners(snapshot, route, short, hops=[0])[0].reason is NoPartner.SHORT
    assert choose_partners(snapshot, route, long, hops=[0])[0].peer_id == "spare"
    for head in (holder("a", (0, 4), draining=True), keeping(holder("a", (0, 4)), pairs=True)):
        leaving = snapshot_of(head, holder("b", (4, 8)), spare)
        assert choose_partners(leaving, route, short, hops=[0])[0].peer_id == "spare"
