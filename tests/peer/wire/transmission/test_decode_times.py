"""The paper's prediction of the next decode, against numbers computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.wire.transmission.decode_times import (
    DecodePipeline,
    DecodeProfile,
    FirstBatch,
    PipelineLink,
    RunningBatch,
    available_s,
    decode_finish_s,
)

PROFILE = DecodeProfile(((1, 0.010), (5, 0.018), (9, 0.030)))
CIRCUIT = DecodePipeline(
    profiles=(PROFILE, DecodeProfile(((1, 0.020),)), PROFILE),
    hops=(PipelineLink(0.030, 12.5e6), PipelineLink(0.010, 2.5e6), PipelineLink(0.020, 1e6)),
    activation_bytes=12_500,
    token_bytes=2,
)


@pytest.mark.parametrize(
    ("tokens", "expected_s"), [(1, 0.010), (3, 0.014), (5, 0.018), (7, 0.024), (9, 0.030), (13, 0.042)]
)
def test_a_profile_is_linear_between_its_points_and_beyond_them(tokens: int, expected_s: float) -> None:
    assert PROFILE.duration_s(tokens) == pytest.approx(expected_s)


def test_the_circuit_sums_all_stages_and_all_hops_and_brings_the_token_back() -> None:
    assert CIRCUIT.compute_s(5) == pytest.approx(0.018 + 0.020 + 0.018)
    # 62,500 bytes of activations: 5 ms on the first hop, 25 ms on the second; 10 bytes of tokens on the third.
    assert CIRCUIT.transfer_s(5) == pytest.approx(0.060 + 0.005 + 0.025 + 0.00001)


def test_case_1_a_decode_that_starts_with_the_transmission_leaves_its_whole_duration() -> None:
    assert available_s(7.0, CIRCUIT, 0, RunningBatch(7.0, 5), None) == pytest.approx(0.018)


def test_case_2_a_decode_that_runs_already_leaves_the_rest_of_its_duration() -> None:
    first = FirstBatch(6.9, 1)
    assert available_s(7.011, CIRCUIT, 0, RunningBatch(7.0, 5), first) == pytest.approx(0.007)


def test_case_3_without_a_running_decode_the_first_one_has_to_come_round_the_circuit() -> None:
    # T_o + T_m = 0.056 + 0.09001 s.
    first = FirstBatch(7.0, 5)
    assert decode_finish_s(CIRCUIT, 0, None, first) == pytest.approx(7.14601)
    assert available_s(7.040, CIRCUIT, 0, None, first) == pytest.approx(0.10601)


def test_an_overdue_decode_leaves_no_time_and_an_unknown_one_is_told_apart() -> None:
    assert available_s(8.0, CIRCUIT, 0, RunningBatch(7.0, 5), None) == 0.0
    assert available_s(8.0, CIRCUIT, 0, None, None) is None


@given(st.integers(1, 100_000), st.lists(st.floats(0.0, 10.0), min_size=1, max_size=5))
def test_a_duration_is_never_negative(tokens: int, times_s: list[float]) -> None:
    profile = DecodeProfile(tuple((1 + 4 * number, time_s) for number, time_s in enumerate(times_s)))
    assert profile.duration_s(tokens) >= 0.0


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((2, 1.0), (2, 1.0)), ((1, -1.0),), ((1, float("nan")),)]
)
def test_a_profile_that_is_none_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="a profile"):
        DecodeProfile(points)


def test_a_circuit_has_a_hop_for_each_stage() -> None:
    with pytest.raises(ValueError, match="hops"):
        DecodePipeline((PROFILE,), (), 1, 1)
    with pytest.raises(ValueError, match="a hop needs"):
        PipelineLink(0.0, 0.0)
