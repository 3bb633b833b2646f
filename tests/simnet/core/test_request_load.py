"""Requests of a run: the trace's lengths and gaps, at the rate that was asked."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.simnet.core.request_load import LengthLimits, arrivals, kept
from molink.simnet.core.traces import TraceRequest, bundled_trace
from molink.simnet.devices.model_shapes import QWEN2_7B

SPEC = QWEN2_7B.spec()
traces = st.lists(st.integers(0, 10**6), min_size=1, max_size=40).map(
    lambda ms: tuple(TraceRequest((at - min(ms)) / 1000, 1 + place, 1) for place, at in enumerate(sorted(ms)))
)


@given(traces, st.floats(0.01, 100), st.floats(0.1, 1000), st.data())
def test_arrivals_never_go_back_and_begin_at_once(
    trace: tuple[TraceRequest, ...], rate_rps: float, lasting_s: float, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, len(trace) - 1))
    requests = list(islice(arrivals(trace, rate_rps, lasting_s, first), 100))
    assert requests[0].arrival_s == 0
    assert all(late.arrival_s >= early.arrival_s for early, late in pairwise(requests))
    assert [one.number for one in requests] == list(range(100))
    assert [one.prompt_tokens for one in requests] == [1 + (first + n) % len(trace) for n in range(100)]


@pytest.mark.parametrize("first", [0, 5_000, 16_600])
@pytest.mark.parametrize("rate_rps", [0.1, 0.3, 5.0])
def test_as_many_requests_come_as_the_rate_says(first: int, rate_rps: float) -> None:
    trace = kept(bundled_trace(), LengthLimits(), SPEC)
    requests = islice(arrivals(trace, rate_rps, 1800.0, first), 20_000)
    assert sum(one.arrival_s < 1800.0 for one in requests) == pytest.approx(1800 * rate_rps, abs=2)


def test_longer_requests_are_left_out() -> None:
    trace = tuple(TraceRequest(0.0, prompt, new) for prompt, new in ((10, 5), (11, 5), (10, 6)))
    assert kept(trace, LengthLimits(10, 5), SPEC) == trace[:1]
    with pytest.raises(ValueError, match="no request of the trace has at most 9 tokens"):
        kept(trace, LengthLimits(9, 5), SPEC)


@pytest.mark.parametrize(("rate_rps", "lasting_s", "first"), [(0.0, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.0, 1)])
def test_what_cannot_come_is_refused(rate_rps: float, lasting_s: float, first: int) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        next(arrivals((TraceRequest(0.0, 1, 1),), rate_rps, lasting_s, first))
