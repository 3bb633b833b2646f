"""How long the way between two peers really takes, whatever anybody announces."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import Generator

from molink.dht.records.records import Coordinate
from molink.routing.cost.cost import CostModel
from molink.routing.latency.coordinates import USABLE_ERROR, CoordinateTable, fit, predicted_rtt_ms
from molink.simnet.core.matrices import RttMatrix

_NOISE = 0.2
"""Deviation of a pair's factor on the regions' round trip, as in the testbeds of the decentralized-scheduling paper."""
_LEAST_FACTOR = 0.05
_LAST_MILE_MEDIAN_MS, _LAST_MILE_SPREAD = 5.0, 0.6
"""One way between a home and its region, as in `testbeds`."""


class Places(Protocol):
    """Who is how far from whom."""

    def rtt_ms(self, one: str, other: str) -> float:
        """The round trip between two ends, by id; the same in both directions, 0 to itself."""
        ...


@dataclass(frozen=True, slots=True)
class Home:
    """Where somebody stands."""

    region: int
    last_mile_ms: float
    """One way between the home and its region."""


class RegionPlaces:
    """Homes in the regions of a matrix. Ends are added as they come."""

    def __init__(self, matrix: RttMatrix) -> None:
        self._matrix = matrix
        self._rtt_ms = (matrix.rtt_ms + matrix.rtt_ms.T) / 2
        self._regions: CoordinateTable = fit(matrix.rtt_ms)
        self._homes: dict[str, Home] = {}

    @property
    def regions(self) -> Sequence[str]:
        return self._matrix.regions

    def draw(self, rng: Generator, end: str) -> Home:
        """Settles an end in any of the regions."""
        last_mile_ms = float(rng.lognormal(math.log(_LAST_MILE_MEDIAN_MS), _LAST_MILE_SPREAD))
        home = Home(int(rng.integers(len(self._matrix.regions))), last_mile_ms)
        self._homes[end] = home
        return home

    def coordinate(self, home: Home) -> Coordinate:
        """What a peer there would announce: its region's place, and the way there in the height."""
        table, region = self._regions, home.region
        return Coordinate(
            tuple(float(np.float32(part)) for part in table.positions[region]),
            float(np.float32(table.heights_ms[region] + 2 * home.last_mile_ms)),
            float(np.float32(table.errors[region])),
        )

    def rtt_ms(self, one: str, other: str) -> float:
        """The regions' round trip times the pair's own factor, and both last miles."""
        if one == other:
            return 0.0
        here, there = self._homes[one], self._homes[other]
        between_ms = float(self._rtt_ms[here.region, there.region]) * _factor(one, other)
        return between_ms + 2 * (here.last_mile_ms + there.last_mile_ms)


class ListedPlaces:
    """Round trips that somebody measured; of the others, what a router assumes: what coordinates predict, if both ends
    have one that is good enough, or a guess."""

    def __init__(
        self, rtt_ms: Mapping[tuple[str, str], float], coordinates: Mapping[str, Coordinate | None]
    ) -> None:
        self._rtt_ms = rtt_ms
        self._coordinates = {
            end: place
            for end, place in coordinates.items()
            if place is not None and place.error <= USABLE_ERROR
        }
        self._unknown_ms = CostModel().unknown_rtt_ms

    def rtt_ms(self, one: str, other: str) -> float:
        if one == other:
            return 0.0
        measured_ms = self._rtt_ms.get((one, other), self._rtt_ms.get((other, one)))
        if measured_ms is not None:
            return measured_ms
        here, there = self._coordinates.get(one), self._coordinates.get(other)
        return self._unknown_ms if here is None or there is None else predicted_rtt_ms(here, there)


def _factor(one: str, other: str) -> float:
    """About 1, and always the same for one pair: the sum of twelve uniform numbers is all but normal."""
    digest = hashlib.blake2b(
        f"{min(one, other)}\0{max(one, other)}".encode(), digest_size=24, usedforsecurity=False
    ).digest()
    drawn = sum(int.from_bytes(digest[at : at + 2], "little") for at in range(0, 24, 2)) / 65_536 - 6.0
    return max(_LEAST_FACTOR, 1.0 + _NOISE * drawn)
