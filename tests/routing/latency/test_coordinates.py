"""Network coordinates: valid and bounded whatever comes, and right about round trips that nobody measured."""

import csv
import math
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.records.records import (
    COORDINATE_DIMENSIONS,
    MAX_COORDINATE_ERROR,
    MAX_COORDINATE_MS,
    Coordinate,
)
from molink.routing.arrays import BoolArray, FloatArray
from molink.routing.latency.coordinates import (
    MAX_MOVE_MS,
    MAX_RTT_MS,
    START,
    USABLE_ERROR,
    CoordinateTable,
    direction_between,
    fit,
    fit_neighbours,
    moved_ms,
    placed,
    predicted_rtt_ms,
    updated,
)

parts = st.floats(-MAX_COORDINATE_MS, MAX_COORDINATE_MS)
rtts = st.floats(0, MAX_RTT_MS, exclude_min=True)
coordinates = st.builds(
    Coordinate,
    st.tuples(*[parts] * COORDINATE_DIMENSIONS),
    st.floats(0, MAX_COORDINATE_MS, exclude_min=True),
    st.floats(0, MAX_COORDINATE_ERROR, exclude_min=True),
)
DIRECTION = direction_between("one", "other")


def at(*position: float, height_ms: float = 1.0, error: float = 0.5) -> Coordinate:
    padded = (*position, *[0.0] * (COORDINATE_DIMENSIONS - len(position)))
    return Coordinate(padded, height_ms, error)


def regions_rtt_ms() -> FloatArray:
    """[21, 21]: round trips between cloud regions, the mean of both directions."""
    with files("molink.simnet").joinpath("data", "aws21_rtt_ms.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    matrix = np.array([[float(cell) for cell in row[1:]] for row in rows])
    return np.asarray((matrix + matrix.T) / 2)


def held_out(peers: int, part: float, seed: int) -> BoolArray:
    """[peers, peers], symmetric: pairs that nobody measures."""
    upper = np.triu(np.random.default_rng(seed).random((peers, peers)) < part, 1)
    return upper | upper.T


def median_error_on_held_out(rtt_ms: FloatArray, part: float, seed: int) -> float:
    """Relative, of predictions for pairs that were hidden from the fit."""
    hidden = held_out(len(rtt_ms), part, seed)
    table = fit(np.where(hidden, np.nan, rtt_ms), seed=seed)
    return float(np.median(np.abs(table.rtt_ms() - rtt_ms)[hidden] / rtt_ms[hidden]))


@given(coordinates, coordinates, rtts)
def test_an_update_gives_a_valid_coordinate_and_moves_no_farther_than_allowed(
    own: Coordinate, other: Coordinate, rtt_ms: float
) -> None:
    moved = updated(own, other, rtt_ms, DIRECTION)  # a Coordinate checks its own bounds
    assert moved_ms(own, moved) <= MAX_MOVE_MS * (1 + 1e-9) + 0.05
    assert 0 < moved.error <= MAX_COORDINATE_ERROR


@given(coordinates, coordinates, st.floats(1, 2000))
def test_an_update_never_makes_the_prediction_worse(
    own: Coordinate, other: Coordinate, rtt_ms: float
) -> None:
    before = abs(predicted_rtt_ms(own, other) - rtt_ms)
    after = abs(predicted_rtt_ms(updated(own, other, rtt_ms, DIRECTION), other) - rtt_ms)
    assert after <= before + 0.1


@given(coordinates, coordinates, coordinates)
def test_predictions_are_symmetric_positive_and_keep_the_triangle_inequality(
    a: Coordinate, b: Coordinate, c: Coordinate
) -> None:
    assert predicted_rtt_ms(a, b) == predicted_rtt_ms(b, a) > 0
    detour = predicted_rtt_ms(a, c) + predicted_rtt_ms(c, b)
    assert predicted_rtt_ms(a, b) <= detour * (1 + 1e-12)


@given(st.lists(coordinates, max_size=5))
def test_a_table_predicts_what_its_coordinates_predict(listed: list[Coordinate]) -> None:
    table = CoordinateTable.of(listed).rtt_ms()
    expected = [[0.0 if a is b else predicted_rtt_ms(a, b) for b in listed] for a in listed]
    assert table == pytest.approx(np.array(expected).reshape(table.shape))


@pytest.mark.parametrize("rtt_ms", [0.0, -1.0, math.nan, math.inf, 2 * MAX_RTT_MS])
def test_what_is_no_round_trip_is_refused(rtt_ms: float) -> None:
    with pytest.raises(ValueError, match="rtt_ms"):
        updated(START, at(1.0), rtt_ms, DIRECTION)


@pytest.mark.parametrize(
    ("position", "height_ms", "error", "named"),
    [
        ((0.0,) * 3, 1.0, 0.5, "position"),
        ((0.0, 0.0, 0.0, math.nan), 1.0, 0.5, "position"),
        ((0.0, 0.0, 0.0, -math.inf), 1.0, 0.5, "position"),
        ((0.0, 0.0, 0.0, 10_001.0), 1.0, 0.5, "position"),
        ((0.0,) * 4, 0.0, 0.5, "height_ms"),
        ((0.0,) * 4, math.nan, 0.5, "height_ms"),
        ((0.0,) * 4, 10_001.0, 0.5, "height_ms"),
        ((0.0,) * 4, 1.0, 0.0, "error"),
        ((0.0,) * 4, 1.0, math.nan, "error"),
        ((0.0,) * 4, 1.0, 1.6, "error"),
    ],
)
def test_no_coordinate_out_of_bounds_exists(
    position: tuple[float, ...], height_ms: float, error: float, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Coordinate(position, height_ms, error)


def test_the_update_is_the_papers() -> None:
    """By hand: weight 0.5, predicted 30 + 10 = 40, misfit 0.2; moves 0.25 * 0.5 * 10 = 1.25 along 30:10."""
    own = at(30.0, height_ms=4.0)
    moved = updated(own, at(0.0, height_ms=6.0), 50.0, DIRECTION)
    assert moved.position == pytest.approx((30.0 + 1.25 * 0.75, 0.0, 0.0, 0.0))
    assert moved.height_ms == pytest.approx(4.0 + 1.25 * 0.25)
    assert moved.error == pytest.approx(0.5 + 0.25 * 0.5 * (0.2 - 0.5))


def test_who_is_sure_moves_little_and_who_is_unsure_moves_nobody_far() -> None:
    def moves(own_error: float, other_error: float) -> float:
        own = at(30.0, error=own_error)
        return moved_ms(own, updated(own, at(0.0, error=other_error), 100.0, DIRECTION))

    assert moves(0.05, 0.5) < moves(0.5, 0.5) < moves(0.5, 0.05)


def test_peers_that_coincide_part_and_never_the_wrong_way() -> None:
    apart = updated(START, START, 80.0, direction_between("a", "b"))
    assert predicted_rtt_ms(apart, START) > predicted_rtt_ms(START, START)
    tall = at(height_ms=50.0)
    nearer = updated(tall, tall, 20.0, direction_between("a", "b"))
    assert nearer.position == tall.position
    assert nearer.height_ms < 50.0


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_direction_is_a_unit_vector_that_the_ids_decide(own_id: str, other_id: str) -> None:
    direction = direction_between(own_id, other_id)
    assert math.hypot(*direction) == pytest.approx(1.0)
    assert direction == direction_between(own_id, other_id)
    assert direction != direction_between(own_id + "x", other_id)


def test_points_in_a_plane_are_found_from_some_of_their_distances() -> None:
    points = np.random.default_rng(1).uniform(0, 200, (60, 2))
    rtt_ms = np.linalg.norm(points[:, None] - points[None], axis=2) + 10.0
    assert median_error_on_held_out(rtt_ms, 0.5, seed=1) < 0.03


def test_round_trips_between_cloud_regions_that_nobody_measured_are_predicted() -> None:
    errors = [median_error_on_held_out(regions_rtt_ms(), 0.3, seed) for seed in range(4)]
    assert float(np.median(errors)) < 0.2


def test_the_error_that_a_peer_states_is_about_that_of_its_predictions() -> None:
    table = fit(regions_rtt_ms(), seed=3)
    assert float(table.errors.mean()) < USABLE_ERROR
    off = np.abs(table.rtt_ms() - regions_rtt_ms())[np.triu_indices(21, 1)]
    true = float(np.mean(off / regions_rtt_ms()[np.triu_indices(21, 1)]))
    assert true / 3 < float(table.errors.mean()) < true * 3


def test_a_fit_repeats_itself_and_leaves_alone_who_measured_nothing() -> None:
    rtt_ms = regions_rtt_ms()
    rtt_ms[5] = rtt_ms[:, 5] = np.nan
    first, second = fit(rtt_ms, rounds=30, seed=9), fit(rtt_ms, rounds=30, seed=9)
    assert (first.positions == second.positions).all()
    assert (first.positions != fit(rtt_ms, rounds=30, seed=8).positions).any()
    assert tuple(first.positions[5]) == START.position
    nobody = fit_neighbours(np.zeros((2, 0), dtype=np.int64), np.zeros((2, 0)))
    assert (nobody.errors == START.error).all()


def test_liars_among_its_neighbours_do_not_carry_a_peer_away() -> None:
    """Three of sixteen say that they are ten seconds away, and most sure of it, yet answer like the others."""
    rng = np.random.default_rng(4)
    honest = [at(*rng.uniform(-100, 100, 2), error=0.1) for _ in range(13)]
    liars = [at(*[sign * MAX_COORDINATE_MS] * 4, error=1e-6) for sign in (1, -1, 1)]
    home = at(20.0, 30.0)
    samples = {str(number): (other, predicted_rtt_ms(home, other)) for number, other in enumerate(honest)}
    own = START
    for _ in range(50):
        own = placed(
            "own", own, samples | {f"liar {number}": (liar, 50.0) for number, liar in enumerate(liars)}, 3
        )
    off = [abs(predicted_rtt_ms(own, one) - rtt_ms) / rtt_ms for one, rtt_ms in samples.values()]
    assert max(off) < 0.1
    assert own.error <= USABLE_ERROR


def test_a_peer_that_only_liars_surround_knows_that_it_knows_nothing() -> None:
    liars = {
        str(number): (at(*[sign * MAX_COORDINATE_MS] * 4), 50.0) for number, sign in enumerate((1, -1, 1))
    }
    own = START
    for _ in range(50):
        own = placed("own", own, liars)
    assert own.error > USABLE_ERROR


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("liar", "rtt_ms"),
    [
        (at(0.0, error=1e-6), 60_000.0),
        (at(0.0, error=1e-6), 500.0),
        (at(100.0, 100.0, error=1e-6), 900.0),
        (at(MAX_COORDINATE_MS, error=1e-6), 50.0),
        (at(-400.0, height_ms=300.0, error=1e-6), 0.1),
    ],
)
def test_however_late_two_of_ten_answer_and_wherever_they_say_to_be_a_peer_stays_where_it_is(
    seed: int, liar: Coordinate, rtt_ms: float
) -> None:
    rng = np.random.default_rng(seed)
    home = at(*rng.uniform(-50, 50, 2), error=0.1)
    others = [at(*rng.uniform(-100, 100, 2), error=0.1) for _ in range(8)]
    honest = {str(number): (one, predicted_rtt_ms(home, one)) for number, one in enumerate(others)}
    own = home
    for _ in range(25):
        own = placed("own", own, honest | {f"liar {number}": (liar, rtt_ms) for number in range(2)}, 3)
    assert max(abs(predicted_rtt_ms(own, one) - known_ms) for one, known_ms in honest.values()) <= 30.0
    assert own.error <= USABLE_ERROR


@pytest.mark.full
def test_a_round_among_neighbours_that_pull_in_all_directions_gives_a_valid_coordinate() -> None:
    """Where one has moved this peer beyond another that it seemed too far from, what is left to that one is no time."""
    for seed in range(700):
        rng = np.random.default_rng(seed)
        width = rng.choice([1.0, 3.0, 10.0, 50.0])

        def anywhere(rng: np.random.Generator = rng, width: float = width) -> Coordinate:
            position = rng.uniform(-width, width, COORDINATE_DIMENSIONS).tolist()
            return at(*position, height_ms=rng.uniform(0.01, width), error=rng.choice([0.05, 0.3, 1.0]))

        samples = {
            str(one): (anywhere(), float(rng.choice([rng.uniform(0.05, 2), rng.uniform(0.05, 20 * width)])))
            for one in range(rng.integers(3, 9))
        }
        assert 0 < placed("own", anywhere(), samples, 3).error <= MAX_COORDINATE_ERROR


@given(st.dictionaries(st.text(max_size=4), st.tuples(coordinates, rtts), max_size=6), coordinates)
def test_a_round_of_any_samples_gives_a_valid_coordinate(
    samples: dict[str, tuple[Coordinate, float]], own: Coordinate
) -> None:
    moved = placed("own", own, samples, 2)
    assert moved_ms(own, moved) <= 2 * len(samples) * (MAX_MOVE_MS + 0.1)
    assert placed("own", own, dict(reversed(samples.items())), 2) == moved
