"""How often a peer speaks: everything that it sends stays within 32 kbit/s, however large the swarm."""

import math
from dataclasses import dataclass

STATE_COST_BITS = 8 * 250 * 8
FACTS_COST_BITS = 8 * 1250 * 8
STATE_BUDGET_BITS_PER_S = 24_000
FACTS_BUDGET_BITS_PER_S = 5_000
REPAIR_COST_BITS = 170 * 8
REPAIR_BUDGET_BITS_PER_S = 2_000


@dataclass(frozen=True, slots=True)
class DiscoveryTiming:
    """Seconds that govern a peer's control plane; the defaults suit the Internet, tests shorten them."""

    interval_s: float = 17.0
    """Between announcements of an unchanged state in a small swarm."""
    jitter: float = 0.1
    """Part of an interval by which it varies, so that peers do not speak in unison."""
    change_gap_s: float = 0.5
    """Least time between two announcements of changes."""
    change_burst: int = 4
    """Changes announced at that gap before the long-term rate holds."""
    facts_interval_s: float = 1200.0
    """Between announcements of unchanged facts in a small swarm."""
    repair_interval_s: float = 60.0
    """Between comparisons of the whole table with a neighbour's in a small swarm."""
    refresh_interval_s: float = 10.0
    """Between a client's pulls of the table in a small swarm."""
    keepalive_s: float = 10.0
    """A link that carries nothing for so long gets an empty frame."""
    silence_s: float = 30.0
    """A link on which nothing arrives for so long is dead."""
    dial_timeout_s: float = 5.0
    bootstrap_timeout_s: float = 10.0
    table_timeout_s: float = 10.0
    upkeep_s: float = 1.0
    """Between looks at what has expired and whom to connect to."""
    redial_s: float = 20.0
    """A peer that could not be reached is left alone for so long."""
    leave_timeout_s: float = 2.0


def announcement_interval_s(peers: int, small_swarm_s: float = 17.0) -> float:
    """Seconds between a peer's announcements of its state when it knows of `peers` peers.

    Every peer's state reaches every peer over each of its links once. With a mean of 8 links, 8 copies of
    250 bytes (state of up to 146, frame 2, yamux 12, noise 18, TCP and IP 40, half an acknowledgement of 52)
    are 16 kbit in each direction. `peers` states an interval within 24 kbit/s: interval = peers * 16 / 24 s.
    """
    return max(small_swarm_s, peers * STATE_COST_BITS / STATE_BUDGET_BITS_PER_S)


def state_ttl_s(interval_s: float, jitter: float) -> int:
    """Enough for two lost announcements: 57 s in a small swarm."""
    return math.ceil(3 * interval_s * (1 + jitter))


def facts_interval_s(peers: int, small_swarm_s: float = 1200.0) -> float:
    """Seconds between unchanged facts: 8 copies of 1250 bytes, within 5 kbit/s, take 16 s a peer."""
    return max(small_swarm_s, peers * FACTS_COST_BITS / FACTS_BUDGET_BITS_PER_S)


def facts_ttl_s(interval_s: float) -> int:
    """Enough for two lost announcements, which the repair of tables makes unlikely."""
    return math.ceil(3 * interval_s) + 1


def repair_interval_s(peers: int, small_swarm_s: float = 60.0) -> float:
    """Seconds between pulls of a neighbour's states: 170 bytes a peer, within 2 kbit/s."""
    return max(small_swarm_s, peers * REPAIR_COST_BITS / REPAIR_BUDGET_BITS_PER_S)


@dataclass(frozen=True, slots=True)
class Pace:
    """How many announcements may be made at once: a bucket that fills by one each long-term interval."""

    tokens: float
    at: float
    """When `tokens` was counted."""

    def after(self, now: float, timing: DiscoveryTiming, spacing_s: float) -> "Pace":
        """The bucket filled up to `now`."""
        gained = (now - self.at) / max(spacing_s, timing.change_gap_s)
        return Pace(min(float(timing.change_burst), self.tokens + gained), now)

    def wait_s(self, timing: DiscoveryTiming, spacing_s: float) -> float:
        """How long until the next announcement may be made."""
        return 0.0 if self.tokens >= 1.0 else (1.0 - self.tokens) * max(spacing_s, timing.change_gap_s)

    def spent(self) -> "Pace":
        return Pace(self.tokens - 1.0, self.at)


def change_spacing_s(peers: int) -> float:
    """Seconds between a peer's announcements in the long run, however often its state changes: see
    `announcement_interval_s` for the arithmetic."""
    return peers * STATE_COST_BITS / STATE_BUDGET_BITS_PER_S
