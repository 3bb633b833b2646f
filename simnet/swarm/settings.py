"""What a simulated swarm is, as values."""

import math
from dataclasses import dataclass, field

from molink.simnet.core.guessing import SimulatedSpeculation

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Churn:
    """How volunteers come and go: as many come as go, on average."""

    mean_stay_s: float = math.inf
    """Stays are exponential; infinite: nobody comes or goes."""
    crash_share: float = 0.2
    """The part of them that goes without a word."""

    def __post_init__(self) -> None:
        if not self.mean_stay_s > 0:
            raise ValueError(f"the mean stay must be above 0 seconds, got {self.mean_stay_s:g}")
        if not 0 <= self.crash_share <= 1:
            raise ValueError(f"the share of crashes must be from 0 to 1, got {self.crash_share:g}")

    def arrivals_per_s(self, peers: int) -> float:
        """As many as leave a swarm of so many peers."""
        return peers / self.mean_stay_s


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    """One run."""

    peers: int = 10_000
    """At the beginning, and on average later."""
    duration_s: float = HOUR_S
    """Requests come for so long; the run ends when the last of them has ended."""
    gateways: int = 4
    rate_rps: float = 1.0
    churn: Churn = field(default_factory=Churn)
    seed: int = 0
    timeout_s: float = 30.0
    """Within which a circuit has to form, as the clients' commands have it."""
    partners: bool = False
    """Whether other peers keep a second copy of each hop's KV cache."""
    undialable: float = 0.0
    """The part of volunteers that nobody can dial."""
    speculation: SimulatedSpeculation | None = None
    """How many guesses travel; None: none."""

    def __post_init__(self) -> None:
        for name in ("peers", "gateways"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.undialable <= 1:
            raise ValueError(f"the part that cannot be dialled must be from 0 to 1, got {self.undialable:g}")
        for name in ("duration_s", "rate_rps", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name):g}")
