"""Every policy over a line in virtual time: what must arrive arrives, and decode does not wait for prefill."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.links.virtual_line import Conditions, VirtualUplink, quantile

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.just_in_time import ALLOWED_LULL_S
from molink.peer.wire.transmission.line_model import CHUNK_S, LONG_CHUNK_S
from molink.peer.wire.transmission.policies import POLICIES

DECODE, PREFILL = TrafficClass.DECODE, TrafficClass.PREFILL
RATE = 12.5e6
DECODE_BYTES = 32 * 1024
PERIOD_S = 0.040
MIB = 1024 * 1024
IDLE_S = DECODE_BYTES / RATE + 0.015
IDEAL = Conditions()
HARD = Conditions(ack_jitter_s=0.002, arrival_jitter_s=0.0015, late_timer_s=0.001, clock_skew=5e-5)


def shared(policy: str, conditions: Conditions, links: int = 1, decode_link: int = 0) -> VirtualUplink:
    """Two prefills of 16 MiB one after the other on link 0, from 0.3 s and 2.3 s on, among decodes."""
    line = VirtualUplink(policy, RATE, conditions, links)
    line.start()
    line.every(decode_link, DECODE_BYTES, PERIOD_S, until_s=4.5)
    for start_s in (0.3, 2.3):
        line.at(start_s, lambda: line.push(0, PREFILL, 16 * MIB))
    return line


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_delivers_every_byte_once(policy: str) -> None:
    line = VirtualUplink(policy, RATE, Conditions(ack_jitter_s=0.002, late_timer_s=0.001), links=2)
    line.start()
    line.every(0, DECODE_BYTES, PERIOD_S, until_s=2.0)
    for number in range(4):
        line.at(0.3 * number, lambda link=number % 2: line.push(link, PREFILL, 2 * MIB + 17))
        line.at(0.2 * number, lambda: line.push(1, TrafficClass.WEIGHTS, MIB))
    line.clock.run(12.0)
    assert sorted(len(link.delivered) for link in line.links) == sorted([52, 6])
    assert all(not line.uplink.estimate(number).in_flight_bytes for number in (0, 1))


@pytest.mark.parametrize("conditions", [IDEAL, HARD], ids=["ideal", "hard"])
@pytest.mark.parametrize(
    ("links", "decode_link", "median"), [(1, 0, 1.1), (2, 1, 1.2)], ids=["one link", "two links"]
)
def test_decode_hardly_waits_for_a_prefill_and_hardly_delays_it(
    conditions: Conditions, links: int, decode_link: int, median: float
) -> None:
    line = shared("molink", conditions, links, decode_link)
    line.clock.run(8.0)
    delays_s = line.delays_s(decode_link, DECODE, 0.3, 3.8)
    assert quantile(delays_s, 0.5) <= median * IDLE_S
    assert quantile(delays_s, 0.99) <= 1.6 * IDLE_S
    bare_s = 16 * MIB / (RATE - DECODE_BYTES / PERIOD_S) + 0.015
    assert line.delays_s(0, PREFILL, 1.0)[0] <= 1.05 * bare_s


def test_chunks_are_long_while_nobody_decodes_and_the_first_decode_hardly_waits_for_one() -> None:
    line = VirtualUplink("molink", RATE, HARD)
    sizes: list[tuple[float, int]] = []
    put = line.bottleneck.put

    def watched(size_bytes: int, then: Callable[[], None]) -> None:
        sizes.append((line.clock.now_s, size_bytes))
        put(size_bytes, then)

    line.bottleneck.put = watched  # type: ignore[method-assign]
    line.start()
    line.at(0.3, lambda: line.push(0, PREFILL, 24 * MIB))
    line.every(0, 1000, PERIOD_S, until_s=2.0, start_s=1.0)
    line.at(4.0, lambda: line.push(0, PREFILL, 8 * MIB))
    line.at(4.5, lambda: line.uplink.expect_decode(0, 4.52))
    line.clock.run(6.0)

    def typical_s(from_s: float, to_s: float) -> float:
        return (
            quantile(sorted(size for at_s, size in sizes if from_s < at_s < to_s and size > 1000), 0.5) / RATE
        )

    assert typical_s(0.6, 1.0) == pytest.approx(LONG_CHUNK_S, rel=0.2)
    assert typical_s(1.0, 2.0) <= 1.2 * CHUNK_S
    assert typical_s(4.1, 4.5) == pytest.approx(LONG_CHUNK_S, rel=0.2)
    assert typical_s(4.5, 4.52) <= 1.2 * CHUNK_S
    (first_s, *_) = line.delays_s(0, DECODE, 1.0, 1.01)
    assert first_s <= 0.015 + 1.5 * ALLOWED_LULL_S


@pytest.mark.parametrize("policy", ["fifo", "zeromq", "concurrent", "paper", "fixed-chunk"])
def test_the_slowest_decodes_are_slower_under_every_other_policy(policy: str) -> None:
    ours, other = shared("molink", HARD), shared(policy, HARD)
    for line in (ours, other):
        line.clock.run(8.0)
    ours_s, other_s = (line.delays_s(0, DECODE, 0.3, 3.8) for line in (ours, other))
    assert quantile(other_s, 0.99) > 1.2 * quantile(ours_s, 0.99)
    assert quantile(other_s, 0.5) >= quantile(ours_s, 0.5)


@pytest.mark.parametrize("change", [0.5, 2.0])
def test_the_estimate_follows_a_line_that_halves_or_doubles_within_two_seconds(change: float) -> None:
    line = VirtualUplink("molink", RATE, HARD)
    line.start()
    line.every(0, DECODE_BYTES, PERIOD_S, until_s=5.0)
    line.at(0.3, lambda: line.push(0, PREFILL, 30 * MIB))
    line.at(0.4, lambda: line.push(0, PREFILL, 30 * MIB))
    line.at(1.0, lambda: setattr(line.bottleneck, "bytes_per_s", RATE * change))
    line.clock.run(3.0)
    for bytes_per_s in (line.uplink.estimate(0).bandwidth_bytes_per_s, line.uplink.uplink_bytes_per_s):
        assert bytes_per_s == pytest.approx(change * RATE, rel=0.15)
    line.clock.run(3.5)
    idle_s = DECODE_BYTES / (RATE * change) + 0.015
    assert quantile(line.delays_s(0, DECODE, 2.9, 3.4), 0.5) <= 1.3 * idle_s


def test_prefill_gets_its_part_of_a_link_that_decode_nearly_fills_and_decode_stays_bounded() -> None:
    line = VirtualUplink("molink", RATE, HARD)
    line.start()
    line.every(0, DECODE_BYTES, DECODE_BYTES / (0.9 * RATE), until_s=5.0)
    line.at(0.5, lambda: line.push(0, PREFILL, 4 * MIB))
    line.clock.run(6.0)
    (prefill_s,) = line.delays_s(0, PREFILL)
    assert 4 * MIB / prefill_s >= 0.08 * RATE
    assert quantile(line.delays_s(0, DECODE, 0.5, 5.0), 0.99) <= IDLE_S + 0.040


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_link_whose_connections_break_delivers_every_message_once_and_decode_is_soon_fast_again(
    policy: str, seed: int
) -> None:
    line = VirtualUplink(policy, RATE, replace(HARD, seed=seed), links=2)
    line.start()
    line.every(0, DECODE_BYTES, PERIOD_S, until_s=3.0)
    for start_s in (0.3, 1.2):
        line.at(start_s, lambda: line.push(0, PREFILL, 8 * MIB))
    for broken_s, seconds in ((0.5, 0.2), (0.9, 0.01), (1.4, 0.3)):
        line.at(broken_s, lambda seconds=seconds: line.links[0].break_for(seconds))
    line.clock.run(12.0)
    delivered = [done.traffic_class for done in line.links[0].delivered]
    assert (delivered.count(DECODE), delivered.count(PREFILL)) == (75, 2)
    assert line.uplink.estimate(0).in_flight_bytes == 0
    if policy == "molink":
        assert quantile(line.delays_s(0, DECODE, 1.8, 3.0), 0.5) <= 1.2 * IDLE_S


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("decode_bytes", "prefill"), [(8 * 1024, 1.05), (DECODE_BYTES, 1.10)])
def test_a_thin_uplink_is_filled_by_a_prefill_and_decode_hardly_waits(
    seed: int, decode_bytes: int, prefill: float
) -> None:
    rate = 2.5e6
    line = VirtualUplink("molink", rate, replace(HARD, seed=seed))
    line.start()
    line.every(0, decode_bytes, PERIOD_S, until_s=9.0)
    for start_s in (0.3, 4.5):
        line.at(start_s, lambda: line.push(0, PREFILL, 4 * MIB))
    line.clock.run(12.0)
    bare_s = 4 * MIB / (rate - decode_bytes / PERIOD_S) + 0.015
    assert all(took_s <= prefill * bare_s for took_s in line.delays_s(0, PREFILL))
    assert quantile(line.delays_s(0, DECODE, 0.3, 6.0), 0.5) <= 1.2 * (decode_bytes / rate + 0.015)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("links", [2, 3])
def test_links_that_send_bulk_at_once_share_the_uplink(links: int, seed: int) -> None:
    line = VirtualUplink("molink", RATE, replace(HARD, seed=seed), links)
    line.start()
    for link in range(links):
        line.at(0.3, lambda link=link: line.push(link, PREFILL, 8 * MIB))
    line.clock.run(20.0)
    took_s = [line.delays_s(link, PREFILL)[0] for link in range(links)]
    assert max(took_s) <= 1.15 * links * 8 * MIB / RATE
    assert max(took_s) <= 1.5 * min(took_s)
