"""What trips take, as measured: what they wait, and what guesses lengthen them by. Rows cost more than is
predicted where nobody knows an uplink's rate, where tokens are sampled, and where a machine is busy. Pure."""

from typing import Final

UNPREDICTED: Final = 1.25
"""A trip that takes longer than predicted by this factor has waited: predictions are not better than that."""
WAIT_WEIGHT: Final = 0.2
"""Of the latest trip in the average of how long trips wait."""
REMEMBERED_TRIPS: Final = 64
"""About so many, the latest ones, count."""
PRIOR_MS2: Final = 160.0
"""What speaks for the prediction, in squared milliseconds: as much as ten trips that guesses lengthen by 4 ms. Where
they lengthen trips by less than trips differ anyway, the prediction stays."""
MOST: Final = 8.0
"""Trips take so many times longer than predicted at most, whatever was measured."""
CLIPPED: Final = 0.5
"""A trip counts as no further from the mean than this part of it: one that met a lost packet says nothing of rows."""


class TripTimes:
    """Owns what trips of one circuit took of late: by how much longer than predicted, and a line through them, of least
    squares, over what guesses were predicted to lengthen them by."""

    def __init__(self) -> None:
        self.waited_ms = 0.0
        """By how much trips took longer than predicted, of late."""
        self._trips = 0
        self._lengthened_ms = self._taken_ms = 0.0
        """Means."""
        self._spread_ms2 = self._together_ms2 = 0.0
        """Sums over the trips: of squares of the lengthening's deviations, and of their products with the taken's."""

    def record(self, predicted_ms: float, lengthened_ms: float, taken_ms: float) -> None:
        """A trip took so long, and was predicted to take `predicted_ms`, of which guesses were to make
        `lengthened_ms`."""
        waited_ms = max(0.0, taken_ms - UNPREDICTED * predicted_ms)
        self.waited_ms += WAIT_WEIGHT * (waited_ms - self.waited_ms)
        self._trips = min(self._trips + 1, REMEMBERED_TRIPS)
        more_ms, longer_ms = lengthened_ms - self._lengthened_ms, taken_ms - self._taken_ms
        if self._trips > 1:
            most_ms = CLIPPED * self._taken_ms
            longer_ms = min(max(longer_ms, -most_ms), most_ms)
        self._lengthened_ms += more_ms / self._trips
        self._taken_ms += longer_ms / self._trips
        kept, counted = 1 - 1 / REMEMBERED_TRIPS, 1 - 1 / self._trips
        self._spread_ms2 = kept * self._spread_ms2 + counted * more_ms * more_ms
        self._together_ms2 = kept * self._together_ms2 + counted * more_ms * longer_ms

    @property
    def lengthens(self) -> float:
        """Milliseconds that trips take longer for each that guesses are predicted to lengthen them by: 1 to MOST."""
        slope = (self._together_ms2 + PRIOR_MS2) / (self._spread_ms2 + PRIOR_MS2)
        return min(max(slope, 1.0), MOST)
