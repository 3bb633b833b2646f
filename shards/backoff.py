"""Exponential backoff with jitter: how long to wait before something that has failed is tried again. Pure.

Shared by all that retry: downloads, dials of neighbours, links that broke, circuits that nobody grants.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Computes waits that grow by `factor` from `first_s` to `longest_s`, each spread by up to `jitter` of itself to
    both sides: who failed together does not come again together."""

    first_s: float
    longest_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def after(self, failures: int, draw: float = 0.5) -> float:
        """Seconds to wait after so many failures in a row, at least 1; `draw` is uniform in [0, 1)."""
        spread = 1.0 + self.jitter * (2.0 * draw - 1.0)
        try:
            return min(self.first_s * self.factor ** (failures - 1) * spread, self.longest_s)
        except OverflowError:  # of the power: far beyond any longest wait
            return self.longest_s
