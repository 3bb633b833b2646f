"""A peer's threads: its owner decides, else measurements do, and decode before prompts."""

import itertools
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.daemon.settings import load_settings
from molink.peer.device import threads
from molink.peer.device.thread_choice import (
    AS_FAST,
    BUSY_SHARE,
    ProcessorTimes,
    as_fast_as_any,
    candidates,
    share_of_others,
    stays_the_best,
)
from molink.peer.device.threads import counts_to_try, processor_times, use_fastest

COUNTS = st.integers(1, 512)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(COUNTS, COUNTS)
def test_one_thread_all_cores_half_of_them_and_all_processors_are_tried_as_far_as_they_may_be_used(
    usable: int, cores: int
) -> None:
    counts = candidates(usable, cores)
    assert len(set(counts)) == len(counts)
    assert set(counts) == {1, min(usable, cores), min(usable, max(1, cores // 2)), usable}
    assert all(1 <= count <= usable for count in counts)


@given(st.dictionaries(COUNTS, st.floats(1e-3, 1e6), min_size=1))
def test_what_is_as_fast_as_the_fastest_remains_fewest_threads_first(times_ms: dict[int, float]) -> None:
    remaining = as_fast_as_any(times_ms)
    assert list(remaining) == sorted(remaining)
    assert min(times_ms, key=times_ms.__getitem__) in remaining
    for count, taken_ms in times_ms.items():
        assert (count in remaining) == (taken_ms <= AS_FAST * min(times_ms.values()))


@given(
    elapsed_s=st.floats(0.01, 1e6),
    processors=COUNTS,
    own=st.floats(0, 1),
    others=st.floats(0, 1),
    since=st.floats(0, 1e6),
)
def test_what_others_use_is_what_is_used_less_ones_own(
    elapsed_s: float, processors: int, own: float, others: float, since: float
) -> None:
    available_s = elapsed_s * processors
    before = ProcessorTimes(since, since, since, processors)
    used_s = (own + others) * available_s
    after = ProcessorTimes(since + elapsed_s, since + used_s, since + own * available_s, processors)
    assert share_of_others(before, after) == pytest.approx(others, abs=1e-4)
    assert share_of_others(before, before) == 0.0


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_clocks_that_disagree_still_give_a_share(at_s: float, busy_s: float, own_s: float) -> None:
    share = share_of_others(ProcessorTimes(0.0, 0.0, 0.0, 2), ProcessorTimes(at_s, busy_s, own_s, 2))
    assert 0.0 <= share <= 1.0


def test_only_what_was_chosen_beside_little_else_stays_the_best() -> None:
    assert stays_the_best(0.0)
    assert stays_the_best(BUSY_SHARE)
    assert not stays_the_best(BUSY_SHARE + 0.01)
    assert not stays_the_best(1.0)


def test_what_this_process_computes_counts_as_its_own() -> None:
    before = processor_times()
    while processor_times().own_s < before.own_s + 0.1:
        pass
    after = processor_times()
    assert after.processors >= 1
    assert after.at_s > before.at_s
    assert after.busy_s >= before.busy_s


def taking(times_ms: dict[int, float]) -> Callable[[], float]:
    return lambda: times_ms[torch.get_num_threads()]


def unasked() -> float:
    raise AssertionError("nothing is left to measure")


def test_decode_decides() -> None:
    assert use_fastest((4, 2, 1), taking({1: 9.0, 2: 3.0, 4: 4.0}), unasked) == 2
    assert torch.get_num_threads() == 2


def test_where_decode_is_as_fast_prompts_decide_and_then_the_fewest() -> None:
    decode = taking({1: 9.0, 2: 3.0, 3: 3.1, 4: 3.0})
    assert use_fastest((4, 2, 3, 1), decode, taking({2: 80.0, 3: 40.0, 4: 41.0})) == 3
    assert use_fastest((4, 2, 3, 1), decode, taking({2: 40.0, 3: 40.0, 4: 41.0})) == 2


def test_a_single_count_is_not_measured() -> None:
    assert use_fastest((3,), unasked, unasked) == 3
    assert torch.get_num_threads() == 3


def test_when_time_is_up_the_counts_tried_so_far_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.count(0, 10)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: float(next(now_s)))
    assert use_fastest((2, 1), taking({2: 5.0}), unasked) == 2


def test_the_count_holds_for_threads_that_begin_afterwards() -> None:
    use_fastest((3,), unasked, unasked)
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join(10)
    assert seen == [3]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_owners_word_goes_before_measurements(name: str) -> None:
    torch.set_num_threads(2)
    assert counts_to_try("cpu", 7, {name: "2"}) == (7,)
    assert counts_to_try("cpu", None, {name: "2"}) == (2,)
    assert load_settings({"threads": 5}, {}).options.threads == 5
    assert load_settings({}, {}).options.threads is None


def test_without_it_what_the_processor_has_is_tried_and_on_a_gpu_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "processor_count", lambda: 6)
    monkeypatch.setattr(psutil, "cpu_count", lambda **_: 4)
    assert counts_to_try("cpu", None, {}) == (4, 2, 6, 1)
    monkeypatch.setattr(psutil, "cpu_count", lambda **_: None)
    assert counts_to_try("cpu", None, {}) == (6, 3, 1)
    assert counts_to_try("cuda:0", None, {}) == (torch.get_num_threads(),)
