"""Every policy over a line in virtual time: what must arrive arrives, and decode does not wait for prefill."""

import pytest
from virtual_line import Conditions, VirtualUplink

from molink.peer.transmission.classes import TrafficClass
from molink.peer.transmission.policies import POLICIES

DECODE, PREFILL = TrafficClass.DECODE, TrafficClass.PREFILL
RATE = 12.5e6
MIB = 1024 * 1024


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_delivers_every_byte_once(policy: str) -> None:
    line = VirtualUplink(policy, RATE, Conditions(ack_jitter_s=0.002, late_timer_s=0.001), links=2)
    line.start()
    line.every(0, 32 * 1024, 0.04, until_s=2.0)
    for number in range(4):
        line.at(0.3 * number, lambda link=number % 2: line.push(link, PREFILL, 2 * MIB + 17))
        line.at(0.2 * number, lambda: line.push(1, TrafficClass.WEIGHTS, MIB))
    line.clock.run(12.0)
    assert sorted(len(link.delivered) for link in line.links) == sorted([52, 6])
    assert all(not line.uplink.estimate(number).in_flight_bytes for number in (0, 1))
