"""Weighted fair queue over traffic classes, counted in bytes, with decode first. Pure: no clock, no socket.

Decode goes first, as in section 4 of the MoLink transmission paper (Algorithm 1). Its starvation guard is not
taken over: it counts transmissions, and then sends the whole remainder of a prefill, so a decode waits for as
long as that takes, while a guard that sends one chunk after so many decodes promises no rate at all. Here
each lower class is guaranteed a share of the bytes: it earns credit for that share of all bytes sent while it
waits, and goes first as soon as its credit pays for its next frame. So a class that waits gets its share,
give or take a few frames, however busy the link, and decode is held up by one frame at a time. The credits are the
deficit counters of deficit round robin (Shreedhar and Varghese, 1995), filled by shares and not by rounds.
"""

import math
from collections.abc import Iterable, Mapping

from molink.peer.wire.transmission.classes import TrafficClass


class WeightedFairQueue:
    """Weighted fair queue: credit in bytes for each traffic class. Knows classes and sizes, not frames, so that several
    links, or the chunks of one frame, can be charged to the same account."""

    def __init__(self, shares: Mapping[TrafficClass, float], limit_bytes: float = math.inf) -> None:
        """`limit_bytes`: no class saves up more credit than that."""
        total = sum(shares.values())
        if not all(share >= 0 for share in shares.values()) or not total <= 1.0:
            raise ValueError(f"byte shares must be 0 or more and add up to at most 1, got {dict(shares)}")
        self._shares = tuple(shares.get(traffic_class, 0.0) for traffic_class in TrafficClass)
        self._limit_bytes = limit_bytes
        self._credit_bytes = [0.0] * len(TrafficClass)

    def pays(self, traffic_class: TrafficClass, size_bytes: int) -> bool:
        """Whether a class has earned a transmission of so many bytes."""
        return self._credit_bytes[traffic_class] >= size_bytes > 0

    def choose(self, waiting: Mapping[TrafficClass, int]) -> TrafficClass:
        """Whose turn it is, of one class or more, given the bytes that each would send next.

        The highest class whose credit pays for that; where there is none, the highest that waits.
        """
        if len(waiting) > 1:
            for traffic_class in sorted(waiting):
                credit_bytes = self._credit_bytes[traffic_class]
                if credit_bytes > 0 and credit_bytes >= waiting[traffic_class]:
                    return traffic_class
        return min(waiting)

    def charge(self, sent: TrafficClass, size_bytes: int, waiting: Iterable[TrafficClass]) -> None:
        """`size_bytes` of `sent` have left while the classes of `waiting` had something to send.

        Credit never falls below 0: what a class sent over an idle link is not held against it later. It does
        not grow while the class has nothing to send either.
        """
        for traffic_class in waiting:
            credit_bytes = self._credit_bytes[traffic_class] + self._shares[traffic_class] * size_bytes
            limit_bytes = self._limit_bytes
            self._credit_bytes[traffic_class] = credit_bytes if credit_bytes < limit_bytes else limit_bytes
        self._credit_bytes[sent] = max(0.0, self._credit_bytes[sent] - size_bytes)
