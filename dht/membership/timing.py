"""Announcement intervals: everything that a peer sends stays within 32 kbit/s, however many come and go.

What a record costs the average peer, in each direction: its content once, deflated, its id announced over the mean of 8
links, in one direction or the other, an ask for it, and its share of what frames cost (yamux 12, noise 18, TCP and
IP 40, half an acknowledgement 26). `docs/decisions/0011` has the numbers.
"""

import math
from dataclasses import dataclass

DEGREE = 4
"""Links that a peer dials. Others dial it too: the mean is twice as many, the most three times, so that there is always
room for a newcomer."""
STATE_COST_BITS = 8 * 170
"""100 to 148 bytes of content, 5 names, an ask."""
FACTS_COST_BITS = 8 * (600 + 600)
"""500 to 550 bytes and names; a newcomer also copies everybody's from somebody, which is once as much again."""
CHANGED_FACTS_BITS_PER_S = 2_000
LOSS_COST_BITS = STATE_COST_BITS
NEWS_BUDGET_BITS_PER_S = 24_600
"""Records of all peers together. The rest of 32 kbit/s is for frames, anti-entropy and what varies."""
LEAST_STATES_BITS_PER_S = 2_500
"""Left to states that have not changed, whatever else there is to tell."""
PUSH_BITS_PER_S = 1_600
"""Of news, as counted above, up to which each record is pushed over all links, which costs ten times as much."""
ANTI_ENTROPY_COST_BITS = 16 * 8
"""A tag and a sequence."""
ANTI_ENTROPY_BUDGET_BITS_PER_S = 1_000
NEWS_AVERAGED_S = 120.0
MEASURED_LINKS_UP_TO = 512
"""Peers up to which all measured links are announced; in larger swarms coordinates say as much."""


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
    anti_entropy_interval_s: float = 60.0
    """Between comparisons of the whole table with a neighbour's in a small swarm."""
    refresh_interval_s: float = 10.0
    """Between a client's pulls of the table in a small swarm."""
    ihave_interval_s: float = 5.0
    """Most between two announcements of record ids (IHAVE) to a neighbour."""
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
    heard_s: float = 5.0
    """Between questions to others whether they show this peer, until they do."""
    remember_s: float = 180.0
    """Between notes of whom to begin from after a restart."""
    refute_s: float = 60.0
    """Within which a peer that two others call gone must have said something newer."""
    redial_before_loss_s: float = 10.0
    """A neighbour that went without a word is dialled once within so long, before it is called gone."""


@dataclass(frozen=True, slots=True)
class NewsRate:
    """Rate of all peers' records, in bits per second: an exponentially weighted mean over minutes."""

    bits_per_s: float
    at: float
    """When it was counted."""

    def after(self, now: float, cost_bits: float = 0.0) -> "NewsRate":
        """With a record that arrived at `now`, or as it is by then."""
        kept = self.bits_per_s * math.exp(-(now - self.at) / NEWS_AVERAGED_S)
        return NewsRate(kept + cost_bits / NEWS_AVERAGED_S, now)

    def times(self, copies: float) -> "NewsRate":
        """As if each record had been so many."""
        return NewsRate(self.bits_per_s * copies, self.at)

    @property
    def pushes(self) -> bool:
        """Whether there is so little that records are pushed instead of announced by id."""
        return self.bits_per_s <= PUSH_BITS_PER_S


def announcement_interval_s(
    peers: int, news_bits_per_s: float = 0.0, before_s: float = math.inf, small_swarm_s: float = 17.0
) -> float:
    """Seconds between a peer's announcements of its state when it knows of `peers` peers.

    `news_bits_per_s`: what all records have cost of late; `before_s`: the interval that held then. What is not states
    that everybody repeats is changes, arrivals and losses, which nobody can put off: the repetitions get what they
    leave of the budget. Where all peers do so, all records together take the budget.
    """
    if peers * STATE_COST_BITS / small_swarm_s <= LEAST_STATES_BITS_PER_S:
        return small_swarm_s
    others = max(0.0, news_bits_per_s - peers * STATE_COST_BITS / before_s)
    left = max(LEAST_STATES_BITS_PER_S, NEWS_BUDGET_BITS_PER_S - others)
    return max(small_swarm_s, peers * STATE_COST_BITS / left)


def ihave_interval_s(news_bits_per_s: float) -> float:
    """Seconds between two IHAVEs to the same neighbour: 1 where there is little to say, 5 where the budget is used."""
    return 1.0 + 4.0 * min(1.0, news_bits_per_s / NEWS_BUDGET_BITS_PER_S)


def ihave_slowdown(links: int) -> float:
    """How many times as long as usual the gap between IHAVEs is over so many links: each is a frame, and costs what it
    costs whatever is in it."""
    return max(1.0, links / (3 * DEGREE))


def announced_links(peers: int) -> int:
    """Returns how many of its measured links a peer's facts name, the nearest ones."""
    return 32 if peers <= MEASURED_LINKS_UP_TO else 0


def state_ttl_s(interval_s: float, jitter: float) -> int:
    """Enough for two lost announcements: 57 s in a small swarm."""
    return math.ceil(3 * interval_s * (1 + jitter))


def facts_interval_s(peers: int, small_swarm_s: float = 1200.0) -> float:
    """Seconds between unchanged facts: a state names the facts that it goes with, so they may be old. At most a
    day and a half, and in large swarms so seldom that they take half a kbit/s."""
    return min(130_000.0, max(small_swarm_s, peers * FACTS_COST_BITS / 2 / 500))


def facts_spacing_s(peers: int) -> float:
    """Seconds between a peer's announcements of facts that have changed, in the long run: 2 kbit/s of all of them."""
    return peers * FACTS_COST_BITS / 2 / CHANGED_FACTS_BITS_PER_S


def facts_ttl_s(interval_s: float) -> int:
    """Enough for two lost announcements, which anti-entropy makes unlikely."""
    return math.ceil(3 * interval_s) + 1


def anti_entropy_interval_s(peers: int, small_swarm_s: float = 60.0) -> float:
    """Seconds between comparisons of tables: 16 bytes a peer, within 1 kbit/s."""
    return max(small_swarm_s, peers * ANTI_ENTROPY_COST_BITS / ANTI_ENTROPY_BUDGET_BITS_PER_S)


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Token bucket of announcements: it gains one token each long-term interval."""

    tokens: float
    at: float
    """When `tokens` was counted."""

    def refilled(self, now: float, timing: DiscoveryTiming, spacing_s: float, most: int) -> "TokenBucket":
        """Returns the bucket refilled up to `now`; it holds `most` tokens."""
        gained = (now - self.at) / max(spacing_s, timing.change_gap_s)
        return TokenBucket(min(float(most), self.tokens + gained), now)

    def wait_s(self, timing: DiscoveryTiming, spacing_s: float) -> float:
        """Returns the seconds until the next announcement may be made."""
        return 0.0 if self.tokens >= 1.0 else (1.0 - self.tokens) * max(spacing_s, timing.change_gap_s)

    def spend(self) -> "TokenBucket":
        return TokenBucket(max(0.0, self.tokens - 1.0), self.at)


def change_spacing_s(peers: int, interval_s: float, small_swarm_s: float = 17.0) -> float:
    """Seconds between a peer's announcements in the long run, however often its state changes: as often as an unchanged
    state, and in a small swarm as the budget allows. `interval_s`: between unchanged states."""
    if interval_s > small_swarm_s:
        return interval_s
    return peers * STATE_COST_BITS / NEWS_BUDGET_BITS_PER_S


def change_burst(timing: DiscoveryTiming, news_bits_per_s: float) -> int:
    """Changes of state that may be announced at once; half as many where the budget is more than half used."""
    return timing.change_burst // 2 if _is_busy(news_bits_per_s) else timing.change_burst


def facts_burst(news_bits_per_s: float) -> int:
    """Facts that may be announced at once: a newcomer's, and those that it has measured soon after."""
    return 1 if _is_busy(news_bits_per_s) else 2


def _is_busy(news_bits_per_s: float) -> bool:
    return news_bits_per_s > NEWS_BUDGET_BITS_PER_S / 2
