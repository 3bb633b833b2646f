"""How far peers are from each other: measured first, predicted next, assumed last."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of

from molink.dht.records.records import Coordinate
from molink.routing import CostModel, plan
from molink.routing.latency.coordinates import USABLE_ERROR
from molink.routing.latency.latency_matrix import latency_matrix_ms

COST = CostModel()
IDS = ("a", "b", "c")
rtts = st.one_of(st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, -1.0]))
coordinates = st.none() | st.builds(
    lambda x, height_ms, error: at(x, height_ms, error=error),
    st.floats(-1e4, 1e4),
    st.floats(0.01, 100),
    st.floats(0.01, 1.5),
)


def at(x: float, height_ms: float = 5.0, *, error: float = 0.2) -> Coordinate:
    return Coordinate((x, 0.0, 0.0, 0.0), height_ms, error)


def one_way(rtt_ms: float) -> float:
    return rtt_ms / 2 + COST.hop_overhead_ms


def test_a_pair_that_nobody_measured_is_as_far_as_its_coordinates_are() -> None:
    found = latency_matrix_ms(("a", "b"), {}, [at(0.0, 5.0), at(30.0, 7.0)], COST)
    assert found[0, 1] == found[1, 0] == one_way(42.0)


def test_a_measurement_in_either_direction_goes_before_a_prediction() -> None:
    found = latency_matrix_ms(
        IDS, {("a", "b"): 20.0, ("c", "b"): 90.0}, [at(0.0), at(500.0), at(900.0)], COST
    )
    assert found[0, 1] == found[1, 0] == one_way(20.0)
    assert found[1, 2] == found[2, 1] == one_way(90.0)
    assert found[0, 2] == one_way(910.0)


def test_nobody_seems_much_nearer_than_the_other_end_says() -> None:
    found = latency_matrix_ms(
        ("liar", "honest"), {("liar", "honest"): 0.1, ("honest", "liar"): 80.0}, [None] * 2, COST
    )
    assert found[0, 1] == found[1, 0] == one_way(80.0)


@given(claims=st.dictionaries(st.sampled_from(["a", "b", "elsewhere", "nowhere"]), rtts))
def test_what_others_announce_puts_no_two_honest_peers_apart_or_together(claims: dict[str, float]) -> None:
    known = {("a", "c"): 60.0, ("b", "c"): 20.0}
    for measured in (known, known | {("a", "b"): 35.0}):
        lied = measured | {("liar", target): rtt_ms for target, rtt_ms in claims.items()}
        honest = latency_matrix_ms(("a", "b", "liar"), measured, [None] * 3, COST)
        assert (
            latency_matrix_ms(("a", "b", "liar"), lied, [None] * 3, COST)[:2, :2].tolist()
            == honest[:2, :2].tolist()
        )


def test_without_two_good_coordinates_the_medians_hold() -> None:
    measured = {("a", "elsewhere"): 60.0, ("b", "elsewhere"): 20.0}
    for other in (None, at(500.0, error=USABLE_ERROR * 1.01)):
        assert latency_matrix_ms(("a", "b"), measured, [at(0.0), other], COST)[0, 1] == one_way(40.0)
        assert latency_matrix_ms(("a", "b"), {}, [at(0.0), other], COST)[0, 1] == one_way(COST.unknown_rtt_ms)


@given(st.dictionaries(st.permutations(IDS).map(lambda ids: (ids[0], ids[1])), rtts), st.data())
def test_no_link_is_free_and_none_is_without_a_number(
    measured: dict[tuple[str, str], float], data: st.DataObject
) -> None:
    found = latency_matrix_ms(IDS, measured, [data.draw(coordinates) for _ in IDS], COST)
    for source, target in itertools.permutations(range(3), 2):
        assert COST.hop_overhead_ms <= found[source, target] < math.inf
    assert found.diagonal().tolist() == [0.0] * 3


def test_the_router_takes_the_peer_that_coordinates_say_is_near() -> None:
    front = peer("front", (0, 4), coordinate=at(0.0))
    for near, far in (("b", "c"), ("c", "b")):
        backs = (peer(near, (4, 8), coordinate=at(10.0)), peer(far, (4, 8), coordinate=at(200.0)))
        route = plan(snapshot_of(front, *backs), 10)
        assert route.peer_ids == ("front", near)
        assert route.hops[0].link_ms == one_way(20.0)
