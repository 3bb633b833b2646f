"""Whatever the way's jitter, bulk keeps a usable part of the line, and a new line is soon known.

The constants of `estimator` were chosen on seeds 100 and 101; these are others.
"""

import pytest
from support.links.virtual_line import Conditions, VirtualUplink

from molink.peer.wire.transmission.classes import TrafficClass

PREFILL = TrafficClass.PREFILL
SEEDS = (1, 2, 3)


def kept_busy(line: VirtualUplink, link: int, bytes_per_s: float, until_s: float) -> None:
    """From 0.3 s on more bulk waits on a link than it can send."""

    def fill() -> None:
        while line.uplink.waiting(link)[1] < bytes_per_s / 8:
            line.push(link, PREFILL, int(bytes_per_s / 50))
        if line.clock.now_s < until_s:
            line.at(line.clock.now_s + 0.02, fill)

    line.at(0.3, fill)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bursty", [False, True], ids=["uniform", "bursty"])
@pytest.mark.parametrize(
    ("jitter_s", "least_part"), [(0.005, 0.4), (0.015, 0.4), (0.030, 0.4), (0.050, 0.15)]
)
@pytest.mark.parametrize(
    ("mbps", "delay_s"), [(5, 0.015), (20, 0.001), (20, 0.075), (100, 0.001), (100, 0.015)]
)
def test_bulk_keeps_a_part_of_the_line_whatever_the_jitter(
    mbps: int, delay_s: float, jitter_s: float, least_part: float, bursty: bool, seed: int
) -> None:
    rate = mbps * 125_000
    line = VirtualUplink("molink", rate, Conditions(delay_s, jitter_s, bursty, late_timer_s=0.001, seed=seed))
    line.start()
    line.every(0, min(8192, rate // 250), 0.040, until_s=6.0)
    kept_busy(line, 0, rate, until_s=6.0)
    line.clock.run(6.0)
    arrived_bytes = sum(done.size_bytes for done in line.links[0].delivered if done.at_s >= 2.0)
    assert arrived_bytes / 4.0 >= least_part * rate


@pytest.mark.parametrize(("mbps", "delay_s"), [(100, 0.015), (1000, 0.015), (1000, 0.075)])
def test_a_new_line_is_known_after_the_round_trips_that_doubling_takes(mbps: int, delay_s: float) -> None:
    rate = mbps * 125_000
    line = VirtualUplink("molink", rate, Conditions(delay_s))
    line.start()
    kept_busy(line, 0, rate, until_s=3.0)
    line.clock.run(0.3 + 10 * 2 * delay_s)
    assert line.uplink.estimate(0).bandwidth_bytes_per_s == pytest.approx(rate, rel=0.1)
