"""Reliability estimate: how likely a peer is lost, from how long it has been seen.

Lifetimes are taken as exponential, with a Gamma prior on the rate of loss: after `losses` losses in
`uptime_s` seconds of being seen alive, the posterior mean of the rate is (1 + losses) / (mean_lifetime_s +
uptime_s), the prior counting as one loss in one mean lifetime (Gelman et al., Bayesian Data Analysis,
section 2.6).
"""

import math
from dataclasses import dataclass

from molink.routing.cost.cost import CostModel


@dataclass(frozen=True, slots=True)
class PeerObservation:
    """Observation of a peer by the router itself. The defaults say that it has seen nothing."""

    uptime_s: float = 0.0
    """Seconds during which the peer was seen alive."""
    losses: int = 0
    """How often it was lost without having said that it leaves."""
    client_rtt_ms: float | None = None
    """Round trip between the client and the peer."""
    uplink_mbps: float | None = None
    """What the peer's line carries away from it."""
    trips: int = 0
    """Times round circuits that it was the head of, without the prompts' own."""
    trip_tokens: float = 0.0
    """That these brought."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.uptime_s) and self.uptime_s >= 0):
            raise ValueError(f"uptime_s must be finite and not negative, got {self.uptime_s}")
        for name in ("losses", "trips"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not (math.isfinite(self.trip_tokens) and self.trip_tokens >= 0):
            raise ValueError(f"trip_tokens must be finite and not negative, got {self.trip_tokens}")
        if self.client_rtt_ms is not None and not (
            math.isfinite(self.client_rtt_ms) and self.client_rtt_ms >= 0
        ):
            raise ValueError(f"client_rtt_ms must be finite and not negative, got {self.client_rtt_ms}")
        if self.uplink_mbps is not None and not (math.isfinite(self.uplink_mbps) and self.uplink_mbps > 0):
            raise ValueError(f"uplink_mbps must be finite and above 0, got {self.uplink_mbps}")


UNSEEN = PeerObservation()


def loss_rate_per_s(uptime_s: float, losses: int = 0, cost: CostModel = CostModel()) -> float:  # noqa: B008
    """Expected losses per second of a peer that was seen alive for so long and lost so often."""
    return (1 + losses) / (cost.mean_lifetime_s + uptime_s)


def loss_probability(rate_per_s: float, age_s: float, session_s: float) -> float:
    """Returns the probability that a peer, last heard of `age_s` ago, is gone before the end of a session of
    `session_s` seconds."""
    return -math.expm1(-rate_per_s * (max(0.0, age_s) + session_s))
