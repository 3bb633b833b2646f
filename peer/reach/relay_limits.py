"""How much a relay does for whom. Pure: the time is an argument.

Places are those of `dht/membership/door.py`, rates token buckets (`serving/budgets.py`): of each identity, each
network, and all together. Identities cost nothing, so none of the sums depends on how many there are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from molink.dht.membership.door import ConnectionLimits
from molink.peer.serving.budgets import Bucket, RequestRate, RequestRates
from molink.peer.wire.reach.splice import Pace
from molink.routing.latency.relayed_links import BURST_S, MOST_RELAYED_MBPS, relayed_mbps

REACHES = RequestRates(RequestRate(1.0, 16.0), RequestRate(2.0, 48.0), RequestRate(16.0, 128.0))
"""Each has a peer dial this relay."""
DIAL_BACKS = RequestRates(RequestRate(0.02, 4.0), RequestRate(0.05, 8.0), RequestRate(1.0, 16.0))
"""Each costs this machine a connection of its own."""
DESCRIPTOR_PART = 8
_FULL = Bucket(math.inf, 0.0)
"""Of whatever rate."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relay."""

    unproven: int = 64
    proven: int = 320
    of_network: int = 48
    of_identity: int = 12
    stays: int = 128
    pairs: int = 64
    pairs_of_identity: int = 16
    pairs_of_network: int = 32
    mbps: float = MOST_RELAYED_MBPS
    """Of all pairs together; an equal part of it is each one's own."""

    def connections(self) -> ConnectionLimits:
        """Places of connections before and after their proof; who asked nothing yet makes room."""
        return ConnectionLimits(
            unproven=self.unproven,
            proven=self.proven,
            of_network=self.of_network,
            of_identity=self.of_identity,
            proof_s=5.0,
            idle_s=math.inf,
        )


def relay_limits(descriptors: int | None) -> RelayLimits:
    """For a process that may have so many descriptors, of which a relay takes an eighth at most; None: nothing limits
    them."""
    limits = RelayLimits()
    if descriptors is None:
        return limits
    part = descriptors // DESCRIPTOR_PART
    proven = min(limits.proven, part * 3 // 8)
    pairs = min(limits.pairs, part * 3 // 16)  # two each
    return replace(
        limits,
        unproven=min(limits.unproven, part // 4),
        proven=proven,
        of_network=min(limits.of_network, max(8, proven // 4)),
        of_identity=min(limits.of_identity, max(4, proven // 4)),
        stays=min(limits.stays, proven * 2 // 3),
        pairs=pairs,
        pairs_of_network=min(limits.pairs_of_network, max(4, pairs // 2)),
        pairs_of_identity=min(limits.pairs_of_identity, max(4, pairs // 2)),
    )


def offered_mbps(offer: str, uplink_mbps: float | None) -> float | None:
    """What a relay gives away, in megabits per second; None: nothing. `offer`: auto, off, or a number."""
    if offer == "off":
        return None
    if offer != "auto":
        return float(offer)
    return relayed_mbps(uplink_mbps)


class PairPaces:
    """Hierarchical token buckets of joined pairs (as HTB in Linux), both directions of each pair together.

    An equal part of the rate is each pair's own; what others leave of theirs goes to whoever has use for it. So pairs
    that carry little, of which a relay has many, take nothing from those that carry much.
    """

    def __init__(self, rate: Callable[[], tuple[float, int]], clock: Callable[[], float]) -> None:
        """`rate`: bytes a second of all pairs, and how many pairs there are; asked anew for each part."""
        self._rate = rate
        self._clock = clock
        self._all = _FULL

    def pace(self) -> Pace:
        """Of one more pair."""
        own = _FULL

        def pace(count: int) -> float:
            nonlocal own
            (rate, pairs), now_s = self._rate(), self._clock()
            whole, part = (
                RequestRate(rate, rate * BURST_S),
                RequestRate(rate / pairs, rate / pairs * BURST_S),
            )
            own = own.filled(part, now_s).less(count)
            own = replace(own, left=max(own.left, -count))  # what was left by others is not owed
            self._all = self._all.filled(whole, now_s).less(count)
            return min(own.wait_s(0.0, part), self._all.wait_s(0.0, whole))

        return pace
