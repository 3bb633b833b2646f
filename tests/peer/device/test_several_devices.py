"""Whether several devices share layers is decided by what was measured."""

from dataclasses import dataclass, replace

import pytest

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.profiling.profile import Profile
from molink.peer.ranks.choice import (
    LARGE_BYTES,
    SMALL_BYTES,
    DeviceAlone,
    compare,
    measured_link,
    measured_rates,
)
from molink.routing.parallelism.layout_prediction import DeviceLink, all_reduce_s
from molink.routing.parallelism.parallelism import Layout
from molink.simnet.devices.model_shapes import MODEL_SHAPES

SPEC = MODEL_SHAPES["llama-3.1-8b"].spec()
PROFILE = Profile((LayerLatency(1, 0.5), LayerLatency(8, 0.6)), 0.1, 1.0, 1e9, (PrefillLatency(512, 4.0),))
ALONE = DeviceAlone(PROFILE, memory_bytes=30 * 10**9)
NVLINK = DeviceLink(bytes_per_s=200e9, latency_s=5e-6)
HUB = DeviceLink(bytes_per_s=1e9, latency_s=1e-3)


@dataclass(frozen=True, slots=True)
class TimedRanks:
    """Ranks whose all-reduces take what the formula says of a link."""

    ranks: int
    link: DeviceLink

    def all_reduce_s(self, payload_bytes: int) -> float:
        return all_reduce_s(payload_bytes, self.ranks, self.link)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("link", [NVLINK, HUB])
def test_a_link_is_found_from_a_small_and_a_large_sum(ranks: int, link: DeviceLink) -> None:
    found = measured_link(TimedRanks(ranks, link), ranks)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-2)
    assert LARGE_BYTES > 1000 * SMALL_BYTES


def test_rates_are_those_of_a_decode_step_and_of_the_longest_prefill() -> None:
    rates = measured_rates(SPEC, ALONE)
    assert rates.memory_bytes_per_s == pytest.approx(SPEC.layer_bytes[16] / 0.5e-3)
    assert rates.flops_per_s == pytest.approx(2 * SPEC.layer_bytes[16] / 2 * 512 / 4e-3)


def test_gpus_with_a_fast_link_share_the_layers() -> None:
    assert compare(SPEC, SPEC.whole, 2, ALONE, NVLINK).best.layout == Layout(tensor=2)


def test_over_a_slow_link_one_gpu_with_room_for_all_stays_alone() -> None:
    assert compare(SPEC, SPEC.whole, 2, ALONE, HUB).best.layout == Layout()


def test_a_model_that_only_both_have_room_for_is_shared() -> None:
    assert compare(
        SPEC, SPEC.whole, 2, replace(ALONE, memory_bytes=12 * 10**9), NVLINK
    ).best.layout == Layout(tensor=2)


def test_where_both_have_no_room_for_all_they_are_compared_by_what_they_hold_together() -> None:
    choice = compare(SPEC, SPEC.whole, 2, replace(ALONE, memory_bytes=10**9), NVLINK)
    assert choice.best.layout == Layout(tensor=2)
    assert len(choice.reasons) == 2
