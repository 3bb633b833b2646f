"""What a partner takes of a copy, and how much of it it computes at once: the next tokens of the epoch that it is in,
within bounds. Pure.

A hop that sends anything else loses the copy; nobody else notices.
"""

import math
from dataclasses import dataclass

from molink.peer.redundancy.copy_sending import PORTION_BYTES, WINDOW_BYTES

PIECE_S = 0.02
"""What a piece of a copy's computing may take."""
LONGER = 2.0
"""Where a single token takes longer than half of that: a piece may take so many times as long."""
SHORT_PART = 0.75
"""Of what it may take: a piece that takes no more is followed by longer ones."""
MOST_PIECE_TOKENS = 256
TOO_MUCH = "more came than may wait here"


@dataclass(slots=True)
class CopyIntake:
    """How far a copy has come at the partner."""

    capacity_tokens: int
    kept_tokens: int = 0
    """Written: the copy covers so many."""
    awaited_tokens: int = 0
    """Where the next part has to begin: behind what waits to be written."""
    waiting_bytes: int = 0
    behind_tokens: int = 0
    """That the hop had computed beyond what has come, when it sent that."""
    is_begun: bool = True
    """Whether anything has come since it began anew; what comes before that was on its way already."""

    def is_late(self, start: int) -> bool:
        """Whether a part that begins there was sent before the hop knew where to go on."""
        return not self.is_begun and start != self.awaited_tokens

    def fault_of(self, start: int, tokens: int, payload_bytes: int) -> str | None:
        """What is wrong with a part; None: nothing, and it waits to be written."""
        if start != self.awaited_tokens:
            return f"tokens from {start} on came where those from {self.awaited_tokens} on were awaited"
        if tokens < 1 or payload_bytes < 1:
            return "a part is empty"
        if start + tokens > self.capacity_tokens:
            return f"{start + tokens} tokens are more than the {self.capacity_tokens} that were reserved"
        # a token may take more than a window, and goes then
        is_alone = tokens == 1 and not self.waiting_bytes
        if not is_alone and self.waiting_bytes + payload_bytes > WINDOW_BYTES + PORTION_BYTES:
            return TOO_MUCH
        self.awaited_tokens += tokens
        self.waiting_bytes += payload_bytes
        self.is_begun = True
        return None

    def record_written(self, tokens: int, payload_bytes: int) -> None:
        """The part that waited longest has been written."""
        self.kept_tokens += tokens
        self.waiting_bytes -= payload_bytes

    def record_lag(self, behind_tokens: int) -> None:
        """As the hop says it of itself."""
        self.behind_tokens = min(behind_tokens, self.capacity_tokens - self.awaited_tokens)

    @property
    def lacking_tokens(self) -> int:
        """What the copy lacks, waiting parts included."""
        return self.awaited_tokens - self.kept_tokens + self.behind_tokens

    def restart(self) -> None:
        """What waited is dropped: another hop, another epoch, or in another form, sends from here on."""
        self.awaited_tokens, self.waiting_bytes, self.is_begun = self.kept_tokens, 0, False


@dataclass(slots=True)
class ComputingPace:
    """How many tokens of copies are computed at once, so that a decode step that comes meanwhile waits no longer than
    PIECE_S, or than LONGER times what the shortest piece takes: a token takes nearly as long as sixteen, where weights
    have to be read for either. Doubled while pieces are short, cut to what would have fitted when one was not, as
    congestion windows are (after Jacobson, Congestion avoidance and control, 1988)."""

    tokens: int = 1
    """Of the next piece, at most."""
    least_s: float = math.inf
    """What the shortest piece so far has taken."""

    @property
    def limit_s(self) -> float:
        """What a piece may take."""
        return PIECE_S if math.isinf(self.least_s) else max(PIECE_S, LONGER * self.least_s)

    def record(self, tokens: int, taken_s: float) -> None:
        """So many tokens have taken so long."""
        self.least_s = min(self.least_s, taken_s)
        if taken_s > self.limit_s:
            self.tokens = max(1, min(self.tokens, int(tokens * self.limit_s / taken_s)))
        elif tokens >= self.tokens and taken_s <= SHORT_PART * self.limit_s:
            self.tokens = min(2 * self.tokens, MOST_PIECE_TOKENS)
